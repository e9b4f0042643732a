"""A file replaced whole or not at all: written beside its place and renamed. A reader sees all or the old one.

Only `os` is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import os

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # a new file: nobody else's, and no link


def replace(path: str, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, with these permissions whatever the umask; nothing is left beside it.

    Raises:
        OSError: the folder is not there, not writable or full; what was at `path` is still there.
    """
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name[:200]}.{os.urandom(6).hex()}")  # a name has at most 255 bytes
    descriptor = os.open(beside, _FLAGS, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise
