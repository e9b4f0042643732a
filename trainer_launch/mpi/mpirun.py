"""mpirun as a child: started, heard, signalled, and collected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from trainer_launch import exits
from trainer_launch.errors import NotRunnableError
from trainer_launch.mpi.messages import Said, heard
from trainer_launch.supervisor import tree

_LAST_LINES = 60
_READ_BYTES = 32 * 1024
_LINE_BYTES = 4096
_LOOK_S = 1.0
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
        is_hydra: bool,
        lost: Callable[[str], None],
        ended: Callable[[int, Said, tuple[str, ...]], None],
    ) -> None:
        """Start; `lost` and `ended` are called from threads. Hydra says on stdout how ranks ended.

        Raises:
            NotRunnableError: there is no such program.
        """
        try:
            stdout = subprocess.PIPE if is_hydra else None
            self._child = subprocess.Popen(argv, env=dict(env), stdout=stdout, stderr=subprocess.PIPE)
        except OSError as problem:
            found = not isinstance(problem, FileNotFoundError)
            raise NotRunnableError(f"{argv[0]!r} cannot be run: {problem.strerror}", found=found) from None
        self._lost, self._ended = lost, ended
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._said = Said()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        pipes = ((1, self._child.stdout), (2, self._child.stderr))
        self._pumps = [threading.Thread(target=self._listen, args=ends, daemon=True) for ends in pipes if ends[1]]
        for pump in self._pumps:
            pump.start()
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

    def watch(self, hosts: Sequence[str], gone: Callable[[Sequence[str]], None]) -> None:
        """Tell, from a thread, when its ways to hosts are gone: Hydra has an ssh for each, and does not care."""
        threading.Thread(target=self._watch, args=(hosts, gone), daemon=True).start()

    # -- in threads ---------------------------------------------------------------------------

    def _listen(self, ours: int, pipe: IO[bytes]) -> None:
        rest = b""
        while data := os.read(pipe.fileno(), _READ_BYTES):
            _write_all(ours, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line, ours)
            rest = rest[-_LINE_BYTES:]
        self._hear(rest, ours)

    def _hear(self, line: bytes, ours: int) -> None:
        text = line[:_LINE_BYTES].decode(errors="replace").rstrip()
        with self._lock:
            before = self._said.lost
            self._said = heard(self._said, text)
            if text and ours == _STDERR and not text.startswith(_RULER):
                self._lines.append(text)
            lost = self._said.lost
        if lost is not None and before is None:
            self._lost(lost)

    def _watch(self, hosts: Sequence[str], gone: Callable[[Sequence[str]], None]) -> None:
        before: set[str] = set()
        while not self._is_over.wait(_LOOK_S):
            now = self._reached() & set(hosts)
            if before - now:
                gone(sorted(before - now))
            before = now

    def _reached(self) -> set[str]:
        """The words of all command lines below mpirun; a host's name is one of them."""
        words: set[str] = set()
        for entry in tree.descendants(self._child.pid):
            with contextlib.suppress(OSError), open(f"/proc/{entry.pid}/cmdline", "rb") as file:
                words.update(file.read(_LINE_BYTES).decode(errors="replace").split("\0"))
        return words

    def _collect(self) -> None:
        code = self._child.wait()
        self._is_over.set()
        for pump in self._pumps:
            pump.join(_LINGER_S)
        self._ended(exits.of_signal(-code) if code < 0 else code, self._said, tuple(self._lines))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):  # our reader is gone; the job goes on
        while view:
            view = view[os.write(fd, view) :]
