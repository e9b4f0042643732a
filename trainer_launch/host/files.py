"""The container's own files, read so that neither a FIFO nor a huge file can hold us up."""

from __future__ import annotations

import os
import stat


class LiveFiles:
    """This container's file system, for reading; no more than `limit` bytes of any file."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def read(self, path: str) -> bytes | None:
        """A regular file, cut at the limit; None when it cannot be read."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            try:
                return file.read(self._limit)
            except OSError:
                return None

    def exists(self, path: str) -> bool:
        """Whether the path is there."""
        return os.path.exists(path)
