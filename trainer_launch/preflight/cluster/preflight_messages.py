"""What nodes in their preflight say to each other: one JSON object per line, checked before it becomes a value.

The server's first line is a coordinator's Challenge, so that a node whose job runs already is told from one that
checks: the first says Hello, the second Present.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.membership.protocol import Challenge, Hello, NodeRank, Nodes, StatusQuery
from trainer_launch.membership.protocol import Refused as Refused
from trainer_launch.membership.protocol import Time as Time
from trainer_launch.model.findings import Checksums, Finding, Measures, Severity, Status
from trainer_launch.model.json_lines import Bound, Codec, Count, Name, Port, Text
from trainer_launch.model.units import counted, listed
from trainer_launch.preflight.report_formats import finding_as_json, finding_of

VERSION = 3
MAX_RAILS = 64
MAX_FACTS = 400
MAX_VALUE = 300  # characters of one fact
MAX_FINDINGS_BYTES = 30_000  # inside a line each of them may take two

_Fact: TypeAlias = Annotated[str, Bound(0, MAX_VALUE)]
_Facts: TypeAlias = Annotated[Mapping[_Fact, _Fact], Bound(0, MAX_FACTS)]
_Way: TypeAlias = Annotated[str, Bound(4, 6, ("socket", "gloo", "nccl").__contains__, "socket, gloo or nccl")]
_Findings: TypeAlias = Annotated[str, Bound(0, MAX_FINDINGS_BYTES)]


class Seen(NamedTuple):
    """One rail of a test, as one end saw it."""

    why: Text  # it failed; "": it did not
    rate: Count  # bytes per second, the slower direction; 0 when it failed


# -- from a node ------------------------------------------------------------------------------


class Present(Struct, frozen=True):
    """Who is there. `port` is where this node listens for probes and pair tests."""

    version: Nodes
    job: Name
    node_rank: NodeRank
    host: Name
    incarnation: Name
    port: Port
    proof: Text | None = None  # as a Hello's


class Alive(Struct, frozen=True):
    """Still here."""


class Record(Struct, frozen=True):
    """What this node is, by stable names, and what its own checks found that others must know."""

    facts: _Facts
    offset_s: float  # node 0's clock minus this one's
    error_s: float  # at most so much off
    findings: _Findings  # as a verdict's
    measures: Measures = ()
    checksums: Checksums = ()
    tokens: _Facts = field(default_factory=dict)  # whose this node found, by folder


class Result(Struct, frozen=True):
    """How this end saw its test, on each rail."""

    round: Nodes
    seen: Annotated[tuple[Seen, ...], Bound(1, MAX_RAILS)]


class Found(Struct, frozen=True):
    """What this node's own checks have found before all were there: the others are told, should they never be."""

    findings: _Findings  # as a verdict's


# -- from the server --------------------------------------------------------------------------


class Waiting(Struct, frozen=True):
    """The cluster preflight goes on for at most so much longer; the first few that are missing, by name."""

    present: Nodes
    wanted: Nodes
    missing: tuple[Text, ...]
    left_s: float


class TimeIs(Struct, frozen=True):
    """Node 0's clock when it heard and when it answered."""

    sent: float
    heard: float
    answered: float


class Complete(Struct, frozen=True):
    """All are there: send the record. Secrets are compared by hashes with this salt."""

    salt: Name
    tokens: tuple[Name, ...]  # the incarnations of the nodes to look for in folders for checkpoints


class Test(Struct, frozen=True):
    """Test the way to another node, or among all; who is first listens for the token, the others find it there."""

    round: Nodes
    rank: NodeRank
    size: Nodes
    host: Name
    port: Port
    token: Name
    limit_s: float
    way: _Way = "socket"  # or torch's gloo or nccl
    rails: Annotated[int, Bound(1, MAX_RAILS)] = 1  # each with a communicator of its own
    is_whole: bool = False  # one communicator for all rails of all nodes
    address: Text = ""  # of the first one, as node 0 sees it; the host may not resolve elsewhere


class Decided(Struct, frozen=True):
    """What was found, as a JSON list of findings, the worst first."""

    findings: _Findings


# -- from a node's listener, to whoever connects there ----------------------------------------


class Here(Struct, frozen=True):
    """This node runs; how far it has come with the cluster preflight."""

    stage: Text


FromNode: TypeAlias = Present | Alive | Time | Record | Result | Found | Hello | StatusQuery
FromServer: TypeAlias = Challenge | Waiting | TimeIs | Complete | Test | Decided | Refused
Message: TypeAlias = FromNode | FromServer | Here


_CODEC = Codec(
    *(Present, Alive, Time, Record, Result, Found, Hello, StatusQuery),
    *(Challenge, Waiting, TimeIs, Complete, Test, Decided, Refused),
    Here,
)
render = _CODEC.encode


def parse(line: bytes) -> Message:
    """Read a line, with or without its newline."""
    return _CODEC.decode(line)  # type: ignore[no-any-return]


# -- findings as a text: a JSON list, the worst first, as many as fit ---------------------------


_TEXT = 600
_EVIDENCE = 6
_NAMES = 8


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """In the order in which a person should read them; those that weigh the same keep theirs."""
    order = list(Severity)
    quiet = (Status.PASS, Status.SKIPPED)
    return sorted(findings, key=lambda found: (order.index(found.severity), found.status in quiet))


def dump_findings(findings: Iterable[Finding], limit: int = MAX_FINDINGS_BYTES) -> str:
    """Findings as a text; the worst ones go first, and what does not fit is only counted."""
    ordered = worst_first(findings)
    texts: list[str] = []
    size = 400  # for the last one, which counts
    for number, finding in enumerate(ordered):
        text = json.dumps(finding_as_json(_shortened(finding)), separators=(",", ":"))
        if size + len(text) + 1 > limit:
            texts.append(json.dumps(finding_as_json(_more(finding, len(ordered) - number)), separators=(",", ":")))
            break
        texts.append(text)
        size += len(text) + 1
    return f"[{','.join(texts)}]"


def load_findings(text: str) -> list[Finding]:
    """Findings of another node. Raises ValueError: they are none."""
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("a nest that is too deep") from None
    if not isinstance(told, list):
        raise ValueError("no list of findings")
    return [finding_of(one) for one in told]


def _shortened(finding: Finding) -> Finding:
    return replace(
        finding,
        text=finding.text[:_TEXT],
        action=finding.action[:_TEXT],
        subject=listed(finding.subject.split(", "), _NAMES)[:_TEXT],
        evidence=tuple(one[:_TEXT] for one in finding.evidence[:_EVIDENCE]),
    )


def _more(finding: Finding, count: int) -> Finding:
    return Finding(
        check=finding.check,
        status=finding.status,
        fault=finding.fault,
        text=f"and {counted(count, 'more finding')}",
    )
