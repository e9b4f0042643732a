"""The nodes of a cluster preflight: their names, what each has reported, and what all are held against."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from trainer_launch.model import Endpoint, Job, Topology
from trainer_launch.planning.torch import seats_by_index
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.thresholds import Shares, Table, Thresholds

if TYPE_CHECKING:
    from trainer_launch.preflight.check import Check
    from trainer_launch.preflight.cluster.pair_rounds import Rounds

TOLD = "check "  # how a fact begins that is a check's own, and not compared
LEASE_S = 6.0  # a node that says nothing for so long is lost


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
    rank = topology.node_rank
    seats = None if members or rank is None else seats_by_index(home, rank, hostname, rank + 1)
    if seats is None:
        return Names(home=home, members=members)
    return Names(home=home, pattern=seats.pattern, offset=seats.offset)


class ClusterSettings(Struct, frozen=True, kw_only=True):
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
    record_s: float = 60.0  # for the records of all nodes


class Node(Struct):
    """A node that has come."""

    rank: int
    host: str
    incarnation: str
    address: str  # as its connection has it
    port: int
    peer: int | None  # the number of its connection, while there is one
    heard_s: float
    lost: str = ""  # how, while it is not connected
    lost_s: float = 0.0
    record: msg.Record = msg.Record()  # what it has reported; before that, at most early findings
    has_record: bool = False

    @property
    def name(self) -> str:
        """As people know it."""
        return label(self.rank, self.host)


class Cluster(Struct, frozen=True, kw_only=True):
    """All nodes, for the checks that look at all of them: what each has told, seen and measured."""

    settings: ClusterSettings
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
        return {node.name: node.record.facts[key] for node in self.nodes if key in node.record.facts}


def label(rank: int, host: str | None) -> str:
    """A node for people."""
    return f"node {rank} ({host})" if host else f"node {rank}"
