"""Commands on the job's hosts, each with a deadline: PID 1 starts them, reaps them by pid, and never waits for one.

They are no part of the job: signals to everything below the launcher spare them.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from msgspec import Struct

from trainer_launch.host import process_tree
from trainer_launch.host.deadline_subprocess import OUTPUT_BYTES, Ended
from trainer_launch.supervisor.system import System

_AT_ONCE = 64

Done = Callable[[Ended], object]


class _Command(Struct, frozen=True):
    argv: Sequence[str]
    limit_s: float
    done: Done


class _Running(Struct, frozen=True):
    command: _Command
    popen: subprocess.Popen[bytes]
    outputs: tuple[int, int]  # files with its stdout and its stderr
    started_s: float

    @property
    def due_s(self) -> float:
        return self.started_s + self.command.limit_s


class HostCommands:
    """Those that are under way, and those that wait for their turn."""

    def __init__(self, system: System, env: Mapping[str, str]) -> None:
        self._system, self._env = system, env
        self._waiting: deque[_Command] = deque()
        self._running: dict[int, _Running] = {}  # by pid

    def start(self, argv: Sequence[str], limit_s: float, done: Done) -> None:
        """Start a command; `done` is called in the main loop with how it ended."""
        self._waiting.append(_Command(argv, limit_s, done))
        self._begin()

    def run(self, argv: Sequence[str], limit_s: float, post: Callable[[Callable[[], None]], None]) -> Ended:
        """In a thread: have the main loop start a command by `post`, and wait for its end."""
        ended: SimpleQueue[Ended] = SimpleQueue()
        post(lambda: self.start(argv, limit_s, ended.put))
        return ended.get()

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        return min((running.due_s for running in self._running.values()), default=None)

    def tick(self, now_s: float) -> None:
        """Kill what is beyond its deadline. What is stuck in the kernel is left behind."""
        for pid, running in list(self._running.items()):
            if now_s >= running.due_s:
                process_tree.kill(pid, below_first=False)  # a shell would say who was killed
                self._ended(pid, None)

    def reaped(self, pid: int, status: int) -> bool:
        """A child has ended; whether it was a command."""
        if pid not in self._running:
            return False
        self._ended(pid, status)
        return True

    def close(self) -> None:
        """Kill what still runs: nobody waits for it any more."""
        for pid in self._running:
            process_tree.kill(pid)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < _AT_ONCE:
            command = self._waiting.popleft()
            outputs = []
            try:
                outputs += [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdout", "stderr")]
                popen = subprocess.Popen(
                    command.argv,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    start_new_session=True,
                )
            except (OSError, ValueError) as problem:  # the latter: a NUL in a word
                for fd in outputs:
                    os.close(fd)
                why = problem if isinstance(problem, OSError) else OSError(str(problem))
                command.done(Ended(status=127, stderr=f"{command.argv[0]}: {why}".encode(), problem=why))
                continue
            self._system.adopt(popen.pid, keep=True)
            self._running[popen.pid] = _Running(command, popen, (outputs[0], outputs[1]), self._system.now())

    def _ended(self, pid: int, status: int | None) -> None:
        running = self._running.pop(pid)
        texts = []
        for fd in running.outputs:
            texts.append(os.pread(fd, OUTPUT_BYTES, 0))
            os.close(fd)
        running.popen.returncode = -1 if status is None else status  # the system has collected it, or will
        took_s = self._system.now() - running.started_s
        running.command.done(
            Ended(status=status, stdout=texts[0], stderr=texts[1], timed_out=status is None, took_s=took_s)
        )
        self._begin()
