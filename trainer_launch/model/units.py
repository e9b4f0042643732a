"""Sizes, numbers of things, lists, tables and foreign text, for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
MIB = 1 << 20
_MOST = 1 << 20  # no number in a text of ranges is higher
_MOST_RANGES = 1 << 16  # of a text
_REPEATS = 4  # ranges alike at equal distances are written as one
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::(?:([0-9]{1,9})/)?([1-9][0-9]{0,8}))?)?")


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
    return between.join(_run(low, high) for low, high in _runs(numbers))


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`; 0, 2, 4, 6 as `0-6:2`; 0, 1, 8, 9, 16, 17, 24, 25 as `0-25:2/8`: 2 of every 8."""
    runs = _runs(numbers)
    parts, begin = [], 0
    while begin < len(runs):
        (low, high), end = runs[begin], begin + 1
        step = runs[end][0] - low if end < len(runs) else 0
        while end < len(runs) and runs[end] == [number + step for number in runs[end - 1]]:
            end += 1
        if end - begin >= _REPEATS:
            size = high - low + 1
            parts.append(f"{low}-{runs[end - 1][1]}:{step if size == 1 else f'{size}/{step}'}")
        else:
            end = begin + 1
            parts.append(_run(low, high))
        begin = end
    return ",".join(parts)


def named_ranks(numbers: Iterable[int]) -> str:
    """Ranks as every message names them: rank 3, ranks 0-2,5."""
    text = spans(numbers)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def ranges_in(text: str) -> list[range]:
    """The numbers of such a text; none in one that is no such text."""
    parts = [_PART.fullmatch(part) for part in text.split(",")] if text else []
    if not all(parts):
        return []
    return list(islice(chain.from_iterable(_ranges(part) for part in parts if part is not None), _MOST_RANGES))


def _ranges(part: re.Match[str]) -> Iterator[range]:
    low, size, step = int(part[1]), int(part[3] or 1), int(part[4] or 1)
    end = min(int(part[2] or low), _MOST) + 1
    if size == 1:
        return iter([range(low, end, step)])
    return (range(first, min(first + size, end)) for first in range(low, end, step))


def numbers_in(text: str) -> list[int]:
    """The same one by one, at most as many as there may be ranks."""
    return list(islice(chain.from_iterable(ranges_in(text)), _MOST))


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last number of each run."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _run(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


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
