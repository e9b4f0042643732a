"""Files that get what a worker writes: all of it, or only lines with certain words."""

from __future__ import annotations

import logging
import os

from trainer_launch.model import Destination

log = logging.getLogger(__name__)

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_LINE_BYTES = 64 * 1024  # of a line that does not end; more is looked at in pieces


class Copies:
    """The files of one stream."""

    def __init__(self, to: Destination) -> None:
        """Open them; what is there already stays.

        Raises:
            OSError: one cannot be opened.
        """
        self._prefix = to.prefix.encode()
        self._needles = tuple(needle.encode() for needle in to.needles)
        self._pending = b""  # the begin of a line whose end has not come
        self._all = _File(to.file) if to.file is not None else None
        self._some = _File(to.copy) if to.copy is not None else None

    def feed(self, data: bytes) -> None:
        """Take in new bytes."""
        if self._all is not None:
            self._all.write(data)
        if self._some is not None:
            self._some.write(self._matching(data))

    def close(self) -> None:
        """Nothing will follow."""
        if self._some is not None:
            self._some.write(self._chosen([self._pending]))
            self._some.close()
        if self._all is not None:
            self._all.close()

    def _matching(self, data: bytes) -> bytes:
        lines = (self._pending + data).splitlines(keepends=True)
        is_open = bool(lines) and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _LINE_BYTES
        self._pending = lines.pop() if is_open else b""
        return self._chosen(lines)

    def _chosen(self, lines: list[bytes]) -> bytes:
        found = [self._prefix + line for line in lines if line and any(needle in line for needle in self._needles)]
        return b"".join(found)


class _File:
    """A file that is appended to; when it cannot be written, that is said once and the job goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = os.open(path, _APPEND, 0o666)

    def write(self, data: bytes) -> None:
        """All of it, in one write as a rule: other writers' lines stay whole."""
        view = memoryview(data)
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as problem:
            log.warning("cannot write to %s: %s; the job continues without this file", self._path, problem.strerror)
            self.close()

    def close(self) -> None:
        """Give it back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
