"""mpirun as a child: started, heard, signalled, and collected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from trainer_launch import exits
from trainer_launch.errors import NotRunnableError
from trainer_launch.mpi.messages import Said, heard
from trainer_launch.supervisor import tree

_LAST_LINES = 60
_READ_BYTES = 32 * 1024
_LINE_BYTES = 4096
_LINGER_S = 0.5  # for the last of stderr, when somebody else still has it open
_STDERR = 2
_RULER = "----"  # around mpirun's own messages


class Mpirun:
    """One start. Its stderr goes to ours untouched, and is listened to on the way."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        lost: Callable[[str], None],
        ended: Callable[[int, Said, tuple[str, ...]], None],
    ) -> None:
        """Start; `lost` and `ended` are called from threads.

        Raises:
            NotRunnableError: there is no such program.
        """
        try:
            self._child = subprocess.Popen(argv, env=dict(env), stderr=subprocess.PIPE)
        except OSError as problem:
            found = not isinstance(problem, FileNotFoundError)
            raise NotRunnableError(f"{argv[0]!r} cannot be run: {problem.strerror}", found=found) from None
        self._lost, self._ended = lost, ended
        self._said = Said()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._pump = threading.Thread(target=self._listen, daemon=True)
        self._pump.start()
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def signal(self, number: int) -> None:
        """Signal mpirun; with SIGKILL also all that it has started on this host."""
        below = tree.descendants(self._child.pid) if number == signal.SIGKILL else ()
        for pid in (self._child.pid, *(entry.pid for entry in below)):
            if self._child.poll() is None or pid != self._child.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    # -- in threads ---------------------------------------------------------------------------

    def _listen(self) -> None:
        pipe = self._child.stderr
        assert pipe is not None
        rest = b""
        while data := os.read(pipe.fileno(), _READ_BYTES):
            _write_all(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
            rest = rest[-_LINE_BYTES:]
        self._hear(rest)

    def _hear(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode(errors="replace").rstrip()
        before = self._said.lost
        self._said = heard(self._said, text)
        if text and not text.startswith(_RULER):
            self._lines.append(text)
        if self._said.lost is not None and before is None:
            self._lost(self._said.lost)

    def _collect(self) -> None:
        code = self._child.wait()
        self._pump.join(_LINGER_S)
        self._ended(exits.of_signal(-code) if code < 0 else code, self._said, tuple(self._lines))


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):  # our reader is gone; the job goes on
        while view:
            view = view[os.write(_STDERR, view) :]
