"""A program's code as one number: the source files below its folder, where they can be read in a moment."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trainer_launch.model.units import counted

_SOURCES = frozenset((".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".yaml", ".yml", ".toml"))
_MAX_FILES = 3000
_MAX_BYTES = 64 << 20
_MAX_S = 5.0
_OTHERS = frozenset(("__pycache__", "node_modules", "site-packages", "venv"))


def code_hash(program: str) -> str | None:
    """A short hash, with how many files it is of; None without a script, or where it cannot be read in time.

    Above the limits, which fall alike on all nodes, only sizes count.
    """
    script = Path(program)
    if not script.is_file():
        return None
    folder = script.resolve().parent
    found = hashlib.sha256()
    until_s = time.monotonic() + _MAX_S
    count = size = 0
    for path in _sources(folder, until_s):
        if count >= _MAX_FILES or time.monotonic() >= until_s:
            break
        try:
            length = path.stat().st_size
            size += length
            content = path.read_bytes() if size <= _MAX_BYTES else str(length).encode()
        except OSError:
            continue
        count += 1
        found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode(errors="surrogateescape"))
        found.update(content)
    # What a slow disk leaves unread would look like other code.
    return None if time.monotonic() >= until_s else f"{found.hexdigest()[:12]} ({counted(count, 'file')})"


def _sources(folder: Path, until_s: float) -> Iterator[Path]:
    """Source files, in an order that is the same everywhere; no more of them when the time is up."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OTHERS)
        if time.monotonic() >= until_s:
            return
        for name in sorted(files):
            path = Path(place, name)
            if path.suffix in _SOURCES and not name.startswith(".") and not path.is_symlink():
                yield path
