"""An operating system that is not there: programs that behave as a test says, and a clock that jumps."""

from __future__ import annotations

import heapq
import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_launch.host.process_tree import ProcessEntry
from trainer_launch.model import Failure, Outcome, Process
from trainer_launch.model.errors import NotRunnableError
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import Happened, System

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
SOON_S = 0.1  # in which a program that minds a signal ends


def failure_of(ended: Outcome) -> Failure:
    """The failure of a run that has one."""
    assert ended.failure is not None
    return ended.failure


@dataclass(frozen=True)
class Program:
    """One life of a program. By default it runs until a signal ends it."""

    ends_s: float | None = None  # after its start, by itself
    code: int = 0
    number: int | None = None  # the signal that ends it then, in place of a code
    error: str = ""  # what it writes into torch's error file at that end, or when it is ended
    term_s: float | None = SOON_S  # how long it takes to end after SIGTERM; None: it ignores it
    term_code: int | None = None  # and the code then; None: it dies of the signal
    dies_of: tuple[int, ...] = ()  # signals beside SIGTERM that end it
    is_stuck: bool = False  # SIGKILL does not end it, either
    leaves: tuple[Program, ...] = ()  # what it starts in its session, and leaves behind


@dataclass
class Living:
    """A process of this system."""

    process: Process
    program: Program
    session: int
    heard: set[int] = field(default_factory=set)


class FakeSystem(System):
    """`programs` has the lives of each program, by its name; those that have no more run until they are ended.

    `calls` records what was done, as (time, word, …).
    """

    def __init__(
        self,
        programs: Mapping[str, Sequence[Program]] = {},
        missing: Collection[str] = (),
    ) -> None:
        self.clock_s = 0.0
        self.calls: list[tuple[object, ...]] = []
        self.mark = None
        self.unasked = set()
        self.alive: dict[int, Living] = {}
        self._lives = {name: list(lives) for name, lives in programs.items()}
        self._missing, self._evidence = set(missing), Evidence()
        self._to_come: list[tuple[float, int, Callable[[], Happened]]] = []
        self._count = 100
        self._is_poked = False
        self.clean = lambda: self._note("clean")
        self.woken = lambda: None

    # -- what a test says ---------------------------------------------------------------------

    def at(self, at_s: float, what: Callable[[], Happened | None]) -> FakeSystem:
        """Let this happen then."""
        self._count += 1
        heapq.heappush(self._to_come, (at_s, self._count, lambda: what() or Happened()))
        return self

    def signalled(self, at_s: float, *numbers: int) -> FakeSystem:
        """Signals to us."""
        return self.at(at_s, lambda: Happened(signals=numbers))

    def ends(self, at_s: float, name: str, number: int) -> FakeSystem:
        """The kernel ends the present process of this name at last, as one that thaws."""
        return self.at(at_s, lambda: self._end(self.pid_of(name), -number))

    def pid_of(self, name: str) -> int:
        """Of the first process of this name that lives."""
        return next(pid for pid, living in self.alive.items() if living.process.name == name)

    def starts(self, name: str) -> list[float]:
        """When it was started."""
        return [call[0] for call in self.calls if call[1:] == ("spawn", name)]  # type: ignore[misc]

    # -- the operating system -----------------------------------------------------------------

    def now(self) -> float:
        return self.clock_s

    def poke(self) -> None:
        self._is_poked = True

    def wait(self, until_s: float | None) -> Happened:
        if self._is_poked:
            self._is_poked = False
            return Happened()
        if self._to_come and (until_s is None or self._to_come[0][0] <= until_s):
            at_s, _, happens = heapq.heappop(self._to_come)
            self.clock_s = max(self.clock_s, at_s)
            return happens()
        assert until_s is not None, f"would sleep for ever at {self.clock_s}: {self.calls}"
        self.clock_s = max(self.clock_s, until_s)
        return Happened()

    def spawn(self, process, prepare=None):
        if process.name in self._missing:
            raise NotRunnableError(f"no {process.name}", exists=False)
        self._note("spawn", process.name)
        lives = self._lives.get(process.name, [])
        return self._born(process, lives.pop(0) if lives else Program())

    def _born(self, process: Process, program: Program, session: int | None = None) -> int:
        self._count += 1
        pid = self._count
        self.alive[pid] = Living(process, program, session or pid)
        for left in program.leaves:
            self._born(process, left, pid)
        if program.ends_s is not None:
            status = program.code if program.number is None else -program.number
            self.at(self.clock_s + program.ends_s, lambda: self._end(pid, status))
        return pid

    def _end(self, pid: int, status: int) -> Happened:
        living = self.alive.pop(pid, None)
        if living is None:
            return Happened()
        path = living.process.env.get("TORCHELASTIC_ERROR_FILE")
        if living.program.error and path:
            Path(path).write_text(json.dumps({"message": {"message": living.program.error}}), encoding="utf-8")
        return Happened(ended=((pid, status),))

    def _hears(self, pid: int, number: int) -> None:
        living = self.alive[pid]
        program = living.program
        living.heard.add(number)
        if number == KILL and not program.is_stuck:
            self.at(self.clock_s, lambda: self._end(pid, -KILL))
        elif number == TERM and program.term_s is not None:
            status = -TERM if program.term_code is None else program.term_code
            self.at(self.clock_s + program.term_s, lambda: self._end(pid, status))
        elif number in program.dies_of:
            self.at(self.clock_s + SOON_S, lambda: self._end(pid, -number))

    def begin_start(self):
        pass

    def signal_leader(self, pid, number, *, wakes=False):
        if pid in self.alive:
            self._note("leader", self.alive[pid].process.name, int(number))
            self._hears(pid, number)

    def signal_groups(self, pids, number):
        reached = [other for other, living in self.alive.items() if living.session in pids]
        for other in reached:
            self._note("group", self.alive[other].process.name, int(number))
            self._hears(other, number)
        return len(reached)

    def signal_all(self, number, *, again, sparing=frozenset(), besides=()):
        self._note("all again" if again else "all but daemons" if sparing else "all", int(number))
        reached = [pid for pid in self.alive if self._key(pid) not in besides]
        reached = [] if sparing else [pid for pid in reached if again or number not in self.alive[pid].heard]
        for pid in reached:
            self._hears(pid, number)
        return len(reached)

    def is_alone(self, besides=()):
        return all(self._key(pid) in besides for pid in self.alive)

    def left(self):
        return tuple(
            ProcessEntry(pid=pid, name=living.process.name, state="D", parent=1, group=pid, session=pid, started=1)
            for pid, living in self.alive.items()
        )

    def _key(self, pid: int) -> tuple[int, int]:
        return pid, 1

    def look(self):
        return self._evidence

    def catch_up(self, name):
        pass

    def last_lines(self, name, rank=None):
        return ()

    def last_errors(self, name):
        return ()

    def drain(self, wait_s):
        self._note("drain")

    def _note(self, *words):
        self.calls.append((round(self.clock_s, 3), *words))
