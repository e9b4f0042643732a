"""The messages between a node and the coordinator: one JSON object per line, checked before it becomes a value.

The server's first line is a Challenge, the client's first is a Hello; all else may come at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, field

from trainer_launch import __version__
from trainer_launch.model.codec import (
    MAX_NAME,
    MAX_NODES,
    MAX_RANKS,
    MAX_TEXT,
    Amount,
    Codec,
    Count,
    Name,
    Port,
    Rank,
    Tagged,
    Text,
)
from trainer_launch.model.units import ranges_in

VERSION = 10
MAX_CLAIMS = 32
MAX_QUARANTINED = 16
MAX_TOPICS = 8  # of the notes in one message
_ADVICE = "install the same trainer-launch in all pods"
_VERSIONS_OF_0_1 = re.compile(r"^(.*) speaks version ([0-9]+), not ([0-9]+)$")
_VERSION_OF_NODE = re.compile(r"(?<=uses protocol version )([0-9]+, )this node (?=[0-9]+;)")


def _ascend(ranks: str) -> bool:
    """Each rank once, so that as many are read out of it as there are nodes at most: strangers send it, too."""
    end = 0
    for part in (parts := ranges_in(ranks)):
        if not (end <= part.start < part.stop <= MAX_NODES and part.step == 1):
            return False
        end = part.stop
    return bool(parts)


NodeRank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NODES - 1)]
Nodes: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NODES)]
_Spans: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
_Role: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]  # any text, as torchrun has it
_Highest: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # there are always numbers above it
_Workers: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANKS)]  # of one node
_AllWorkers: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NODES * MAX_RANKS)]
_Ranks: TypeAlias = Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)]
_Notes: TypeAlias = Annotated[Mapping[Name, Any], Meta(max_length=MAX_TOPICS)]  # their bodies
_Code: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]
_Lease: TypeAlias = Annotated[float, Meta(ge=1e-6, le=1e6)]  # seconds


class Claim(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A generation as its members know it; see election.py."""

    generation: Count
    coordinator: NodeRank  # the rank of the node whose launcher formed it
    ranks: _Spans  # its members, as 0-3,7
    sure: bool  # whether every member has taken it

    def __post_init__(self) -> None:
        if not _ascend(self.ranks):
            raise ValueError("Expected ranks such as 0-3,7")


Machine: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[\x00-\x7f]*\Z")]


class Quarantine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine that is not admitted; see quarantine.py."""

    host: Name  # the node's name when it was found
    machine: Machine  # "": only the host is known
    why: Text


_Quarantined: TypeAlias = Annotated[tuple[Quarantine, ...], Meta(max_length=MAX_QUARANTINED)]
_Claims: TypeAlias = Annotated[tuple[Claim, ...], Meta(max_length=MAX_CLAIMS)]
Row: TypeAlias = tuple[NodeRank | None, Text, Name, Amount | None]


class StatusQuery(Tagged, frozen=True, forbid_unknown_fields=False):
    """In place of a Hello: how does the job stand? A JobStatus is the answer, and the end of the connection."""

    version: Nodes
    job: Name
    proof: Text | None = None  # see authentication.py


class JobStatus(Tagged, frozen=True):
    """How the job stands."""

    phase: Name
    generation: Count
    restarts: Count
    max_restarts: Count
    min_nodes: Nodes
    max_nodes: Nodes
    n_nodes: Count  # all that are known; `nodes` are as many of them as fit, above all the absent
    nodes: Annotated[
        tuple[Row, ...], Meta(max_length=MAX_NODES)
    ]  # node rank, host, state, seconds since it was lost
    end: Text | None  # why the job is over
    spares: Nodes = 0  # beyond `max_nodes`
    quarantined: _Quarantined = ()
    notes: _Notes = field(default_factory=dict)
    ready: bool = True  # to take nodes that train elsewhere; see election.py


class Hello(Tagged, frozen=True, forbid_unknown_fields=False):
    """A node's first message. If it has been in the job before, it says what it saw, should the server be new."""

    version: Nodes
    job: Name
    node_rank: NodeRank | None  # None: it has none, and `arrives`
    host: Name
    incarnation: Name  # differs for every process that calls
    generation: _Highest = 0  # the highest that it has seen
    restarts: _Highest = 0  # likewise
    proof: Text | None = None  # see authentication.py
    claims: _Claims = ()  # the generations that it may still have a say about
    workers: _Workers = 0  # on this node; 0: torch's own agents settle ranks among themselves
    role: _Role = ""  # of these workers, as in torchrun
    machine: Machine = ""  # what identifies the machine below it; "": not known
    fault: Text = ""  # what its own preflight found faulty here
    label: Machine = ""  # where it is in the network, such as block-a/rack-3; "": it does not say
    nodes: Nodes = 0  # of the job, as this node was told, spares included; 0: their number may vary
    arrives: bool = False  # it has no rank of its own, only what a coordinator gave it; see membership.py
    listens: Port | None = None  # in preflight: where others look for it and test the way to it; None: at work


class Join(Tagged, frozen=True):
    """The node has no workers running and is ready for a generation above `generation`."""

    incarnation: Name
    generation: Count = 0  # the last one that it was in; a Join that is overtaken by a newer one means nothing
    finished: _Ranks = ()  # ranks that had ended with exit code 0 before that one was over
    failed: bool = False  # whether a worker had failed for a reason of its own
    prepared: bool = True  # False: it cannot start workers yet, and joins again when it can
    device_fault: Text = ""  # the worker's last error, which proves that a device failed
    notes: _Notes = field(default_factory=dict)
    may_be_asked: bool = False  # whether one that finished may have been told to, by a signal from elsewhere
    kept: _Workers = 0  # workers that wait here with their state of that generation


class Renew(Tagged, frozen=True):
    """Still here."""


class Took(Tagged, frozen=True):
    """The node has heard of the generation, and will say so wherever it goes."""

    generation: Count


class Store(Tagged, frozen=True):
    """Group rank 0 has opened the generation's store."""

    generation: Count
    host: Name
    port: Port


class Failed(Tagged, frozen=True):
    """A worker of this node failed, and no other node's loss was known here."""

    generation: Count
    rank: Rank | None
    exit_code: _Code | None
    signal: _Code | None
    message: Text = ""
    error: Text | None = None  # the type of the exception that ended it
    lost_peer: bool = False  # whether all that failed on this node only say that they waited for a peer in vain
    finished: _Ranks = ()  # ranks that had ended with exit code 0 before
    cause: Name | None = None  # the exit reason for all nodes, where a restart cannot help
    notes: _Notes = field(default_factory=dict)
    timed_out: bool = False  # with `lost_peer`: a collective did not complete in time, and no connection was lost
    may_be_asked: bool = False  # as in a Join
    exit_reason: Text = ""  # in this node's words, for all nodes
    helps: bool | None = None  # likewise, whether a restart can help
    ago_s: Amount = 0.0  # since it failed
    is_cause: bool = True  # False: that worker was only the first to say what all ranks did


class Leave(Tagged, frozen=True):
    """The node goes on purpose."""

    reason: Text


class Note(Tagged, frozen=True):
    """A note of the coordinator or of a node, to the owner of its topic; see notes.py."""

    generation: Count
    topic: Name
    body: Any


class Done(Tagged, frozen=True):
    """All workers of this node have succeeded."""

    generation: Count


class Challenge(Tagged, frozen=True):
    """The first line, for all versions: what a proof must contain, or "" when there is no secret."""

    nonce: Text


class Welcome(Tagged, frozen=True):
    """The Hello was good; a node that says nothing for `lease_s` counts as lost."""

    lease_s: _Lease


class Refused(Tagged, frozen=True):
    """Not in this job; `retry` tells whether that may change. Launchers of all versions read these two fields."""

    reason: Text
    retry: bool


def refused_version(server: str, own: int, theirs: int) -> Refused | None:
    """The answer to a launcher of another version, whatever its secret."""
    if theirs == own:
        return None
    text = f"{server} (trainer-launch {__version__}) uses protocol version {own}, this node {theirs}"
    return Refused(f"{text}; {_ADVICE}", retry=False)


def with_own_version(reason: str) -> str:
    """A refusal by another version, which cannot know ours, with both; 0.1 does not tell its own, either."""
    both = f"this node (trainer-launch {__version__})"
    old = rf"\1 (trainer-launch 0.1) uses protocol version \2, {both} \3; {_ADVICE}"
    return _VERSION_OF_NODE.sub(rf"\1{both} ", _VERSIONS_OF_0_1.sub(old, reason))


class RefusedHere(Refused, frozen=True):
    """Not in this job as things are: another process is this node, or another job is served here."""


class Quarantined(Refused, frozen=True):
    """Not in this job, for what the machine has shown."""


class Waiting(Tagged, frozen=True):
    """The nodes that are missing before the next generation; none while one runs."""

    present: Nodes
    wanted: Nodes
    missing: tuple[Text, ...]  # the first few by name
    running: bool = False  # on those that are present


class Formed(Tagged, frozen=True):
    """A generation: this node is `group_rank` of `size`. Its store host answers with Store."""

    generation: Count
    group_rank: Nodes
    size: Nodes
    restarts: Count  # failures of the job so far
    is_store_host: bool
    claim: Claim | None = None  # answered with Took; None: nobody but this coordinator ever forms a generation
    first_rank: _AllWorkers = 0  # of this node's workers
    world_size: _AllWorkers = 0  # workers of all nodes; 0: a node has not said how many it has
    first_role_rank: _AllWorkers = 0  # of this node's workers, among the workers of its role
    role_world_size: _AllWorkers = 0
    node_rank: NodeRank | None = None  # of this node, which may have come without one
    notes: _Notes = field(default_factory=dict)
    kept: _AllWorkers = 0  # workers of all nodes that have the state of the generation before this one


class Go(Tagged, frozen=True):
    """The generation's store is open there: start the workers."""

    generation: Count
    host: Name
    port: Port


class Restart(Tagged, frozen=True):
    """The generation of this number is over: stop its workers and join again."""

    generation: Count
    reason: Text
    unnoticed_s: Amount = 0.0  # for how long that was true and not known
    grows: bool = False  # nothing has failed: newcomers may join
    patience_s: Amount = 0.0  # how long a worker that waits for nobody may still end by itself


class GiveUp(Tagged, frozen=True):
    """The job is over and has failed; the rest names the first failure of its last generation, if there was one."""

    reason: Text
    node: Text | None = None
    rank: Rank | None = None
    exit_code: _Code | None = None
    signal: _Code | None = None
    message: Text | None = None
    cause: Name | None = None  # the exit reason for all nodes, where the failure has one of its own
    seen: Text = ""  # what the notes of the nodes say of it
    node_rank: NodeRank | None = None  # of the node that it names
    host: Text | None = None
    is_victim: bool = False  # the worker that it names is not known to be the cause
    exit_reason: Text = ""  # as in a Failed
    helps: bool | None = None


class Finished(Tagged, frozen=True):
    """All nodes are done."""


FromNode: TypeAlias = Hello | Join | Renew | Took | Store | Failed | Leave | Done | Note | StatusQuery
FromServer: TypeAlias = (
    Challenge
    | Welcome
    | Refused
    | RefusedHere
    | Quarantined
    | Waiting
    | Formed
    | Go
    | Restart
    | GiveUp
    | Finished
    | JobStatus
    | Note
)
Message: TypeAlias = FromNode | FromServer


_CODEC: Codec[Message] = Codec(Message, max_text=MAX_TEXT)
render, parse = _CODEC.encode, _CODEC.decode
