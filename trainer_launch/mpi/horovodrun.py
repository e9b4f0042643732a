"""horovodrun as a child: started, heard, signalled, and collected."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from trainer_launch import exits
from trainer_launch.errors import NotRunnableError
from trainer_launch.mpi import horovod
from trainer_launch.mpi.messages import Said
from trainer_launch.supervisor import tree

_LAST_LINES = 400  # of all ranks together
_KEPT_LINES = 60
_READ_BYTES = 32 * 1024
_LINE_BYTES = 4096
_LINGER_S = 0.5  # for the last of its output, when somebody else still has it open
_OF_RANK = re.compile(r"^\[(\d{1,6})\]<(?:stdout|stderr)>:(.*)", re.DOTALL)


class Horovodrun:
    """One start. Its output goes to ours untouched, and is listened to on the way."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        is_elastic: bool,
        ended: Callable[[int, Said, tuple[str, ...]], None],
    ) -> None:
        """Start; `ended` is called from a thread.

        Raises:
            NotRunnableError: there is no such program.
        """
        try:
            self._child = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as problem:
            found = not isinstance(problem, FileNotFoundError)
            raise NotRunnableError(f"{argv[0]!r} cannot be run: {problem.strerror}", found=found) from None
        self._is_elastic, self._ended = is_elastic, ended
        self._lock = threading.Lock()
        self._said = Said()
        self._lines: deque[tuple[int | None, str]] = deque(maxlen=_LAST_LINES)  # rank, what it said
        pipes = ((self._child.stdout, 1), (self._child.stderr, 2))
        self._pumps = [threading.Thread(target=self._listen, args=pipe, daemon=True) for pipe in pipes]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def signal(self, number: int) -> None:
        """Signal horovodrun; with SIGKILL also all that it has started on this host, its ssh sessions first."""
        below = tree.descendants(self._child.pid) if number == signal.SIGKILL else ()
        for pid in (*(entry.pid for entry in below), self._child.pid):
            if self._child.poll() is None or pid != self._child.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    # -- in threads ---------------------------------------------------------------------------

    def _listen(self, pipe: IO[bytes], ours: int) -> None:
        rest = b""
        while data := os.read(pipe.fileno(), _READ_BYTES):
            _write_all(ours, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
            rest = rest[-_LINE_BYTES:]
        self._hear(rest)

    def _hear(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        of_rank = _OF_RANK.match(text)
        with self._lock:
            self._said = horovod.heard(self._said, text, is_elastic=self._is_elastic)
            self._lines.append((int(of_rank[1]), of_rank[2]) if of_rank else (None, text))

    def _collect(self) -> None:
        code = self._child.wait()
        for pump in self._pumps:
            pump.join(_LINGER_S)
        with self._lock:
            said, lines = self._said, tuple(self._lines)
        whose = said.rank  # Horovod's own traceback says nothing of the cause where a rank has failed
        kept = tuple(text for rank, text in lines if rank == whose)[-_KEPT_LINES:]
        self._ended(exits.of_signal(-code) if code < 0 else code, said, kept)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):  # our reader is gone; the job goes on
        while view:
            view = view[os.write(descriptor, view) :]
