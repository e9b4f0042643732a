"""Commands on the job's hosts, each with a deadline: PID 1 starts them, reaps them by pid, and never waits for one.

They are no part of the job: signals to everything below the launcher spare them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from trainer_launch.host import process_tree
from trainer_launch.host.deadline_subprocess import OUTPUT_BYTES, Ended
from trainer_launch.supervisor.system import System

_AT_ONCE = 64

Done = Callable[[Ended], object]


class _Command:
    """A command that is under way."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], due_s: float, done: Done) -> None:
        """Start it. Raises OSError, ValueError: it cannot be started."""
        self.due_s, self.done = due_s, done
        with contextlib.ExitStack() as opened:
            files = [os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b") for name in ("stdout", "stderr")]
            stdout, stderr = self._outputs = [opened.enter_context(file) for file in files]
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
            )
            self._opened = opened.pop_all()

    def ended(self, status: int | None) -> Ended:
        """How it ended, with what it has said; None: it was killed at its deadline."""
        self.popen.returncode = -1 if status is None else status  # the system has collected it, or will
        with self._opened:
            stdout, stderr = (os.pread(output.fileno(), OUTPUT_BYTES, 0) for output in self._outputs)
        return Ended(status=status, stdout=stdout, stderr=stderr, timed_out=status is None)


class HostCommands:
    """Those that are under way, and those that wait for their turn."""

    def __init__(self, system: System, env: Mapping[str, str]) -> None:
        self._system, self._env = system, env
        self._waiting: deque[tuple[Sequence[str], float, Done]] = deque()
        self._running: dict[int, _Command] = {}  # by pid

    def start(self, argv: Sequence[str], limit_s: float, done: Done) -> None:
        """Start a command; `done` is called in the main loop with how it ended."""
        self._waiting.append((argv, limit_s, done))
        self._begin()

    def run(self, argv: Sequence[str], limit_s: float, post: Callable[[Callable[[], None]], None]) -> Ended:
        """In a thread: have the main loop start a command by `post`, and wait for its end."""
        ended: SimpleQueue[Ended] = SimpleQueue()
        post(lambda: self.start(argv, limit_s, ended.put))
        return ended.get()

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        return min((command.due_s for command in self._running.values()), default=None)

    def tick(self, now_s: float) -> None:
        """Kill what is beyond its deadline. What is stuck in the kernel is left behind."""
        for pid in [pid for pid, command in self._running.items() if now_s >= command.due_s]:
            process_tree.kill(pid, below_first=False)  # a shell would say who was killed
            self.reaped(pid, None)

    def reaped(self, pid: int, status: int | None) -> bool:
        """A child has ended; whether it was a command."""
        command = self._running.pop(pid, None)
        if command is None:
            return False
        command.done(command.ended(status))
        self._begin()
        return True

    def close(self) -> None:
        """Kill what still runs: nobody waits for it any more."""
        for pid, command in self._running.items():
            process_tree.kill(pid)
            command.ended(None)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < _AT_ONCE:
            argv, limit_s, done = self._waiting.popleft()
            try:
                command = _Command(argv, self._env, self._system.now() + limit_s, done)
            except (OSError, ValueError) as problem:  # the latter: a NUL in a word
                why = problem if isinstance(problem, OSError) else OSError(str(problem))
                done(Ended(status=127, stderr=f"{argv[0]}: {why}".encode(), problem=why))
                continue
            self._system.adopt(command.popen.pid, keep=True)
            self._running[command.popen.pid] = command
