"""Sizes, numbers of things, lists, tables and foreign text, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
MIB = 1 << 20


def in_units(size_bytes: float) -> str:
    """In three digits and the unit that fits: 1.2 GiB."""
    units = ["GiB", "MiB", "KiB", "B"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1024
        units.pop()
    return f"{size_bytes:.3g} {units[-1]}"


def in_mib(size_bytes: float) -> str:
    """In whole MiB, for sizes that are compared with each other."""
    return f"{size_bytes / MIB:.0f} MiB"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 restart, 2 restarts, 3 processes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def all_of(number: int, noun: str) -> str:
    """All there are: the only host, all 3 hosts."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"


def duration(seconds: float) -> str:
    """As a person reads it: 7 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    left = int(seconds)
    for size, word, small, small_word in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            rest = left % size // small
            return f"{left // size} {word}" + (f" {rest} {small_word}" if rest else "")
    return f"{left} s"


def listed(words: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """The first few, and how many more there are: `a, b and 3 more`, `a; b; and 3 more`."""
    shown, rest = between.join(words[:most]), len(words) - most
    return f"{shown}{' ' if between == ', ' else between}and {rest} more" if rest > 0 else shown


def in_ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Whole numbers as the kernel writes them: 0-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def grouped(pairs: Iterable[tuple[_Key, _Member]]) -> dict[_Key, list[_Member]]:
    """The members of each key, keys and members in the order in which they come."""
    groups: dict[_Key, list[_Member]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups


def aligned(rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """A table's lines: each column but the last is as wide as its widest cell, at most `most`."""
    widths = [max(map(len, cells)) for cells in list(zip(*rows, strict=True))[:-1]]
    widths = [width if most is None else min(width, most) for width in widths]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]


def printable(text: str, instead: str = "?") -> str:
    """Foreign text, fit for a terminal: without control characters."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else instead for sign in text)
