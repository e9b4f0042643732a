"""The messages between a node and the coordinator: one JSON object per line, checked before it becomes a value.

The server's first line is a Challenge, the client's first is a Hello; all else may come at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple, TypeAlias, get_args

from msgspec import Struct, field

from trainer_launch import __version__
from trainer_launch.model.collectives import MAX_ENTERED, Entries, RankState
from trainer_launch.model.goodput import Seconds, Told
from trainer_launch.model.json_lines import (
    MAX_ITEMS,
    MAX_TEXT,
    Amount,
    Bound,
    Codec,
    Count,
    FreeText,
    Name,
    Port,
    Printable,
    Text,
)
from trainer_launch.model.stragglers import Lateness

VERSION = 6
MAX_NODES = MAX_ITEMS
MAX_CLAIMS = 32
MAX_QUARANTINED = 16
DEVICE, MACHINE = "device", "machine"  # what a death shows: a device failed; it may be the machine's doing
MAX_RANKS = 1024  # of one node
MAX_SUSPECTS = 16  # that are told at once
MAX_STATES = 16384  # of all nodes, in an explanation
_MAX_NAME = 253
_RANKS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


# -- fields ------------------------------------------------------------------------------------


def spans(ranks: str) -> Iterator[tuple[int, int]]:
    """The first and the last rank of each run in a text such as 0-3,7."""
    for part in ranks.split(","):
        low, _, high = part.partition("-")
        yield int(low), int(high or low)


def _ascend(ranks: str) -> bool:
    """Each rank once, so that as many are read out of it as there are nodes at most: strangers send it, too."""
    if not _RANKS.fullmatch(ranks):
        return False
    before = -1
    for low, high in spans(ranks):
        if not before < low <= high < MAX_NODES:
            return False
        before = high
    return True


NodeRank: TypeAlias = Annotated[int, Bound(0, MAX_NODES - 1)]
Nodes: TypeAlias = Annotated[int, Bound(0, MAX_NODES)]
_Spans: TypeAlias = Annotated[str, Bound(1, MAX_TEXT, _ascend, "ranks such as 0-3,7")]
_Role: TypeAlias = Annotated[str, Bound(0, _MAX_NAME)]  # any text, as torchrun has it
_Seen: TypeAlias = Annotated[int, Bound(0, 2**31 - 1)]  # there are always numbers above it
_Workers: TypeAlias = Annotated[int, Bound(0, MAX_RANKS)]  # of one node
_AllWorkers: TypeAlias = Annotated[int, Bound(0, MAX_NODES * MAX_RANKS)]
_Rank: TypeAlias = Annotated[int, Bound(0, 2**31 - 1)]
_Ranks: TypeAlias = Annotated[tuple[_Rank, ...], Bound(0, MAX_RANKS)]
# By collective, the ranks that entered it last when a generation failed.
_LastEntered: TypeAlias = Annotated[Mapping[Printable, _Ranks], Bound(0, MAX_ENTERED)]
_Suspects: TypeAlias = Annotated[tuple[_Rank, ...], Bound(0, MAX_SUSPECTS)]
_Code: TypeAlias = Annotated[int, Bound(-(2**31), 2**32 - 1)]
_Lease: TypeAlias = Annotated[float, Bound(1e-6, 1e6)]  # seconds


class Claim(NamedTuple):
    """A generation as its members know it; see election.py."""

    generation: Count
    coordinator: NodeRank  # the rank of the node whose launcher formed it
    ranks: _Spans  # its members, as 0-3,7
    sure: bool  # whether every member has taken it


_Machine: TypeAlias = Annotated[str, Bound(0, _MAX_NAME, str.isascii, "ASCII")]


class Quarantine(NamedTuple):
    """A machine that is not admitted; see quarantine.py."""

    host: Name  # the node's name when it was found
    machine: _Machine  # "": only the host is known
    why: FreeText


_Quarantined: TypeAlias = Annotated[tuple[Quarantine, ...], Bound(0, MAX_QUARANTINED)]
_Claims: TypeAlias = Annotated[tuple[Claim, ...], Bound(0, MAX_CLAIMS)]
Row: TypeAlias = tuple[NodeRank | None, Text, Name, Amount | None]


# -- messages of status ------------------------------------------------------------------------


class StatusQuery(Struct, frozen=True):
    """In place of a Hello: how does the job stand? A Status is the answer, and the end of the connection."""

    version: Nodes
    job: Name
    proof: Text | None = None  # see authentication.py


class Time(Struct, frozen=True):
    """What time is it at node 0? The first words of a node in preflight; a coordinator answers with Refused."""

    sent: float


class Status(Struct, frozen=True):
    """How the job stands."""

    phase: Name
    generation: Count
    restarts: Count
    max_restarts: Count
    min_nodes: Nodes
    max_nodes: Nodes
    n_nodes: Count  # all that are known; `nodes` are as many of them as fit, above all the absent
    nodes: Annotated[tuple[Row, ...], Bound(0, MAX_NODES)]  # node rank, host, state, seconds since it was lost
    progress: Amount | None  # of rank 0
    progress_age_s: Amount | None
    end: FreeText | None  # why the job is over
    stall: FreeText | None = None  # why the present generation did not go on, the last time that it did not
    stall_age_s: Amount | None = None
    spares: Nodes = 0  # beyond `max_nodes`
    goodput: Seconds | None = None  # by what they were spent on, since the job's oldest launcher started
    stragglers: Annotated[tuple[Lateness, ...], Bound(0, MAX_SUSPECTS)] = ()
    lateness: Annotated[tuple[Lateness, ...], Bound(0, MAX_SUSPECTS)] = ()  # of the latest ranks in the last sample
    lateness_age_s: Amount | None = None
    quarantined: _Quarantined = ()


# -- from a node ------------------------------------------------------------------------------


class Hello(Struct, frozen=True):
    """Who is calling. A node that has been in the job before says what it has seen, should the server be new."""

    version: Nodes
    job: Name
    node_rank: NodeRank | None  # None: ordered by host name
    host: Name
    incarnation: Name  # differs for every process that calls
    generation: _Seen = 0  # the highest that it has seen
    restarts: _Seen = 0  # likewise
    proof: Text | None = None  # see authentication.py
    claims: _Claims = ()  # the generations that it may still have a say about
    workers: _Workers = 0  # on this node; 0: torch's own agents settle ranks among themselves
    role: _Role = ""  # of these workers, as in torchrun
    machine: _Machine = ""  # what identifies the machine below it; "": not known
    fault: FreeText = ""  # what its own preflight found faulty here
    quarantined: _Quarantined = ()  # whom it knows of
    label: _Machine = ""  # where it is in the network, such as block-a/rack-3; "": it does not say


class Join(Struct, frozen=True):
    """This node has no workers running and is ready for a generation above `generation`."""

    incarnation: Name
    generation: Count = 0  # the last one that it was in; a Join that is overtaken by a newer one means nothing
    finished: _Ranks = ()  # ranks that had ended with exit code 0 before that one was over
    failed: bool = False  # whether a worker had failed for a reason of its own
    prepared: bool = True  # False: it cannot start workers yet, and joins again when it can
    goodput: Told | None = None  # its ledger
    fault: Name | None = None  # DEVICE: what that worker's death proves
    evidence: FreeText = ""  # for it
    entered: _LastEntered = field(default_factory=dict)


class Renew(Struct, frozen=True):
    """Still here."""


class Took(Struct, frozen=True):
    """This node has heard of the generation, and will say so wherever it goes."""

    generation: Count


class Store(Struct, frozen=True):
    """Group rank 0 has opened the generation's store."""

    generation: Count
    host: Name
    port: Port


class Failed(Struct, frozen=True):
    """A worker of this node failed, and no other node's loss was known here."""

    generation: Count
    rank: _Rank | None
    exit_code: _Code | None
    signal: _Code | None
    message: FreeText = ""
    error: Text | None = None  # the type of the exception that ended it
    lost_peer: bool = False  # whether all that failed on this node say that the connection to a peer was closed
    finished: _Ranks = ()  # ranks that had ended with exit code 0 before
    cause: Name | None = None  # the exit reason for all nodes, where a restart cannot help
    fault: Name | None = None  # DEVICE or MACHINE
    evidence: FreeText = ""  # for it
    entered: _LastEntered = field(default_factory=dict)


class Leave(Struct, frozen=True):
    """This node goes on purpose."""

    reason: FreeText


class Quit(Struct, frozen=True):
    """This node's agent has ended the job: torchrun's own restarts are spent, and it does not come back."""

    reason: FreeText


class Ranks(Struct, frozen=True):
    """What this node's ranks show: it sees no progress, or was asked."""

    generation: Count
    states: Annotated[tuple[RankState, ...], Bound(0, MAX_RANKS)]
    at_ns: Annotated[int, Bound(0, 2**63 - 1)]  # since the epoch
    limit_s: Amount = 0.0  # it has seen none for so long; 0: it was asked


class ClockAnswer(Struct, frozen=True):
    """What this node's clock shows, ns since the epoch; said at once."""

    number: Count
    at_ns: Annotated[int, Bound(0, 2**63 - 1)]


class Entered(Struct, frozen=True):
    """When this node's ranks entered their last collectives, and what is known of the GPUs of the suspects."""

    generation: Count
    ranks: Annotated[tuple[Entries, ...], Bound(0, MAX_RANKS)]
    devices: Annotated[tuple[tuple[_Rank, FreeText], ...], Bound(0, MAX_SUSPECTS)] = ()


class Done(Struct, frozen=True):
    """All workers of this node have succeeded."""

    generation: Count


# -- from the server --------------------------------------------------------------------------


class Challenge(Struct, frozen=True):
    """The first line, for all versions: what a proof must contain, or "" when there is no secret."""

    nonce: Text


class Welcome(Struct, frozen=True):
    """The Hello was good; a node that says nothing for `lease_s` counts as lost."""

    lease_s: _Lease


class Refused(Struct, frozen=True):
    """Not in this job; `retry` tells whether that may change. Launchers of all versions read these two fields."""

    reason: FreeText
    retry: bool


def refused_version(server: str, own: int, told: int) -> Refused | None:
    """The answer to a launcher of another version, whatever its secret."""
    if told == own:
        return None
    text = f"{server} (trainer-launch {__version__}) uses protocol version {own}, this node {told}"
    return Refused(f"{text}; install the same trainer-launch in all pods", retry=False)


class Quarantined(Refused, frozen=True):
    """Not in this job, for what the machine has shown."""


class Waiting(Struct, frozen=True):
    """Who is missing before the next generation; nobody while one runs."""

    present: Nodes
    wanted: Nodes
    missing: tuple[Text, ...]  # the first few by name
    running: bool = False  # on those that are present


class Formed(Struct, frozen=True):
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
    goodput: Told | None = None  # for a newcomer: the ledger of a node that was in the job before
    quarantined: _Quarantined = ()  # for who serves the job next


class Go(Struct, frozen=True):
    """The generation's store is open there: start the workers."""

    generation: Count
    host: Name
    port: Port


class Restart(Struct, frozen=True):
    """That generation is over: stop its workers and join again."""

    generation: Count
    reason: FreeText
    unnoticed_s: Amount = 0.0  # for how long that was true and not known
    grows: bool = False  # nothing has failed: newcomers may join


class ShowRanks(Struct, frozen=True):
    """Another node sees no progress: tell what your ranks show."""

    generation: Count


class Explained(Struct, frozen=True):
    """Why the job does not go on, from what all nodes have told."""

    generation: Count
    text: FreeText
    ranks: _Ranks = ()  # whom it is about
    cause: Text = ""  # the exit reason that it proves, "": none
    helps: bool | None = None  # whether a restart can help
    accuses: bool = True  # False: this may take as long as it does
    active: bool = False  # the cause still shows progress: nobody hangs


class ClockQuestion(Struct, frozen=True):
    """What does this node's clock show? The answer is said at once."""

    number: Count


class ShowEntries(Struct, frozen=True):
    """Tell when your ranks have entered their last collectives."""

    generation: Count
    most: Count  # of each rank
    suspects: _Suspects = ()  # have been late before; where are they?
    looks_us: Count = 0  # for so long


class Stragglers(Struct, frozen=True):
    """Which ranks of this node are stragglers now; those that are no longer told have recovered."""

    generation: Count
    ranks: Annotated[tuple[Lateness, ...], Bound(0, MAX_SUSPECTS)]


class GiveUp(Struct, frozen=True):
    """The job is over and has failed; the rest names the first failure of its last generation, if there was one."""

    reason: FreeText
    node: Text | None = None
    rank: _Rank | None = None
    exit_code: _Code | None = None
    signal: _Code | None = None
    message: FreeText | None = None
    cause: Name | None = None  # the exit reason for all nodes, where the failure has one of its own
    seen: FreeText = ""  # which collectives the ranks entered last


class Finished(Struct, frozen=True):
    """All nodes are done."""


FromNode: TypeAlias = (
    Hello
    | Join
    | Renew
    | Took
    | Store
    | Failed
    | Leave
    | Quit
    | Done
    | Ranks
    | ClockAnswer
    | Entered
    | StatusQuery
    | Time
)
FromServer: TypeAlias = (
    Challenge
    | Welcome
    | Refused
    | Quarantined
    | Waiting
    | Formed
    | Go
    | Restart
    | GiveUp
    | Finished
    | Status
    | ShowRanks
    | Explained
    | ClockQuestion
    | ShowEntries
    | Stragglers
)
Message: TypeAlias = FromNode | FromServer


_CODEC = Codec(*get_args(Message))
render = _CODEC.encode


def parse(line: bytes) -> Message:
    """Read a line, with or without its newline."""
    return _CODEC.decode(line)  # type: ignore[no-any-return]
