"""The values of a cluster preflight: who should come, who came, what each reported, how pairs were tested."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from trainer_launch.model import Endpoint, Job, Seats, Topology, units
from trainer_launch.model.findings import Measure
from trainer_launch.planning.torch import seats_by_index
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.fault_isolation import Faulty, Pair
from trainer_launch.preflight.thresholds import Table, Thresholds

LEASE_S = 6.0  # a node that says nothing for so long is lost
_SHOWN = 8


class Names(Struct, frozen=True, kw_only=True):
    """Host names by node rank: those that the contract lists, or those of seats."""

    home: Endpoint  # node 0's
    members: tuple[str, ...] = ()
    seats: Seats | None = None

    def place(self, rank: int) -> Endpoint | None:
        """Where a node should be found, None when nothing tells."""
        if 0 < rank < len(self.members):
            return Endpoint(self.members[rank], self.home.port)
        if rank and self.seats is not None:
            return self.seats.endpoint(rank)
        return None if rank else self.home


def names_of(job: Job, topology: Topology, home: Endpoint, hostname: str) -> Names:
    """From the contract's members, else from node 0's name and this one's, when they differ in an index alone."""
    members = tuple(member.host for member in job.members or ())
    rank = topology.node_rank
    seats = None if members or rank is None else seats_by_index(home, rank, hostname, rank + 1)
    return Names(home=home, members=members, seats=seats)


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """The nodes that should come, and what is to be done when they are there."""

    job: str
    min_nodes: int
    max_nodes: int
    deadline_s: float  # from the start, for all to come
    names: Names
    salt: str
    left_out: frozenset[str] = frozenset()  # checks
    table: Table = field(default_factory=Table)  # what GPUs should deliver
    report_s: float = 60.0  # for the reports of all nodes


class JobNode(Struct):
    """A node that has come."""

    hello: msg.Hello
    rank: int
    at: Endpoint  # where it listens, with the address of its connection
    peer: int | None  # the number of its connection, while there is one
    heard_s: float
    lost: str = ""  # how, while it is not connected
    lost_s: float = 0.0
    report: msg.NodeReport = msg.NodeReport(is_early=True)

    @property
    def name(self) -> str:
        """As people know it."""
        return label(self.rank, self.hello.host)


class PairTest(Struct, frozen=True):
    """A test of a pair on one rail, as both its ends saw it: the lower index first."""

    ends: Pair
    whys: tuple[str, str]  # "": it went well
    rate: int  # bytes per second, the slowest that was seen
    rail: int | None = None  # where there are several

    @property
    def is_whole(self) -> bool:
        """Whether all data came through, at whatever speed."""
        return not any(self.whys)


class Way(Struct, frozen=True):
    """How pairs are tested."""

    pairs: str = "socket"
    rails: int = 1


class PairTests(Struct, frozen=True):
    """All pair tests of a cluster preflight, and what they found faulty; nodes by their place in `names`."""

    names: tuple[str, ...] = ()
    tests: tuple[PairTest, ...] = ()
    faulty: Faulty = field(default_factory=Faulty)
    way: Way = Way()
    model: str = ""  # of all GPUs, where the tests were theirs
    thresholds: Thresholds = field(default_factory=Thresholds)  # what they are held against

    @property
    def measures(self) -> list[Measure]:
        """The rates of pairs of GPUs."""
        good = [test for test in self.tests if test.is_whole and self.model]
        return [Measure("pair", test.rate / 1e9, "GB/s", self.model, None) for test in good]


class Cluster(Struct, frozen=True, kw_only=True):
    """All nodes, for the checks that look at all of them: their reports and measures."""

    settings: ClusterSettings
    nodes: Sequence[JobNode]  # that have told what they are, in the order of their ranks
    n_present: int
    collisions: Mapping[int, Collection[str]] = field(default_factory=dict)  # hosts that want one rank
    pairs: PairTests | None = None  # None: there were none

    @property
    def names(self) -> list[str]:
        """As people know them."""
        return [node.name for node in self.nodes]


def label(rank: int, host: str | None) -> str:
    """A node for people."""
    return f"node {rank} ({host})" if host else f"node {rank}"


def listed(names: Sequence[str]) -> str:
    """The first few nodes, and how many more there are."""
    return units.listed(names, _SHOWN)
