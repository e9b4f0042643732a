"""The words that faults are written with: quotes, durations, rates. Text in, value or None out, and back. Pure."""

from __future__ import annotations

import re

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import shown

MAX_S = 7 * 86_400.0  # no rehearsal lasts a week
MIN_RATE, MAX_RATE = 1_000.0, 1e11  # bytes per second
DURATION = "a time such as 10s, 1.5m or 1h"
RATE = "a rate such as 1MB/s, 500kB/s or 10Mbit/s"
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([A-Za-z]{1,4})/s")
_UNITS = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1024.0, "mib": 1024.0**2, "gib": 1024.0**3,
    "bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6,
}  # fmt: skip
_QUOTES = "'\""


def split(text: str, where: str) -> list[str]:
    """Split at blanks that stand in no quotes. Quotes go, all that is in them stays as it is, backslashes too.

    Raises:
        UsageError: a quote is not closed.
    """
    words: list[str] = []
    word: str | None = None
    quote = ""
    for sign in text:
        if quote:
            quote, word = ("", word) if sign == quote else (quote, f"{word}{sign}")
        elif sign in _QUOTES:
            quote, word = sign, word or ""
        elif not sign.isspace():
            word = f"{word or ''}{sign}"
        elif word is not None:
            words.append(word)
            word = None
    if quote:
        raise UsageError(f"{where} {shown(text)} has an unclosed {quote}")
    return words if word is None else [*words, word]


def quoted(word: str) -> str:
    """The word as `split` takes it, in quotes where it needs them."""
    if word and not any(sign.isspace() or sign in _QUOTES for sign in word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def parse_duration(text: str, least_s: float = 0.0) -> float | None:
    """Seconds, to the millisecond; without a unit seconds are meant."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    seconds = round(float(found[1]) * _SECONDS[found[2]], 3)
    return seconds if least_s <= seconds <= MAX_S else None


def render_duration(seconds: float) -> str:
    """As `parse_duration` takes it: 90.5s; whole minutes and hours by their unit."""
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{_plain(seconds)}s"


def parse_rate(text: str) -> float | None:
    """Whole bytes per second."""
    found = _RATE.fullmatch(text)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        return None
    rate = float(round(float(found[1]) * unit))
    return rate if MIN_RATE <= rate <= MAX_RATE else None


def render_rate(bytes_per_s: float) -> str:
    """As `parse_rate` takes it, in the largest unit that says it exactly in three decimals."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size and (bytes_per_s * 1000) % size == 0:
            return f"{_plain(bytes_per_s / size)}{unit}/s"
    return f"{bytes_per_s:.0f}B/s"


def _plain(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
