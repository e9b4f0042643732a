"""The nodes of a cluster preflight: who should come, who came with which report, and who is missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import Endpoint, Job, Topology, units
from trainer_launch.model.findings import Fault, Finding, Measure, Scope
from trainer_launch.model.units import grouped
from trainer_launch.planning.torch import seats_by_index
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.external_check import EXTERNAL
from trainer_launch.preflight.fault_isolation import Faulty, Pair
from trainer_launch.preflight.thresholds import Table

LEASE_S = 6.0  # a node that says nothing for so long is lost
_SHOWN = 8
_MAX_OF_A_NODE = 20
_OF_A_DISK = tuple(map(os.strerror, (errno.ENOSPC, errno.EROFS)))  # of a volume, or /dev/shm


def places_of(job: Job, topology: Topology, home: Endpoint, hostname: str) -> tuple[Endpoint, ...]:
    """Where nodes should be found, by rank, as far as it is known.

    The contract lists its members; else host names tell that differ in an index alone.
    """
    members, rank, count = job.members or (), topology.node_rank, topology.pods or 1
    if members:
        return (home, *(Endpoint(member.host, home.port) for member in members[1:]))
    seats = None if rank is None else seats_by_index(home, rank, hostname, count)
    return (home,) if seats is None else tuple(map(seats.endpoint, range(count)))


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """The nodes that should come, and what is to be done when they are there."""

    job: str
    min_nodes: int
    max_nodes: int
    deadline_s: float  # from the start, for all to come
    places: tuple[Endpoint, ...]  # of nodes by rank, node 0's at least
    salt: str
    left_out: frozenset[str] = frozenset()  # checks
    table: Table = field(default_factory=Table)  # what GPUs should deliver
    report_s: float = 60.0  # for the reports of all nodes

    def host(self, rank: int) -> str | None:
        """The host name of a node; None: nothing tells."""
        return self.places[rank].host if rank < len(self.places) else None


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

    @property
    def machine(self) -> str:
        """Its machine, which other nodes may share: by name, or by the boot ID; where nobody knows, its own."""
        return self.hello.machine.rpartition(" ")[2] or self.name


class PairTest(Struct, frozen=True):
    """A test of a pair on one rail, as both its ends saw it: the lower index first."""

    ends: Pair
    whys: tuple[str, str]  # "": it went well
    rate: int  # bytes per second, the slowest that was seen
    rail: int | None = None  # where there are several
    is_near: bool = False  # within a machine or an NVLink fabric, and so faster than others

    @property
    def is_whole(self) -> bool:
        """Whether all data came through, at whatever speed."""
        return not any(self.whys)


class PairTests(Struct, frozen=True):
    """All pair tests of a cluster preflight, and what they found faulty; nodes by their place in `names`."""

    names: tuple[str, ...] = ()
    tests: tuple[PairTest, ...] = ()
    faulty: Faulty = field(default_factory=Faulty)
    way: str = "socket"
    n_rails: int = 1
    model: str = ""  # of all GPUs, where the tests were theirs
    reference: float = 0.0  # what a pair of them should reach, in GB/s; 0: nobody knows

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


@check("roll-call", Where.CLUSTER)
def all_present(cluster: Cluster) -> Iterator[Finding]:
    """All nodes are present, each with its own rank; the nodes' own findings are grouped by kind."""
    count = cluster.n_present
    yield all_present.passed(f"all {count} nodes are present", scope=Scope.JOB, measured=count, unit="nodes")
    yield from collided(cluster.collisions)
    yield from own_findings(cluster.nodes)


def absent(
    missing: Mapping[int, str], lost: Mapping[int, str], n_present: int, settings: ClusterSettings
) -> Finding:
    """A finding about all nodes that did not come.

    `missing` has their names by rank, `lost` how those were lost that had come before.
    """
    names = list(missing.values())
    before = {rank: f" (it was present before: {how})" for rank, how in lost.items() if how}
    about = [f"{name}{before.get(rank, '')}" for rank, name in missing.items()]
    text = f"{n_present} of {settings.min_nodes} nodes were present after {settings.deadline_s:g} s; "
    n_missing = settings.min_nodes - n_present
    text += f"missing: {listed(about)}" if names else f"{n_missing} are missing, and their names are unknown"
    more = {"scope": Scope.NODE if names else Scope.JOB, "subject": ", ".join(names), "unit": "nodes"}
    return all_present.found("absent", text, measured=n_present, expected=settings.min_nodes, **more)


def midway(node: JobNode) -> Finding:
    """A node that was lost after it had come."""
    how = node.lost or "it did not report the results of its own checks"
    text = f"{node.name} was lost during the cluster preflight: {how}"
    return all_present.found("lost", text, subject=node.name)


def collided(collisions: Mapping[int, Collection[str]]) -> list[Finding]:
    """Hosts that want the same rank."""
    findings = []
    for rank, hosts in collisions.items():
        ordered = sorted(hosts)
        text = f"{' and '.join(ordered)} both claim to be node {rank}"
        findings.append(all_present.found("same rank", text, subject=label(rank, ordered[0])))
    return findings


def runs_already(host: str | None) -> Finding:
    """A pod that was made again meets a job at work: there is nothing to wait for."""
    who = f"{host} is at work" if host else "node 0's coordinator is at work"
    text = f"the job is already running ({who}); this node rejoins it without a comparison of nodes"
    return all_present.passed(text, scope=Scope.JOB, measured="at work")


def port_taken(problem: str) -> Finding:
    """Node 0 cannot open the port where the nodes meet."""
    fault = Fault.JOB if os.strerror(errno.EACCES) in problem else Fault.NODE
    text, _, action = problem.partition("; ")
    return all_present.bad(fault, text, action=action)


def own_findings(nodes: Collection[JobNode]) -> list[Finding]:
    """The findings of nodes about themselves, those of a kind together: the first stands for the others."""
    machines = {node.name: node.machine for node in nodes}
    reports = [(node.name, node.report) for node in nodes]
    pairs = [(name, finding) for name, report in reports for finding in report.findings[:_MAX_OF_A_NODE]]
    settled = []
    for members in grouped((kind_of(finding), (name, finding)) for name, finding in pairs).values():
        ill, is_of_image = {name for name, _ in members}, members[0][1].remedy == "FIX_IMAGE"
        # Of an image, those where it does work on GPUs.
        is_few = sum(bool(report.measures or not is_of_image) for name, report in reports if name not in ill) > len(
            ill
        )
        its = {machines[name] for name in ill}
        shared = of_few if is_few else of_most if 1 < len(its) > len({*machines.values()} - its) else None
        settled += [(name, shared(finding) if shared else finding) for name, finding in members]
    kinds = grouped((kind_of(finding), (name, finding)) for name, finding in settled)
    return [_together(members) for members in kinds.values()]


def of_few(finding: Finding) -> Finding:
    """The finding of a node among others that have it not: an image or a shared volume would fail on all."""
    is_of_disk = any(word in finding.text for word in _OF_A_DISK)
    where = "driver" if finding.remedy == "FIX_IMAGE" else "volumes" if is_of_disk else ""
    if finding.fault is not Fault.JOB or not where or finding.check.startswith(EXTERNAL):
        return finding
    action = f"most nodes of this job do not have this: see the {where} of that machine, or {finding.action}"
    return replace(finding, fault=Fault.NODE, remedy="", action=action)


def of_most(finding: Finding) -> Finding:
    """The finding of a node that most others have, too: an image, a file server or heat is no machine's fault."""
    if finding.fault is not Fault.NODE or finding.check.startswith(EXTERNAL):
        return finding
    shared = "most nodes of this job have this: see first what they share, as image, driver or cooling"
    return replace(finding, scope=Scope.JOB, remedy="", action="; ".join(filter(None, (shared, finding.action))))


def kind_of(finding: Finding) -> object:
    """The key by which findings of several nodes are put together."""
    return finding.check, finding.status, finding.fault, finding.remedy


def _together(members: Sequence[tuple[str, Finding]]) -> Finding:
    names = list(dict.fromkeys(name for name, _ in members))
    first = members[0][1]
    others = f" (there; {len(names) - 1} more nodes have this, too)" if len(names) > 1 else ""
    return replace(first, subject=", ".join(names), text=f"on {names[0]}: {first.text}{others}")
