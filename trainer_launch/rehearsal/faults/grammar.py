"""`--fault` in words: text to a `Fault`. Pure.

kill worker node=1 at=step:40        stop worker for=20s at=1m         delay dns 20s
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch.model import removed, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import DURATION, MAX_COUNT, compiled_pattern, parse_number, shown
from trainer_launch.rehearsal.controllers.local_jobs import MAX_PODS

# -- words and durations -----------------------------------------------------------------------


MAX_S = 7 * 86_400.0  # no rehearsal lasts a week


def split(text: str, where: str) -> list[str]:
    """Split at blanks that stand in no quotes. Quotes go, all that is in them stays as it is, backslashes too.

    Raises:
        UsageError: a quote is not closed.
    """
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    try:
        return list(words)
    except ValueError:
        raise UsageError(f"{where} {shown(text)} has an unclosed {words.state}") from None  # type: ignore[attr-defined]


def parse_duration(text: str, least_s: float = 0.0) -> float | None:
    """Seconds within the bounds of a rehearsal."""
    seconds = value_parsers.parse_duration(text)
    return seconds if seconds is not None and least_s <= seconds <= MAX_S else None


# -- faults as values --------------------------------------------------------------------------


class When(Struct, frozen=True, kw_only=True):
    """When a fault comes: exactly one of the three is set."""

    at_s: float | None = None  # after the beginning of the rehearsal
    step: int | None = None  # when the job reaches this step, by report() or by a line such as "step 40"
    line: str | None = None  # when a pod says a line that this regular expression is found in


class Fault(Struct, frozen=True, kw_only=True):
    """One fault, once."""

    kind: str  # "kill worker", "stop worker", "kill pod", "term pod", "add node", "scale", "partition",
    # "delay dns"
    when: When
    node: int | None = None  # index of the pod; None with no `pod`: the last node of the job
    pod: str | None = None  # by name, in place of `node`
    local_rank: int = 0  # which worker of the node
    for_s: float | None = None  # how long it lasts; None: as long as the job, or it is over at once
    grace_s: float | None = None  # of "term pod": until SIGKILL
    back_s: float | None = 1.0  # of "kill pod" and "term pod": until it is made anew; None: never
    workers: int | None = None  # of "scale": how many Worker replicas the job has from then on
    text: str = ""  # in the words typed: what people are shown, and a replay takes
    hint: str = ""  # a warning about how it was written


# -- one fault ---------------------------------------------------------------------------------


MAX_TEXT = 2_000  # characters of one fault
MAX_PATTERN = 200  # of a regular expression
MAX_STEP = 10**12 - 1
MAX_GRACE_S = 3_600.0
_POD = re.compile(r"[a-z0-9A-Z]([a-z0-9A-Z.-]{0,251}[a-z0-9A-Z])?")
_AT = (
    "a time with its unit (12s, 1m), step:NUMBER, or line:REGEX, in quotes if it has blanks, "
    "without nested repeats such as (a+)+"
)

_AT_STEP_1 = When(step=1)


class Form(Struct, frozen=True):
    """How one kind of fault is written."""

    keys: tuple[str, ...]  # besides at=
    needs: tuple[str, ...] = ()
    first: When = _AT_STEP_1  # when it comes, if nothing is said
    bare: str = ""  # the key whose value may stand alone


_WHOM = ("node", "pod")
KINDS = {
    "kill worker": Form((*_WHOM, "worker")),
    "stop worker": Form((*_WHOM, "worker", "for"), bare="for"),
    "kill pod": Form((*_WHOM, "back")),
    "term pod": Form((*_WHOM, "grace", "back")),
    "add node": Form(()),
    "scale": Form(("workers",), needs=("workers",)),
    "partition": Form((*_WHOM, "for"), bare="for"),
    "delay dns": Form(("for",), needs=("for",), first=When(at_s=0.0), bare="for"),
}
_KEYS = ("node", "pod", "worker", "at", "for", "grace", "back", "workers")


def parse(text: str, where: str = "--fault") -> Fault:
    """One fault from its text; `where` is what messages call it.

    Raises:
        UsageError: it is none, in one sentence that says what is wrong and what fits.
    """
    if len(text) > MAX_TEXT:
        raise UsageError(f"{where} is longer than {MAX_TEXT} characters: {shown(text)}")
    said = f"{where} {shown(text)}"
    kind, rest = _kind(split(text, where), said)
    return build(kind, rest, said)


def build(kind: str, words: Sequence[str], said: str) -> Fault:
    """One fault from its kind and the words after it; `said` begins each message.

    Raises:
        UsageError: they do not fit.
    """
    form = _form(kind, said)
    given: dict[str, str] = {}
    for key, value in [_pair(word, kind, said) for word in words]:
        _check_key(key, kind, said)
        if key in given:
            raise UsageError(f"{said}: {key} is given twice")
        given[key] = value
    missing = [key for key in form.needs if key not in given]
    if missing:
        raise UsageError(f"{said}: {kind} needs {missing[0]}={_VALUES[missing[0]].example}")
    if "node" in given and "pod" in given:
        raise UsageError(f"{said}: node and pod exclude each other; give one of them")
    fields: dict[str, Any] = {"when": form.first}
    for key, value in given.items():
        fields |= _value(key, value, said)
    at = given.get("at", "")
    hint = f"{said}: at={at} has no unit and is taken as seconds; write at={at}s" if _has_no_unit(at) else ""
    hint = f"{hint}, or at=step:{at} for a step" if at.isdecimal() else hint
    return Fault(kind=kind, text=" ".join((kind, *map(shlex.quote, words))), hint=hint, **fields)


# -- kinds and keys ---------------------------------------------------------------------------


def _kind(found: list[str], said: str) -> tuple[str, list[str]]:
    """The longest run of words without = is the kind, but for one bare value behind it."""
    count = next((number for number, word in enumerate(found) if "=" in word), len(found))
    for length in (2, 1):
        kind = " ".join(found[:length])
        if kind in KINDS and length <= count:
            return kind, found[length:]
    _form(" ".join(found[: min(count, 2)]), said)
    raise AssertionError("a form was found for no kind")


def _form(kind: str, said: str) -> Form:
    if kind in KINDS:
        return KINDS[kind]
    removed.refuse(f"--fault {kind}", f"{said}: {kind}")
    hint = did_you_mean(kind, KINDS) or f"expected one of: {', '.join(KINDS)}"
    raise UsageError(f"{said}: unknown fault; {hint}" if kind else f"{said}: missing fault; {hint}")


def _pair(word: str, kind: str, said: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if equals:
        return key, value
    bare = KINDS[kind].bare
    if not bare or _VALUES[bare].parse(word) is None:
        raise UsageError(f"{said}: {shown(word)} is not KEY=VALUE; {_takes(kind)}")
    return bare, word


def _check_key(key: str, kind: str, said: str) -> None:
    fitting = (*KINDS[kind].keys, "at")
    if key in fitting:
        return
    if key in _KEYS:
        raise UsageError(f"{said}: {kind} has no {key}; {_takes(kind)}")
    hint = f"{did_you_mean(key, fitting)} {_takes(kind)}".strip()
    raise UsageError(f"{said}: there is no {shown(key)}; {hint}")


def _takes(kind: str) -> str:
    return f"{kind} takes {', '.join((*KINDS[kind].keys, 'at'))}"


# -- values -----------------------------------------------------------------------------------


class _Value(Struct, frozen=True):
    """How the value of a key is read; `parse` gives None for one that does not fit."""

    field: str
    parse: Callable[[str], Any]
    expected: str
    example: str


def _number(text: str) -> int | None:
    return parse_number(text, 0, MAX_COUNT)


def _workers(text: str) -> int | None:
    return parse_number(text, 1, MAX_PODS)


def _grace(text: str) -> float | None:
    seconds = parse_duration(text)
    return seconds if seconds is not None and seconds <= MAX_GRACE_S else None


def _lasting(text: str) -> float | None:
    return parse_duration(text, least_s=0.001)


def _pod(text: str) -> str | None:
    return text if _POD.fullmatch(text) else None


def _when(text: str) -> When | None:
    word, colon, rest = text.partition(":")
    if not colon:
        seconds = parse_duration(text)
        return None if seconds is None else When(at_s=seconds)
    if word == "step":
        number = parse_number(rest, 0, MAX_STEP)
        return None if number is None else When(step=number)
    if word == "line" and 0 < len(rest) <= MAX_PATTERN and "\n" not in rest and compiled_pattern(rest):
        return When(line=rest)
    return None


_VALUES = {
    "node": _Value("node", _number, "the index of a pod, such as 1", "1"),
    "pod": _Value("pod", _pod, "the name of a pod", "NAME"),
    "worker": _Value("local_rank", _number, "a worker's local rank, such as 0", "0"),
    "for": _Value("for_s", _lasting, DURATION, "10s"),
    "grace": _Value("grace_s", _grace, f"{DURATION}, one hour at most", "10s"),
    "back": _Value("back_s", parse_duration, f"{DURATION}, or never", "3s"),
    "workers": _Value("workers", _workers, f"a number of Worker replicas from 1 to {MAX_PODS}", "4"),
    "at": _Value("when", _when, _AT, "10s"),
}


def _value(key: str, text: str, said: str) -> dict[str, Any]:
    how = _VALUES[key]
    if key == "back" and text == "never":
        return {how.field: None}
    value = how.parse(text)
    if value is None:
        raise UsageError(f"{said}: invalid value {shown(text)} for {key}=: expected {how.expected}")
    return {how.field: value}


def _has_no_unit(at: str) -> bool:
    """Whether a time is written as a number alone, which could be meant as a step, too."""
    return ":" not in at and at[-1:].isdecimal()


def counted_nodes(count: int) -> str:
    """Such as "nodes 0 to 3"."""
    return f"nodes 0 to {count - 1}" if count > 1 else "one node, 0"
