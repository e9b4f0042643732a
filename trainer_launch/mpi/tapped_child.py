"""A child whose output goes to ours untouched and is listened to on the way: mpirun, horovodrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from trainer_launch.host import process_tree
from trainer_launch.model import exit_codes
from trainer_launch.model.errors import NotRunnableError

STDERR = 2
LINE_BYTES = 4096
_READ_BYTES = 32 * 1024
_LINGER_S = 0.5  # for the last of its output, when somebody else still has it open


class Listened:
    """One start of a program; `hear` gets each line and its stream, `over` the exit code, both from threads."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        hear: Callable[[str, int], None],
        over: Callable[[int], None],
        stdin: int | None = None,
        hears_stdout: bool = True,
    ) -> None:
        """Start.

        Raises:
            NotRunnableError: there is no such program.
        """
        stdout = subprocess.PIPE if hears_stdout else None
        try:
            self._child = subprocess.Popen(argv, env=dict(env), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except OSError as problem:
            found = not isinstance(problem, FileNotFoundError)
            raise NotRunnableError(f"{argv[0]!r} cannot be run: {problem.strerror}", found=found) from None
        self._hear, self._over = hear, over
        self.is_over = threading.Event()
        pipes = ((1, self._child.stdout), (STDERR, self._child.stderr))
        self._pumps = [threading.Thread(target=self._listen, args=ends, daemon=True) for ends in pipes if ends[1]]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def signal(self, number: int, *, below_first: bool = False) -> None:
        """Signal the program; with SIGKILL also all that it has started on this host, after it or before."""
        if self._child.poll() is not None:
            return
        if number == signal.SIGKILL:
            process_tree.kill(self.pid, below_first=below_first)
        else:
            process_tree.send(self.pid, number)

    # -- in threads ---------------------------------------------------------------------------

    def _listen(self, ours: int, pipe: IO[bytes]) -> None:
        rest = b""
        while data := os.read(pipe.fileno(), _READ_BYTES):
            _write_all(ours, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(_text(line), ours)
            rest = rest[-LINE_BYTES:]
        self._hear(_text(rest), ours)

    def _collect(self) -> None:
        code = self._child.wait()
        self.is_over.set()
        for pump in self._pumps:
            pump.join(_LINGER_S)
        self._over(exit_codes.of_signal(-code) if code < 0 else code)


def _text(line: bytes) -> str:
    return line[:LINE_BYTES].decode(errors="replace").rstrip()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):  # our reader is gone; the job goes on
        while view:
            view = view[os.write(descriptor, view) :]
