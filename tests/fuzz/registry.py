"""What is fuzzed: every parser of text or bytes from outside, each by one small function that says what may happen.

A target is given bytes and returns nothing; whatever it raises is a defect. Its inputs are in `corpus/NAME.jsonl`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

_HOMES = ("commands", "machines", "manifests", "messages", "notes", "outputs", "pods", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One function, and how long its inputs may be."""

    name: str
    run: Callable[[bytes], None]
    max_bytes: int

    @property
    def home(self) -> str:
        """The module that it is in."""
        return self.run.__module__.rpartition(".")[2]


_TARGETS: dict[str, Target] = {}


def target(max_bytes: int = 4096) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Enter a function by its name."""

    def enter(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        _TARGETS[run.__name__] = Target(name=run.__name__, run=run, max_bytes=max_bytes)
        return run

    return enter


def in_home(home: str, name: str) -> Target:
    """One of them, without the modules of others."""
    importlib.import_module(f"tests.fuzz.parsers.{home}")
    return _TARGETS[name]


def targets() -> dict[str, Target]:
    """All of them, by name."""
    for home in _HOMES:
        importlib.import_module(f"tests.fuzz.parsers.{home}")
    return dict(sorted(_TARGETS.items()))
