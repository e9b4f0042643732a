"""What nodes in their preflight say to each other: one JSON object per line, checked before it becomes a value.

The server's first line is a coordinator's Challenge, so that a node whose job runs already is told from one that
checks: the first says Hello, the second Present.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from trainer_launch.membership.field_checks import (
    MAX_NODES,
    UnfitError,
    flag,
    name,
    number,
    optional,
    real,
    text,
    texts,
)
from trainer_launch.membership.json_lines import ProtocolError, Vocabulary
from trainer_launch.membership.protocol import Challenge, Hello, StatusQuery
from trainer_launch.membership.protocol import Time as Time
from trainer_launch.preflight.measurements import Checksum, Measure, UnfitMeasuresError, checksums_of, measures_of

VERSION = 2
MAX_RAILS = 64
WAYS = ("socket", "gloo", "nccl")  # to test a pair
MAX_FACTS = 400
MAX_VALUE = 300  # characters of one fact
MAX_FINDINGS_BYTES = 30_000  # inside a line each of them may take two
_MAX_BYTES = 2**53


class Seen(NamedTuple):
    """One rail of a test, as one end saw it."""

    why: str  # it failed; "": it did not
    rate: int  # bytes per second, the slower direction; 0 when it failed


# -- from a node ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Present:
    """Who is there. `port` is where this node listens for probes and pair tests."""

    version: int
    job: str
    node_rank: int | None
    host: str
    incarnation: str
    port: int
    proof: str | None = None  # as a Hello's


@dataclass(frozen=True, slots=True)
class Alive:
    """Still here."""


@dataclass(frozen=True, slots=True)
class Record:
    """What this node is, by stable names, and what its own checks found that others must know."""

    facts: Mapping[str, str]
    offset_s: float  # node 0's clock minus this one's
    error_s: float  # at most so much off
    findings: str  # as a verdict's
    measures: tuple[Measure, ...] = ()
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """How this end saw its test, on each rail."""

    round: int
    seen: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What this node's own checks have found before all were there: the others are told, should they never be."""

    findings: str  # as a verdict's


@dataclass(frozen=True, slots=True)
class Sought:
    """Whose tokens this node has found, by folder: their ranks, with commas."""

    found: Mapping[str, str]


# -- from the server --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """The cluster preflight goes on for at most so much longer; the first few that are missing, by name."""

    present: int
    wanted: int
    missing: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class TimeIs:
    """Node 0's clock when it heard and when it answered."""

    sent: float
    heard: float
    answered: float


@dataclass(frozen=True, slots=True)
class Complete:
    """All are there: send the record. Secrets are compared by hashes with this salt."""

    salt: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Seek:
    """Look for the tokens of these nodes in the folders for checkpoints."""

    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """Test the way to another node, or among all; who is first listens for the token, the others find it there."""

    round: int
    rank: int
    size: int
    host: str
    port: int
    token: str
    limit_s: float
    way: str = "socket"  # or torch's gloo or nccl
    rails: int = 1  # each with a communicator of its own
    is_whole: bool = False  # one communicator for all rails of all nodes


@dataclass(frozen=True, slots=True)
class Decided:
    """What was found, as a JSON list of findings, the worst first."""

    findings: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not now, or not at all."""

    reason: str
    retry: bool


# -- from a node's listener, to whoever connects there ----------------------------------------


@dataclass(frozen=True, slots=True)
class Here:
    """This node runs; how far it has come with the cluster preflight."""

    host: str
    incarnation: str
    stage: str


FromNode: TypeAlias = Present | Alive | Time | Record | Result | Found | Sought | Hello | StatusQuery
FromServer: TypeAlias = Challenge | Waiting | TimeIs | Complete | Seek | Test | Decided | Refused
Message: TypeAlias = FromNode | FromServer | Here


def render(message: Message) -> bytes:
    """Write a message as its line."""
    return _VOCABULARY.render(message)


def parse(line: bytes) -> Message:
    """Read a line, with or without its newline."""
    made, values = _VOCABULARY.read(line)
    if made is Hello:  # of another conversation: only who it is from matters
        return _hello(values)
    if made is StatusQuery:  # likewise: there is no status yet
        return StatusQuery(version=0, job="")
    return _VOCABULARY.make(made, values)  # type: ignore[no-any-return]


def _hello(values: Mapping[str, Any]) -> Hello:
    try:
        return Hello(
            version=_COUNT(values.get("version")),
            job=name(values.get("job")),
            node_rank=optional(_RANK)(values.get("node_rank")),
            host=name(values.get("host")),
            incarnation=name(values.get("incarnation")),
            proof=optional(text)(values.get("proof")),
        )
    except UnfitError as problem:
        raise ProtocolError(f"a hello has a field that is not {problem}") from None


def _facts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_FACTS:
        raise UnfitError(f"at most {MAX_FACTS} facts")
    if not all(isinstance(one, str) and len(one) <= MAX_VALUE for one in (*value, *value.values())):
        raise UnfitError(f"facts of at most {MAX_VALUE} characters")
    return dict(value)


def _measured(read: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    def check(value: Any) -> tuple[Any, ...]:
        try:
            return read(value)
        except UnfitMeasuresError as problem:
            raise UnfitError(str(problem)) from None

    return check


def _seen(value: Any) -> tuple[Seen, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_RAILS:
        raise UnfitError(f"a list of 1 to {MAX_RAILS} rails")
    if not all(isinstance(row, list) and len(row) == len(Seen._fields) for row in value):
        raise UnfitError("rails with a reason and a rate each")
    return tuple(Seen(text(why), _RATE(rate)) for why, rate in value)


def _way(value: Any) -> str:
    if value not in WAYS:
        raise UnfitError(f"one of {', '.join(WAYS)}")
    return str(value)


def _long(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_FINDINGS_BYTES:
        raise UnfitError(f"a text of at most {MAX_FINDINGS_BYTES} characters")
    return value


_COUNT, _RANK, _PORT = number(MAX_NODES + 1), number(MAX_NODES), number(65536, 1)
_RATE = number(_MAX_BYTES)
_VOCABULARY = Vocabulary(
    {
        Present: {"version": _COUNT, "job": name, "node_rank": optional(_RANK), "host": name, "incarnation": name}
        | {"port": _PORT, "proof": optional(text)},
        Alive: {},
        Time: {"sent": real},
        Record: {"facts": _facts, "offset_s": real, "error_s": real, "findings": _long}
        | {"measures": _measured(measures_of), "checksums": _measured(checksums_of)},
        Result: {"round": _COUNT, "seen": _seen},
        Found: {"findings": _long},
        Sought: {"found": _facts},
        Hello: {},
        StatusQuery: {},
        Challenge: {"nonce": text},
        Waiting: {"present": _COUNT, "wanted": _COUNT, "missing": texts, "left_s": real},
        TimeIs: {"sent": real, "heard": real, "answered": real},
        Complete: {"salt": name, "nodes": _COUNT},
        Seek: {"ranks": texts},
        Test: {"round": _COUNT, "rank": _RANK, "size": _COUNT, "host": name, "port": _PORT, "token": name}
        | {"limit_s": real, "way": _way, "rails": number(MAX_RAILS + 1, 1), "is_whole": flag},
        Decided: {"findings": _long},
        Refused: {"reason": text, "retry": flag},
        Here: {"host": name, "incarnation": name, "stage": text},
    }
)
