"""Present and missing nodes in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import grouped
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster.nodes import Cluster, ClusterSettings, JobNode, label, listed

NAME = "roll-call"

_MAX_OF_A_NODE = 20


@check(NAME, Where.CLUSTER)
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
    before = {rank: f" (it was present before: {how})" for rank, how in lost.items()}
    about = [f"{name}{before.get(rank, '')}" for rank, name in missing.items()]
    text = f"{n_present} of {settings.min_nodes} nodes were present after {settings.deadline_s:g} s; "
    n_missing = settings.min_nodes - n_present
    text += f"missing: {listed(about)}" if names else f"{n_missing} are missing, and their names are unknown"
    return all_present.failed(
        Fault.NODE,
        text,
        scope=Scope.NODE if names else Scope.JOB,
        subject=", ".join(names),
        measured=n_present,
        expected=settings.min_nodes,
        unit="nodes",
        action="see these pods (kubectl describe pod) and their logs, or wait longer with --wait-timeout",
    )


def midway(node: JobNode) -> Finding:
    """A node that was lost after it had come."""
    how = node.lost or "it did not report the results of its own checks"
    text = f"{node.name} was lost during the cluster preflight: {how}"
    more = {"action": "see the log and the events of its pod"}
    return all_present.failed(Fault.NODE, text, subject=node.name, **more)


def broken(defect: str) -> Finding:
    """A defect of this program, which accuses no node."""
    action = "no node is faulty; report this bug with the log of node 0"
    return all_present.unknown(defect, scope=Scope.JOB, action=action)


def collided(collisions: Mapping[int, Collection[str]]) -> list[Finding]:
    """Hosts that want the same rank."""
    action = "give each pod an index of its own (PET_NODE_RANK, --node-rank), in one replicatedJob"
    findings = []
    for rank, hosts in collisions.items():
        ordered = sorted(hosts)
        text = f"{' and '.join(ordered)} both claim to be node {rank}"
        findings.append(all_present.failed(Fault.JOB, text, subject=label(rank, ordered[0]), action=action))
    return findings


def runs_already(host: str | None) -> Finding:
    """A pod that was made again meets a job at work: there is nothing to wait for."""
    who = f"{host} is at work" if host else "node 0's coordinator is at work"
    text = f"the job is already running ({who}); this node rejoins it without a comparison of nodes"
    return all_present.passed(text, scope=Scope.JOB, measured="at work")


def no_coordinator(home: str, why: str, waited_s: float) -> Finding:
    """The verdict of each node on its own, where node 0 is missing; `why` is what came of the last attempt."""
    action = "see the pod of node 0 and its log, its headless Service, and network policies for its port"
    return all_present.failed(
        Fault.NODE, f"{home} is missing after {waited_s:.0f} s: {why}", subject=home, action=action
    )


def cut_off(host: str, doing: str, waited_s: float) -> Finding:
    """Finding of a node whose own resolver or network hangs."""
    text = f"{host} could not ask node 0 within {waited_s:.0f} s: its resolver or network hangs ({doing})"
    return all_present.failed(Fault.NODE, text, action="check DNS and the network of this node")


def refused(reason: str) -> Finding:
    """Node 0 does not know this node."""
    action = "give all pods the same job name, number of nodes, secret, and version of this program"
    return all_present.failed(Fault.JOB, f"node 0 refuses this node: {reason}", action=action)


def own_findings(nodes: Iterable[JobNode]) -> list[Finding]:
    """The findings of nodes about themselves, those of a kind together: the first stands for the others."""
    pairs = ((node.name, finding) for node in nodes for finding in node.report.findings[:_MAX_OF_A_NODE])
    kinds = grouped((kind_of(finding), (name, finding)) for name, finding in pairs)
    return [_together(members) for members in kinds.values()]


def kind_of(finding: Finding) -> object:
    """The key by which findings of several nodes are put together."""
    return finding.check, finding.status, finding.fault, finding.remedy


def _together(members: Sequence[tuple[str, Finding]]) -> Finding:
    names = list(dict.fromkeys(name for name, _ in members))
    first = members[0][1]
    others = f" (there; {len(names) - 1} more nodes have this, too)" if len(names) > 1 else ""
    return replace(first, subject=", ".join(names), text=f"on {names[0]}: {first.text}{others}")
