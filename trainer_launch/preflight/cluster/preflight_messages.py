"""Messages between nodes in their preflight: membership's Challenge, Hello and Renew, then its own.

A Hello that `listens` comes from a node in preflight, any other from a node whose job runs already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, field
from msgspec.structs import replace

from trainer_launch.membership.protocol import VERSION as VERSION
from trainer_launch.membership.protocol import Challenge, JobStatus, NodeRank, Nodes, StatusQuery
from trainer_launch.membership.protocol import Hello as Hello
from trainer_launch.membership.protocol import Refused as Refused
from trainer_launch.membership.protocol import Renew as Renew
from trainer_launch.model.codec import Codec, Count, Name, Port, Real, Tagged, Text, encode
from trainer_launch.model.findings import Finding, Measures, single_line, worst_first
from trainer_launch.model.units import counted, listed

MAX_RAILS = 64
MAX_FACTS = 400
MAX_VALUE = 300  # characters of one fact
MAX_FINDINGS_BYTES = 30_000  # of a verdict
_MAX_FINDINGS = 1000
_MAX_TEXT = 600  # of a finding that travels
_MAX_EVIDENCE = 6
_MAX_NAMES = 8

_Fact: TypeAlias = Annotated[str, Meta(max_length=MAX_VALUE)]
_Facts: TypeAlias = Annotated[Mapping[_Fact, _Fact], Meta(max_length=MAX_FACTS)]
_Way: TypeAlias = Annotated[str, Meta(pattern=r"\A(socket|gloo|nccl)\Z")]
_Findings: TypeAlias = Annotated[tuple[Finding, ...], Meta(max_length=_MAX_FINDINGS)]  # as many as `fitted` leaves


class RailResult(NamedTuple):
    """Result of a rail in a test, as one end saw it."""

    why: Text  # it failed; "": it did not
    rate: Count  # bytes per second, the slower direction; 0 when it failed


class Time(Tagged, frozen=True):
    """A question for the time at node 0."""

    sent: Real


class NodeReport(Tagged, frozen=True):
    """Facts of this node, by stable names, and the findings of its own checks that others must know.

    An early report has the findings alone: the others get them, should some nodes never be there.
    """

    facts: _Facts = field(default_factory=dict)
    offset_s: Real = 0.0  # node 0's clock minus this one's
    error_s: Real = 0.0  # at most so much off
    findings: _Findings = ()
    measures: Measures = ()
    is_early: bool = False


class Result(Tagged, frozen=True):
    """Results of a test on each rail, as this end saw it."""

    round: Nodes
    rails: Annotated[tuple[RailResult, ...], Meta(min_length=1, max_length=MAX_RAILS)]


class PreflightWaiting(Tagged, frozen=True):
    """The cluster preflight goes on for at most so much longer; the first few that are missing, by name."""

    present: Nodes
    wanted: Nodes
    missing: tuple[Text, ...]
    left_s: Real


class TimeIs(Tagged, frozen=True):
    """Node 0's clock when it heard and when it answered."""

    sent: Real
    heard: Real
    answered: Real


class Complete(Tagged, frozen=True):
    """All are there: send the report. Secrets are compared by hashes with this salt."""

    salt: Name


class Test(Tagged, frozen=True):
    """Test the way to another node: rank 0 listens for the token, rank 1 connects."""

    round: Nodes
    rank: NodeRank
    host: Name
    port: Port
    token: Name
    limit_s: Real
    way: _Way = "socket"  # or torch's gloo or nccl
    rails: Annotated[int, Meta(ge=1, le=MAX_RAILS)] = 1  # each with a communicator of its own
    address: Text = ""  # of rank 0, as node 0 sees it; the host may not resolve elsewhere


class Decided(Tagged, frozen=True):
    """The verdict for all nodes, the worst finding first."""

    findings: _Findings


FromNode: TypeAlias = Hello | Renew | Time | NodeReport | Result | StatusQuery
FromServer: TypeAlias = Challenge | PreflightWaiting | TimeIs | Complete | Test | Decided | Refused | JobStatus
Message: TypeAlias = FromNode | FromServer


_CODEC: Codec[Message] = Codec(Message)
render = _CODEC.encode


def parse(line: bytes) -> Message:
    """A message; a finding's texts are one line each, whatever another node has put there.

    Raises:
        MessageError: it is none.
    """
    message = _CODEC.decode(line)
    if isinstance(message, NodeReport | Decided):
        return replace(message, findings=tuple(map(single_line, message.findings)))
    return message


def fitted(findings: Iterable[Finding], max_bytes: int = MAX_FINDINGS_BYTES) -> tuple[Finding, ...]:
    """Findings that fit into a message, the worst first and shortened; what does not fit is only counted."""
    ordered = worst_first(findings)
    short: list[Finding] = []
    size = 400  # for the last one, which counts
    for number, finding in enumerate(ordered):
        short.append(_shortened(finding))
        size += len(encode(short[-1])) + 1
        if size > max_bytes:
            text = f"and {counted(len(ordered) - number, 'more finding')}"
            short[-1] = Finding(check=finding.check, status=finding.status, fault=finding.fault, text=text)
            break
    return tuple(short)


def _shortened(finding: Finding) -> Finding:
    return replace(
        finding,
        text=finding.text[:_MAX_TEXT],
        action=finding.action[:_MAX_TEXT],
        subject=listed(finding.subject.split(", "), _MAX_NAMES)[:_MAX_TEXT],
        evidence=tuple(line[:_MAX_TEXT] for line in finding.evidence[:_MAX_EVIDENCE]),
    )
