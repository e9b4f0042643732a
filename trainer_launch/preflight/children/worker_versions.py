"""What a worker of this interpreter would import, found out without importing it: started by path.

Prints one JSON object; what is not installed is not in it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from collections.abc import Iterator

_CUDA = re.compile(r"^(cuda|hip)\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def main() -> None:
    """Say what is there."""
    told = {"python": platform.python_version(), "arch": platform.machine(), "kernel": platform.release()}
    told.update(_versions())
    os.write(1, json.dumps(told).encode())


def _versions() -> Iterator[tuple[str, str]]:
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        yield "torch", _version("torch") or "of unknown version"
        with (
            contextlib.suppress(OSError),
            open(os.path.join(os.path.dirname(found.origin), "version.py"), encoding="utf-8") as file,
        ):
            yield from (("cuda", f"{kind} {number}") for kind, number in _CUDA.findall(file.read()))
    versions = filter(None, map(_version, ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")))
    yield from (("nccl", version) for version in versions)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
