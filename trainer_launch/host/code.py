"""A program's code as one number: the source files below its folder, as many as can be read in a moment."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_SOURCES = frozenset((".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".yaml", ".yml", ".toml"))
_MAX_FILES = 3000
_MAX_BYTES = 64 << 20
_MAX_S = 1.0
_OTHERS = frozenset(("__pycache__", "node_modules", "site-packages", "venv"))


def code_hash(program: str) -> str | None:
    """A short hash, with how many files it is of; None without a script. Above the limits only sizes count."""
    script = Path(program)
    if not script.is_file():
        return None
    folder = script.resolve().parent
    found = hashlib.sha256()
    until_s = time.monotonic() + _MAX_S
    count = size = 0
    for path in _sources(folder):
        if count >= _MAX_FILES:
            break
        try:
            length = path.stat().st_size
            size += length
            is_read = size <= _MAX_BYTES and time.monotonic() < until_s
            content = path.read_bytes() if is_read else str(length).encode()
        except OSError:
            continue
        count += 1
        found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode(errors="surrogateescape"))
        found.update(content)
    return f"{found.hexdigest()[:12]} ({count} files)"


def _sources(folder: Path) -> Iterator[Path]:
    """Source files, in an order that is the same everywhere."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OTHERS)
        for name in sorted(files):
            path = Path(place, name)
            if path.suffix in _SOURCES and not name.startswith(".") and not path.is_symlink():
                yield path
