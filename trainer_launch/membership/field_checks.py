"""What a message's fields may hold: each check returns the value it was given, or raises UnfitError."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

MAX_NODES = 65536
MAX_NUMBER = 2**53  # exact in every JSON reader
MAX_CLAIMS = 32
MAX_RANKS = 1024  # of one node
MAX_TEXT = 2000  # escaped at its worst it takes 24 KB
_MAX_NAME = 253  # as in DNS


_RANKS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


class Claim(NamedTuple):
    """A generation as its members know it; see claims.py."""

    generation: int
    seat: int  # the rank of the node whose launcher formed it
    ranks: str  # its members, as 0-3,7
    sure: bool  # whether every member has taken it


class UnfitError(Exception):
    """Its text says what was expected."""


Check: TypeAlias = Callable[[Any], Any]


def number(below: int, start: int = 0) -> Check:
    """A whole number from `start` to below `below`."""

    def check(value: Any) -> int:
        if type(value) is not int or not start <= value < below:  # a bool is an int, and is not meant
            raise UnfitError(f"a number from {start} to {below - 1}")
        return value

    return check


def text(value: Any) -> str:
    """A text of bounded length."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise UnfitError(f"a text of at most {MAX_TEXT} characters")
    return value


def name(value: Any) -> str:
    """A name goes into logs and orders ranks: printable ASCII only."""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _MAX_NAME
        or not (value.isascii() and value.isprintable())
    ):
        raise UnfitError(f"a name of 1 to {_MAX_NAME} printable characters")
    return value


def role(value: Any) -> str:
    """torchrun's `--role`, which is any text."""
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise UnfitError(f"a text of at most {_MAX_NAME} characters")
    return value


def ranks(value: Any) -> tuple[int, ...]:
    """Ranks of one node's workers, in a list."""
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        raise UnfitError("a list of ranks")
    return tuple(map(number(2**31), value))


def texts(value: Any) -> tuple[str, ...]:
    """Names as people read them."""
    if not isinstance(value, list) or len(value) > MAX_NODES:
        raise UnfitError("a list of texts")
    return tuple(map(text, value))


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise UnfitError("true or false")
    return value


def seconds(value: Any) -> float:
    """A positive number of seconds, at most 11 days."""
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise UnfitError("a positive number of seconds")
    return float(value)


def real(value: Any) -> float:
    """A number of either sign."""
    if type(value) not in (int, float) or not -1e12 <= value <= 1e12:  # an int may be beyond every float
        raise UnfitError("a number")
    return float(value)


def amount(value: Any) -> float:
    """A number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise UnfitError("a number of at least 0")
    return float(value)


def rows(value: Any) -> tuple[tuple[int | None, str, str, float | None], ...]:
    """Nodes as a Status lists them."""
    if not isinstance(value, list) or len(value) > MAX_NODES:
        raise UnfitError("a list of nodes")
    checks = (optional(number(MAX_NODES)), text, name, optional(amount))
    for row in value:
        if not isinstance(row, list) or len(row) != len(checks):
            raise UnfitError(f"a list of nodes with {len(checks)} values each")
    return tuple(tuple(check(one) for check, one in zip(checks, row, strict=True)) for row in value)


def optional(check: Check) -> Check:
    """What may be null, and else has to pass the check."""
    return lambda value: None if value is None else check(value)


def claim(value: Any) -> Claim:
    """What a node says it was before the coordinator was lost."""
    if not isinstance(value, list) or len(value) != len(Claim._fields):
        raise UnfitError("a generation, a seat, ranks and whether it is sure")
    generation, seat, ranks, sure = value
    if not isinstance(ranks, str) or len(ranks) > MAX_TEXT or not _RANKS.fullmatch(ranks) or not _ascend(ranks):
        raise UnfitError("ranks such as 0-3,7")
    return Claim(number(MAX_NUMBER)(generation), number(MAX_NODES)(seat), ranks, flag(sure))


def spans(ranks: str) -> Iterator[tuple[int, int]]:
    """The first and the last rank of each run in a text such as 0-3,7."""
    for part in ranks.split(","):
        low, _, high = part.partition("-")
        yield int(low), int(high or low)


def claims(value: Any) -> tuple[Claim, ...]:
    """Such claims, in a list."""
    if not isinstance(value, list) or len(value) > MAX_CLAIMS:
        raise UnfitError("a list of claims")
    return tuple(map(claim, value))


def _ascend(ranks: str) -> bool:
    """Each rank once, so that as many are read out of it as there are nodes at most: strangers send it, too."""
    before = -1
    for low, high in spans(ranks):
        if not before < low <= high < MAX_NODES:
            return False
        before = high
    return True
