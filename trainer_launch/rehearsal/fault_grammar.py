"""`--fault` in words: text to an `InjectedFault`. Pure.

kill worker node=1 at=step:40        stop worker for=20s at=1m         delay dns 20s
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from msgspec import Struct

from trainer_launch.model import removed, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import DURATION, MAX_COUNT, parse_number, shown
from trainer_launch.rehearsal.faults import KINDS, InjectedFault, When

MAX_TEXT = 2_000  # characters of one fault
MAX_S = 7 * 86_400.0  # no rehearsal lasts a week
MAX_STEP = 10**12 - 1
_MAX_PATTERN = 200  # characters of a regular expression
_MAX_GRACE_S = 3_600.0
_POD_NAME = re.compile(r"[a-z0-9A-Z]([a-z0-9A-Z.-]{0,251}[a-z0-9A-Z])?")


def parse(text: str, where: str = "--fault") -> InjectedFault:
    """The fault of a text, which messages call `where`.

    Raises:
        UsageError: the text is no fault, in one sentence that says what is wrong and what fits.
    """
    if len(text) > MAX_TEXT:
        raise UsageError(f"{where} is longer than {MAX_TEXT} characters: {shown(text)}")
    name = f"{where} {shown(text)}"
    kind, words = _kind(split(text, where), name)
    bare, takes = KINDS[kind].bare, (*KINDS[kind].keys, "at")
    fitting = f"{kind} takes {', '.join(takes)}"
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and bare and _VALUES[bare].parse(word) is not None:
            key, value = bare, word
        elif not equals:
            raise UsageError(f"{name}: {shown(word)} is not KEY=VALUE; {fitting}")
        if key not in takes:
            hint = f"{did_you_mean(key, takes)} {fitting}".strip()
            problem = f"{kind} has no {key}" if key in _VALUES else f"there is no {shown(key)}"
            raise UsageError(f"{name}: {problem}; {fitting if key in _VALUES else hint}")
        if key in given:
            raise UsageError(f"{name}: {key} is given twice")
        given[key] = value
    needs = KINDS[kind].needs
    if needs and needs not in given:
        raise UsageError(f"{name}: {kind} needs {needs}={_VALUES[needs].example}")
    if "node" in given and "pod" in given:
        raise UsageError(f"{name}: node and pod exclude each other; give one of them")
    fields: dict[str, Any] = {"when": KINDS[kind].first}
    for key, value in given.items():
        how = _VALUES[key]
        fields[how.field] = None if (key, value) == ("back", "never") else how.parse(value)
        if fields[how.field] is None and (key, value) != ("back", "never"):
            raise UsageError(f"{name}: invalid value {shown(value)} for {key}=: expected {how.expected}")
    return InjectedFault(kind=kind, text=" ".join((kind, *map(shlex.quote, words))), **fields)


def split(text: str, where: str) -> list[str]:
    """Split at blanks that stand in no quotes. Quotes go, all that is in them stays as it is, backslashes too."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    try:
        return list(words)
    except ValueError:
        raise UsageError(f"{where} {shown(text)} has an unclosed {words.state}") from None  # type: ignore[attr-defined]


def _kind(words: list[str], name: str) -> tuple[str, list[str]]:
    """The kind of fault, and the words behind it."""
    for length in (2, 1):
        kind = " ".join(words[:length])
        if kind in KINDS:
            return kind, words[length:]
    if words[-1:] and words[-1].endswith((".yaml", ".yml")):
        removed.refuse("--fault FILE.yaml", name)
    kind = " ".join(takewhile(lambda word: "=" not in word, words[:2]))
    removed.refuse(f"--fault {kind}", f"{name}: {kind}")
    hint = did_you_mean(kind, KINDS) or f"expected one of: {', '.join(KINDS)}"
    raise UsageError(f"{name}: unknown fault; {hint}" if kind else f"{name}: missing fault; {hint}")


class _FaultValue(Struct, frozen=True):
    """How the value of a key is read; `parse` gives None for one that does not fit."""

    field: str
    parse: Callable[[str], Any]
    expected: str
    example: str = ""


def _duration(least_s: float, most_s: float) -> Callable[[str], float | None]:
    def parsed(text: str) -> float | None:
        seconds = value_parsers.parse_duration(text)
        return seconds if seconds is not None and least_s <= seconds <= most_s else None

    return parsed


def _number(least: int, most: int) -> Callable[[str], int | None]:
    return lambda text: parse_number(text, least, most)


def _when(text: str) -> When | None:
    word, colon, rest = text.partition(":")
    if not colon:
        seconds = _duration(0.0, MAX_S)(text)
        return None if seconds is None else When(at_s=seconds)
    if word == "step":
        number = parse_number(rest, 0, MAX_STEP)
        return None if number is None else When(step=number)
    if word == "line" and 0 < len(rest) <= _MAX_PATTERN and "\n" not in rest and _is_pattern(rest):
        return When(line=rest)
    return None


def _is_pattern(text: str) -> bool:
    try:
        return bool(re.compile(text))
    except (re.error, OverflowError, RecursionError):
        return False


_VALUES = {
    "node": _FaultValue("node", _number(0, MAX_COUNT), "the index of a pod, such as 1"),
    "pod": _FaultValue("pod", lambda text: text if _POD_NAME.fullmatch(text) else None, "the name of a pod"),
    "worker": _FaultValue("local_rank", _number(0, MAX_COUNT), "a worker's local rank, such as 0"),
    "for": _FaultValue("for_s", _duration(0.001, MAX_S), DURATION, "10s"),
    "grace": _FaultValue("grace_s", _duration(0.0, _MAX_GRACE_S), f"{DURATION}, one hour at most"),
    "back": _FaultValue("back_s", _duration(0.0, MAX_S), f"{DURATION}, or never"),
    "at": _FaultValue(
        "when",
        _when,
        "a time with its unit (12s, 1m), step:NUMBER, or line:REGEX, in quotes if it has blanks",
    ),
}
