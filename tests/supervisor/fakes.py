"""A System without an operating system: it plays a script, and its clock jumps to the next deadline."""

from __future__ import annotations

from trainer_launch.model.errors import NotRunnableError
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import System


class FakeSystem(System):
    """`script`: (time, event) pairs in order of time. After a `signal_all` on an empty script all is childless.

    `calls` records what was done, as (time, word, ...); `immortal` names what no signal ends.
    """

    def __init__(self, *script, missing=(), immortal=(), evidence=None, files=None, lines=()):
        self.clock_s = 0.0
        self.calls = []
        self._script = sorted(script, key=lambda entry: entry.at_s)
        self._missing = set(missing)
        self._immortal = tuple(immortal)
        self._evidence = evidence or Evidence()
        self._files = files or {}
        self._lines = tuple(lines)
        self._tell_childless = False

    def now(self):
        return self.clock_s

    def wait(self, until_s):
        if self._script and (until_s is None or self._script[0].at_s <= until_s):
            event = self._script.pop(0)
            self.clock_s = max(self.clock_s, event.at_s)
            return [event]
        if self._tell_childless and not self._immortal and not self._script:
            return [ev.Childless(self.clock_s)]
        assert until_s is not None, f"would sleep for ever at {self.clock_s}: {self.calls}"
        self.clock_s = max(self.clock_s, until_s)
        return []

    def spawn(self, process, prepare=None):
        if process.name in self._missing:
            raise NotRunnableError(f"no {process.name}", found=False)
        self._note("spawn", process.name)
        return 100 + len(self.calls)

    def signal_leader(self, name, number):
        self._note("leader", name, int(number))

    def signal_group(self, name, number):
        self._note("group", name, int(number))
        return 1

    def signal_all(self, number, *, again, sparing=frozenset()):
        self._tell_childless = True
        self._note("all again" if again else "all but daemons" if sparing else "all", int(number))
        return 1

    def descendants(self):
        return self._immortal

    def resolve_names(self, names):
        self._note("resolve", *names)

    def stop_resolving(self):
        self._note("stop resolving")

    def look(self):
        self._note("look")
        return self._evidence

    def clean(self):
        self._note("clean")

    def read_text(self, path):
        return self._files.get(path)

    def last_lines(self, name, rank=None):
        return self._lines

    def drain(self, wait_s):
        self._note("drain")

    def _note(self, *words):
        self.calls.append((round(self.clock_s, 3), *words))
