"""Who is there and who is missing, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster.nodes import Cluster, ClusterSettings, JobNode, label, listed
from trainer_launch.preflight.cluster.outside_look import NodeStage, Stuck

NAME = "roll-call"

MAX_NAMED = 50  # missing nodes that have a finding each, and are looked at for it
_MAX_OF_A_NODE = 20


@check(NAME, Where.CLUSTER)
def all_present(cluster: Cluster) -> Iterator[Finding]:
    """All nodes are present, each with a rank of its own; what they have found themselves is told by kind."""
    count = cluster.n_present
    yield all_present.passed(f"all {count} nodes are present", scope=Scope.JOB, measured=count, unit="nodes")
    yield from collided(cluster.collisions)
    yield from own_findings(cluster.nodes)


def absent(
    missing: Mapping[int, str],
    looked: Mapping[int, Stuck],
    lost: Mapping[int, str],
    n_present: int,
    settings: ClusterSettings,
) -> list[Finding]:
    """One finding for all that did not come, then one for each; of many, the last is for all that are left.

    `missing` has their names by rank, `lost` how those were lost that had come before.
    """
    names = list(missing.values())
    text = f"{n_present} of {settings.min_nodes} nodes were present after {settings.deadline_s:g} s; "
    n_missing = settings.min_nodes - n_present
    text += f"missing: {listed(names)}" if names else f"{n_missing} are missing, and their names are unknown"
    counts = {"measured": n_present, "expected": settings.min_nodes, "unit": "nodes"}
    action = "check why these pods are not running, or wait longer with --wait-timeout"
    findings = [all_present.failed(Fault.NODE, text, scope=Scope.JOB, action=action, **counts)]
    for rank, name in list(missing.items())[:MAX_NAMED]:
        stuck = looked.get(rank)
        why = "" if stuck is None else f": {stuck.text}"
        was_here = f"; it was here before, and {lost[rank]}" if lost.get(rank) else ""
        findings.append(_absent(name, stuck, f"{name} is missing{why}{was_here}"))
    if rest := names[MAX_NAMED:]:
        text = f"missing, too, {counted(len(rest), 'more node')}: {listed(rest)}"
        findings.append(_absent(", ".join(rest), None, text))
    return findings


def _absent(who: str, stuck: Stuck | None, text: str) -> Finding:
    more = {} if stuck is None else {"measured": stuck.stage.value, "action": stuck.action}
    return all_present.failed(Fault.NODE, text, subject=who, **more)


def midway(node: JobNode) -> Finding:
    """It was there, and then it was not."""
    how = node.lost or "it did not report the results of its own checks"
    text = f"{node.name} was lost during the cluster preflight: {how}"
    more = {"measured": NodeStage.SILENT.value, "action": "see the log and the events of its pod"}
    return all_present.failed(Fault.NODE, text, subject=node.name, **more)


def broken(mistake: Exception) -> Finding:
    """This program made a mistake, and no node."""
    text = f"the cluster preflight failed: {type(mistake).__name__}: {mistake}"
    action = "no node is faulty; report this bug with the log of node 0"
    return all_present.unknown(text, scope=Scope.JOB, action=action)


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


def no_coordinator(home: str, stuck: Stuck, waited_s: float) -> Finding:
    """Said by each node on its own: nobody is there to decide."""
    return _absent(home, stuck, f"{home} is missing after {waited_s:.0f} s: {stuck.text}")


def cut_off(host: str, doing: str, waited_s: float) -> Finding:
    """This node itself cannot ask node 0."""
    text = f"{host} could not ask node 0 within {waited_s:.0f} s: its resolver or network hangs ({doing})"
    return all_present.failed(Fault.NODE, text, action="check DNS and the network of this node")


def refused(reason: str) -> Finding:
    """Node 0 does not know this node."""
    action = "give all pods the same job name, number of nodes, secret, and version of this program"
    return all_present.failed(Fault.JOB, f"node 0 refuses this node: {reason}", action=action)


def own_findings(nodes: Iterable[JobNode]) -> list[Finding]:
    """What nodes have found themselves, those of one kind together: the first one stands for the others."""
    pairs = ((node.name, finding) for node in nodes for finding in node.report.findings[:_MAX_OF_A_NODE])
    kinds = grouped((kind_of(finding), (name, finding)) for name, finding in pairs)
    return [_together(members) for members in kinds.values()]


def kind_of(finding: Finding) -> object:
    """What findings of several nodes are put together by."""
    return finding.check, finding.status, finding.fault


def _together(members: Sequence[tuple[str, Finding]]) -> Finding:
    names = list(dict.fromkeys(name for name, _ in members))
    first = members[0][1]
    others = f" (there; {len(names) - 1} more nodes have this, too)" if len(names) > 1 else ""
    return replace(first, subject=", ".join(names), text=f"on {names[0]}: {first.text}{others}")
