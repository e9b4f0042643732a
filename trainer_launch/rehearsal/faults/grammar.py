"""`--fault` and `--chaos` in words: text to a `Fault`. Pure.

kill worker node=1 at=step:40        stop worker for=20s at=1m         delay dns 20s
"""

from __future__ import annotations

import math
import random
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import DURATION, MAX_COUNT, compiled_pattern, parse_number, shown
from trainer_launch.rehearsal.controllers.local_jobs import MAX_PODS

# -- words, durations, rates -------------------------------------------------------------------


MAX_S = 7 * 86_400.0  # no rehearsal lasts a week
MIN_RATE, MAX_RATE = 1_000.0, 1e11  # bytes per second
RATE = "a rate such as 1MB/s, 500kB/s or 10Mbit/s"
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([A-Za-z]{1,4})/s")
_UNITS = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1024.0, "mib": 1024.0**2, "gib": 1024.0**3,
    "bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6,
}  # fmt: skip


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


def parse_rate(text: str) -> float | None:
    """Whole bytes per second."""
    found = _RATE.fullmatch(text)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        return None
    rate = float(round(float(found[1]) * unit))
    return rate if MIN_RATE <= rate <= MAX_RATE else None


# -- faults as values --------------------------------------------------------------------------


class When(Struct, frozen=True, kw_only=True):
    """When a fault comes: exactly one of the three is set."""

    at_s: float | None = None  # after the beginning of the rehearsal
    step: int | None = None  # when the job reaches this step, by report() or by a line such as "step 40"
    line: str | None = None  # when a pod says a line that this regular expression is found in


class Fault(Struct, frozen=True, kw_only=True):
    """One fault, once."""

    kind: str  # "kill worker", "stop worker", "kill pod", "term pod", "add node", "scale", "partition",
    # "slow link", "delay dns", "fill shm", "oom"
    when: When
    node: int | None = None  # index of the pod; None with no `pod`: the last node of the job
    pod: str | None = None  # by name, in place of `node`
    local_rank: int = 0  # which worker of the node
    for_s: float | None = None  # how long it lasts; None: as long as the job, or it is over at once
    grace_s: float | None = None  # of "term pod": until SIGKILL
    back_s: float | None = 1.0  # of "kill pod" and "term pod": until it is made anew; None: never
    bytes_per_s: float | None = None  # of "slow link"
    workers: int | None = None  # of "scale": how many Worker replicas the job has from then on
    text: str = field(default="", compare=False)  # in the words typed: what people are shown, and a replay takes
    hint: str = field(default="", compare=False)  # a warning about how it was written


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
    "slow link": Form((*_WHOM, "rate", "for"), needs=("rate",)),
    "delay dns": Form(("for",), needs=("for",), first=When(at_s=0.0), bare="for"),
    "fill shm": Form((*_WHOM, "for"), bare="for"),
    "oom": Form(_WHOM),
}
_KEYS = ("node", "pod", "worker", "at", "for", "grace", "back", "rate", "workers")


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
    "rate": _Value("bytes_per_s", parse_rate, RATE, "1MB/s"),
    "workers": _Value("workers", _workers, f"a number of Worker replicas from 1 to {MAX_PODS}", "4"),
    "at": _Value("when", _when, _AT, "10s"),
}


def _value(key: str, text: str, said: str) -> dict[str, Any]:
    how = _VALUES[key]
    if key == "back" and text == "never":
        return {how.field: None}
    return _read(how, key, text, said)


def _read(how: _Value, key: str, text: str, said: str) -> dict[str, Any]:
    value = how.parse(text)
    if value is None:
        raise UsageError(f"{said}: invalid value {shown(text)} for {key}=: expected {how.expected}")
    return {how.field: value}


def _has_no_unit(at: str) -> bool:
    """Whether a time is written as a number alone, which could be meant as a step, too."""
    return ":" not in at and at[-1:].isdecimal()


# -- random faults: --chaos, the same ones for the same seed on every machine -------------------
#
# Each fault has a generator of its own, made from the seed and the fault's number: of Python's random module only
# `Random(text).random()` is used, which is promised to stay as it is.


DEFAULT_KINDS = ("kill worker", "stop worker", "kill pod", "term pod")  # what every machine can do
LASTS = ("stop worker", "partition", "slow link", "fill shm")  # drawn with an end, or they would end the job
NOT_BY_CHANCE = ("delay dns", "add node", "scale")
MAX_NODE = 10_000
_LASTS_S = (1.0, 9.0)  # at least, and how much more at most
_SLOW = "1MB/s"
_LEAST_GAP_S = 0.05  # 20 a second on average


class Chaos(Struct, frozen=True, kw_only=True):
    """How faults are drawn."""

    seed: int
    gap_s: float  # on average between two of them
    kinds: tuple[str, ...] = DEFAULT_KINDS
    for_s: float | None = None  # none comes later than this; None: as long as the job runs
    nodes: tuple[int, ...] = ()  # whom they may hit; () until `over` has told it

    def over(self, nodes: Iterable[int]) -> Chaos:
        """The same for a job of these nodes, where nothing else was asked for.

        Raises:
            UsageError: one was asked for that the job has not.
        """
        there = tuple(nodes)
        strange = [node for node in self.nodes if node not in there]
        if strange:
            raise UsageError(f"--chaos: nodes has {strange[0]}; the job has {counted_nodes(len(there))}")
        return replace(self, nodes=self.nodes or there)


def parse_chaos(text: str) -> Chaos:
    """Understand `seed=N rate=N/TIME [kinds=A,B] [for=TIME] [nodes=N,N|N-N]`.

    Raises:
        UsageError: it does not fit.
    """
    if len(text) > MAX_TEXT:
        raise UsageError(f"--chaos is longer than {MAX_TEXT} characters: {shown(text)}")
    said = f"--chaos {shown(text)}"
    fields: dict[str, Any] = {}
    for word in split(text, "--chaos"):
        key, equals, value = word.partition("=")
        if key not in _CHAOS_KEYS or not equals:
            near = "" if key in _CHAOS_KEYS else did_you_mean(key, [f"{name}=" for name in _CHAOS_KEYS])
            hint = near or f"expected {', '.join(_CHAOS_KEYS)}"
            raise UsageError(f"{said}: unknown key {shown(word)}; {hint}")
        how = _CHAOS_KEYS[key]
        if how.field in fields:
            raise UsageError(f"{said}: {key} is given twice")
        fields |= _read(how, key, value, said)
    for key in ("seed", "rate"):
        if _CHAOS_KEYS[key].field not in fields:
            raise UsageError(f"{said} has no {key}; add {key}={_CHAOS_KEYS[key].example}")
    return Chaos(**fields)


def draw(chaos: Chaos, number: int, after_s: float) -> Fault | None:
    """The fault with this number, counted from 0; it comes some time after the one before. None: no more."""
    chance = random.Random(f"{chaos.seed}/{number}").random
    at_s = round(after_s + max(0.001, -chaos.gap_s * math.log(1.0 - chance())), 3)
    if at_s > min(chaos.for_s or MAX_S, MAX_S) or not chaos.nodes:
        return None
    kind = chaos.kinds[int(chance() * len(chaos.kinds))]
    node = chaos.nodes[int(chance() * len(chaos.nodes))]
    rate = f"rate={_SLOW} " if kind == "slow link" else ""
    lasts = f"for={round(_LASTS_S[0] + _LASTS_S[1] * chance(), 1)}s " if kind in LASTS else ""
    return parse(f"{kind} node={node} {rate}{lasts}at={at_s}s")


def replay(faults: Iterable[Fault]) -> str:
    """What makes the same faults come again, for the command line: one `--fault` on a line for each."""
    return "\n".join(f"--fault {shlex.quote(fault.text)}" for fault in faults)


# -- values -----------------------------------------------------------------------------------


def _gap(text: str) -> float | None:
    """The time between two faults, of `1/30s`."""
    count_text, _, time = text.partition("/")
    time = time if time[:1].isdigit() else f"1{time}"  # 2/m
    count, seconds = parse_number(count_text, 1, 1_000), parse_duration(time, least_s=0.001)
    gap_s = None if count is None or seconds is None else seconds / count
    return gap_s if gap_s is not None and gap_s >= _LEAST_GAP_S else None


def _kinds(text: str) -> tuple[str, ...] | None:
    kinds = tuple(" ".join(word.replace("-", " ").split()) for word in text.split(","))
    fit = all(kind in KINDS and kind not in NOT_BY_CHANCE for kind in kinds)
    return kinds if fit and len(set(kinds)) == len(kinds) else None


def _nodes(text: str) -> tuple[int, ...] | None:
    """Of `0,2` or `1-3`."""
    found: list[int] = []
    for part in text.split(","):
        low_text, dash, high_text = part.partition("-")
        low = parse_number(low_text, 0, MAX_NODE)
        high = parse_number(high_text, 0, MAX_NODE) if dash else low
        if low is None or high is None or high < low or len(found) > MAX_NODE:
            return None
        found += range(low, high + 1)
    return tuple(found) if len(set(found)) == len(found) else None


_MAY = ", ".join(kind.replace(" ", "-") for kind in KINDS if kind not in NOT_BY_CHANCE)
_CHAOS_KEYS = {
    "seed": _Value("seed", lambda text: parse_number(text, 0, 10**12 - 1), "a whole number", "7"),
    "rate": _Value("gap_s", _gap, f"a number in a time, such as 1/30s; {1 / _LEAST_GAP_S:.0f}/s at most", "1/30s"),
    "kinds": _Value("kinds", _kinds, f"some of {_MAY}, separated by commas", "partition"),
    "for": _VALUES["for"],
    "nodes": _Value("nodes", _nodes, "indices of nodes, such as 0,2 or 1-3, each once", "0,2"),
}


def counted_nodes(count: int) -> str:
    """Such as "nodes 0 to 3"."""
    return f"nodes 0 to {count - 1}" if count > 1 else "one node, 0"
