"""Versions that a worker of this interpreter would import, read without importing them: started by path.

Prints a JSON object; a package that is not installed is not in it.
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
    """Print all versions."""
    facts = {"python": platform.python_version(), "arch": platform.machine(), "kernel": platform.release()}
    facts.update(_versions())
    os.write(1, json.dumps(facts).encode())


def _versions() -> Iterator[tuple[str, str]]:
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield "torch", _version("torch") or "of unknown version"
        with (
            contextlib.suppress(OSError),
            open(os.path.join(os.path.dirname(torch.origin), "version.py"), encoding="utf-8") as file,
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
