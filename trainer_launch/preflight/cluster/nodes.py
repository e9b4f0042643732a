"""The nodes of a cluster preflight: their names, how far each has come, what is said and known of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, field

from trainer_launch.membership.protocol import Hello, refused_version
from trainer_launch.model import Endpoint, Job, Topology
from trainer_launch.model.findings import Checksum, Finding, Measure
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.thresholds import Shares, Table, Thresholds

if TYPE_CHECKING:
    from trainer_launch.preflight.check import Check
    from trainer_launch.preflight.cluster.pair_results import Rounds

_FIRST = re.compile(r"(?P<stem>[^.]*-)0")  # the first of some hosts with an index each


class Names(Struct, frozen=True, kw_only=True):
    """Host names by node rank; `pattern` has # for an index."""

    home: Endpoint  # node 0's
    members: tuple[str, ...] = ()
    pattern: str | None = None
    offset: int = 0  # from a node's rank to the index in its name

    def place(self, rank: int) -> Endpoint | None:
        """Where a node should be found, None when nothing tells."""
        if rank == 0:
            return self.home
        if rank < len(self.members):
            return Endpoint(self.members[rank], self.home.port)
        if self.pattern is None:
            return None
        return Endpoint(self.pattern.replace("#", str(rank + self.offset)), self.home.port)


def names_of(job: Job, topology: Topology, home: Endpoint, hostname: str) -> Names:
    """From the contract's members, else from node 0's name and this one's, when they differ in an index alone."""
    members = tuple(member.host for member in job.members or ())
    if members:
        return Names(home=home, members=members)
    label, dot, domain = home.host.partition(".")
    first = _FIRST.fullmatch(label)
    own_rank = topology.node_rank
    if first is None or own_rank is None:
        return Names(home=home)
    stem, offset = first["stem"], 0
    if stem.endswith("-master-"):  # PyTorchJob calls its other nodes worker-0, worker-1 ...
        stem, offset = f"{stem.removesuffix('-master-')}-worker-", -1
    names = Names(home=home, pattern=f"{stem}#{dot}{domain}", offset=offset)
    own = names.place(own_rank)
    fits = own is not None and own.host.partition(".")[0] == hostname.partition(".")[0]
    return names if fits else Names(home=home)


# -- at which stage a node is stuck that should be there and is not ----------------------------


class Stage(str, Enum):
    """How far a node has come, in the order of a pod's life."""

    UNNAMED = "unnamed"
    NO_RECORD = "no DNS record"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    SILENT = "silent"
    RUNS = "cut off"


class Stuck(Struct, frozen=True):
    """A stage, and what was seen in words."""

    stage: Stage
    text: str


_MEANING: Mapping[Stage, str] = {
    Stage.UNNAMED: "its host name is unknown",
    Stage.NO_RECORD: "its pod is not created, not scheduled, or its Service does not publish addresses of pods "
    "that are not ready (publishNotReadyAddresses)",
    Stage.UNREACHABLE: "there is no route to its network",
    Stage.REFUSED: "its pod has an address, but its preflight is not running: the image is being pulled, an "
    "earlier init container runs, or it has ended",
    Stage.TIMEOUT: "packets to it are lost: a network policy, a firewall, or the machine is gone",
    Stage.SILENT: "its process is stopped or stuck: it accepts connections but does not answer",
    Stage.RUNS: "its preflight runs, but could not reach node 0",
}
ADVICE: Mapping[Stage, str] = {
    Stage.UNNAMED: "check which pods of the job are not running",
    Stage.NO_RECORD: "check whether its pod is scheduled (kubectl describe pod), and the job's headless Service",
    Stage.UNREACHABLE: "check the routes and the CNI of both machines",
    Stage.REFUSED: "check the events and the init containers of its pod",
    Stage.TIMEOUT: "check that network policies allow node 0's port in both directions",
    Stage.SILENT: "check what its process waits for; the machine may need a reboot",
    Stage.RUNS: "read its log, and check that network policies allow node 0's port in both directions",
}


def stuck_at(stage: Stage, seen: str) -> Stuck:
    """With what was seen, and what it means."""
    return Stuck(stage, f"{stage.value}{f' ({seen})' if seen else ''}: {_MEANING[stage]}")


# -- what the cluster preflight is told --------------------------------------------------------


TOLD = "check "  # how a fact begins that is a check's own, and not compared
LEASE_S = 6.0  # a node that says nothing for so long is lost


class Settings(Struct, frozen=True, kw_only=True):
    """Who should come, and what is to be done when they are there."""

    job: str
    min_nodes: int
    max_nodes: int
    deadline_s: float  # from the start, for all to come
    names: Names
    salt: str
    with_facts: bool = True
    with_pairs: bool = True
    is_deep: bool = False
    with_full: bool = True  # all nodes together, where it is deep
    pair_test: str = "auto"  # or a way
    thresholds: Thresholds = field(default_factory=Thresholds)
    shares: Shares = field(default_factory=Shares)
    table: Table = field(default_factory=Table)  # what GPUs should deliver
    storage: Mapping[str, bool] = field(default_factory=dict)  # folders, and whether each has to be shared
    gather_s: float = 2.0  # after the last that came, in a job that may have more nodes than it needs
    look_s: float = 3.0  # before the deadline: the others are looked at
    record_s: float = 60.0  # for the records of all nodes
    test_s: float = 5.0  # for a pair test


# -- events -----------------------------------------------------------------------------------


class Said(Struct, frozen=True):
    """A message, from a connection with a number."""

    peer: int
    address: str
    message: msg.Message


class Gone(Struct, frozen=True):
    """A connection has ended."""

    peer: int


class Looked(Struct, frozen=True):
    """How far those have come whom a Look named, in its order."""

    found: Sequence[Stuck]


class Tick(Struct, frozen=True):
    """Time has passed."""


Event: TypeAlias = Said | Gone | Looked | Tick


# -- replies ----------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Say that."""

    peer: int
    message: msg.FromServer


class Drop(Struct, frozen=True):
    """End the connection when all is said."""

    peer: int


class Look(Struct, frozen=True):
    """Find out how far these nodes have come; the answer is a Looked."""

    places: tuple[Endpoint | None, ...]
    limit_s: float


class Over(Struct, frozen=True):
    """All is said."""


Reply: TypeAlias = Send | Drop | Look | Over


# -- nodes ------------------------------------------------------------------------------------


class Node(Struct):
    """One that has come."""

    rank: int
    host: str
    incarnation: str
    address: str  # as its connection has it
    port: int
    peer: int | None
    heard_s: float
    lost: str = ""  # how, while it is not connected
    lost_s: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    offset: tuple[float, float] = (0.0, 0.0)
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measure, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    tokens: dict[str, str] = field(default_factory=dict)  # by folder, whose was found there
    has_record: bool = False

    @property
    def name(self) -> str:
        """As people know it."""
        return label(self.rank, self.host)


class Cluster(Struct, frozen=True, kw_only=True):
    """All nodes, for the checks that look at all of them: what each has told, seen and measured."""

    settings: Settings
    nodes: Sequence[Node]  # that have told what they are, in the order of their ranks
    n_present: int
    collisions: Mapping[int, Collection[str]] = field(default_factory=dict)  # hosts that want one rank
    rounds: Rounds | None = None  # of pair tests, if there were any

    @property
    def names(self) -> list[str]:
        """As people know them."""
        return [node.name for node in self.nodes]

    def told(self, check: Check[Cluster]) -> dict[str, str]:
        """What each node's `tell` has said for a check, by the node's name."""
        key = f"{TOLD}{check.id}"
        return {node.name: node.facts[key] for node in self.nodes if key in node.facts}


def label(rank: int, host: str | None) -> str:
    """A node for people."""
    return f"node {rank} ({host})" if host else f"node {rank}"


# -- who is a node of this job, who is not, and who is missing ---------------------------------


# For who looks for a coordinator.
NOT_YET = msg.Refused("node 0 is still in preflight; its coordinator starts afterwards", retry=True)


def turned_away(said: msg.Present, settings: Settings) -> msg.Refused | None:
    """Why a node is turned away for good, if it is."""
    if (refused := other_version(said)) is not None:
        return refused
    if said.job != settings.job:
        return _another_job(said.job, settings)
    if said.node_rank >= settings.max_nodes:
        last = settings.max_nodes - 1
        return msg.Refused(f"node rank {said.node_rank} is invalid: this job has nodes 0 to {last}", retry=False)
    return None


def other_version(said: msg.Present | Hello) -> msg.Refused | None:
    """The answer to a node whose preflight is of another version; who looks for a coordinator is told to wait."""
    return None if isinstance(said, Hello) else refused_version("node 0", msg.VERSION, said.version)


def not_now(said: Hello, settings: Settings) -> msg.Refused:
    """What a node is told that looks for a coordinator: its job runs already, or it is of another one."""
    if said.job != settings.job:
        return _another_job(said.job, settings)
    return NOT_YET


def _another_job(name: str, settings: Settings) -> msg.Refused:
    return msg.Refused(f"this is the preflight of job {settings.job}, not {name}", retry=False)


def missing_ranks(nodes: Mapping[int, Node], min_nodes: int) -> list[int]:
    """Ranks that are not there."""
    return [rank for rank in range(min_nodes) if rank not in nodes or nodes[rank].peer is None]


def place_of(rank: int, nodes: Mapping[int, Node], names: Names) -> Endpoint | None:
    """Where to look for a node: where it was, or should be."""
    return Endpoint(nodes[rank].address, nodes[rank].port) if rank in nodes else names.place(rank)
