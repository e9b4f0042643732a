"""Who is there and who is missing, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster import findings_json
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.nodes import Cluster, Key, Names, Node, Settings, Stage, Stuck, advice, label

NAME = "roll-call"
AT_WORK = "at work"
MAX_LOOKED = 256  # of the missing nodes; the others are named without a stage
_MAX_TOLD = 50
_MAX_OF_A_NODE = 20


def named(key: Key, node: Node | None, names: Names) -> str:
    """A node for people, whether it ever came or not."""
    if node is not None:
        return node.name
    place = names.place(key) if isinstance(key, int) else None
    return label(key, place.host if place is not None else None)


def absent(
    missing: Sequence[Key],
    nodes: Mapping[Key, Node],
    looked: Mapping[Key, Stuck],
    settings: Settings,
    n_present: int,
    name: Callable[[Key], str],
) -> list[Finding]:
    """One finding for all that did not come, then one for each; of many, the last is for all that are left."""
    n_missing = settings.min_nodes - n_present
    shown = listed([name(key) for key in missing])
    text = f"{n_present} of {settings.min_nodes} nodes were present after {settings.deadline_s:g} s"
    text += f"; missing: {shown}" if shown else f"; {n_missing} are missing, and their names are unknown"
    found = [
        Finding(
            check=NAME,
            status=Status.FAIL,
            fault=Fault.NODE,
            scope=Scope.JOB,
            text=text,
            measured=n_present,
            expected=settings.min_nodes,
            unit="nodes",
            action="check why these pods are not running, or wait longer with --deadline",
        )
    ]
    for key in missing[:_MAX_TOLD]:
        stuck, node = looked.get(key), nodes.get(key)
        stage = f" is missing: {stuck.text}" if stuck is not None else " is missing"
        was_here = f"; it was here before, and {node.lost}" if node is not None and node.lost else ""
        found.append(
            Finding(
                check=NAME,
                status=Status.FAIL,
                fault=Fault.NODE,
                subject=name(key),
                text=f"{name(key)}{stage}{was_here}",
                measured=None if stuck is None else stuck.stage.value,
                action="" if stuck is None else advice(stuck.stage),
            )
        )
    rest = [name(key) for key in missing[_MAX_TOLD:]]
    if rest:
        text = f"missing, too, {counted(len(rest), 'more node')}: {listed(rest)}"
        subject = ", ".join(rest)
        found.append(Finding(check=NAME, status=Status.FAIL, fault=Fault.NODE, subject=subject, text=text))
    return found


def midway(node: Node) -> Finding:
    """It was there, and then it was not."""
    how = node.lost or "it did not report the results of its own checks"
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        subject=node.name,
        text=f"{node.name} was lost during the cluster preflight: {how}",
        measured=Stage.SILENT.value,
        action="see the log and the events of its pod",
    )


def broken(mistake: Exception) -> Finding:
    """No node is at fault for that."""
    text = f"the cluster preflight failed: {type(mistake).__name__}: {mistake}"
    action = "no node is faulty; report this bug with the log of node 0"
    return Finding(check=NAME, status=Status.UNKNOWN, scope=Scope.JOB, text=text, action=action)


def all_here(count: int) -> Finding:
    """The good end."""
    text = f"all {count} nodes are present"
    return Finding(check=NAME, status=Status.PASS, scope=Scope.JOB, text=text, measured=count, unit="nodes")


def collision(key: Key, hosts: Sequence[str]) -> Finding:
    """Two nodes want the same rank."""
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.JOB,
        subject=label(key, hosts[0]),
        text=f"{' and '.join(hosts)} both claim to be node {key}",
        action="give each pod an index of its own (PET_NODE_RANK, --node-rank), in one replicatedJob",
    )


def runs_already(host: str | None) -> Finding:
    """A pod that was made again meets a job at work: there is nothing to wait for."""
    who = f"{host} is at work" if host else "node 0's coordinator is at work"
    text = f"the job is already running ({who}); this node rejoins it without a comparison of nodes"
    return Finding(check=NAME, status=Status.PASS, scope=Scope.JOB, text=text, measured=AT_WORK)


def no_coordinator(home: str, stuck: Stuck, waited_s: float) -> Finding:
    """Said by each node on its own: nobody is there to decide."""
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        subject=home,
        text=f"{home} is missing after {waited_s:.0f} s: {stuck.text}",
        measured=stuck.stage.value,
        action=advice(stuck.stage),
    )


def cut_off(host: str, stage: str, waited_s: float) -> Finding:
    """This node itself cannot ask node 0."""
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        text=f"{host} could not ask node 0 within {waited_s:.0f} s: its resolver or network hangs ({stage})",
        action="check DNS and the network of this node",
    )


def not_held(why: str) -> Finding:
    """There was no cluster preflight."""
    return Finding(check=NAME, status=Status.SKIPPED, text=why)


def refused(reason: str) -> Finding:
    """Node 0 does not know this node."""
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.JOB,
        text=f"node 0 refuses this node: {reason}",
        action="give all pods the same job name, number of nodes, secret, and version of this program",
    )


@check(NAME, Where.CLUSTER)
def all_present(cluster: Cluster) -> Iterator[Finding]:
    """All nodes are present, each with a rank of its own; what they have found themselves is told by kind."""
    yield all_here(cluster.n_present)
    yield from (collision(key, sorted(hosts)) for key, hosts in cluster.collisions.items())
    yield from grouped({node.name: node.findings for node in cluster.nodes})


def told(text: str) -> tuple[Finding, ...]:
    """What a node says that its own checks found."""
    try:
        return tuple(findings_json.loaded(text)[:_MAX_OF_A_NODE])
    except ValueError as problem:
        about = f"what this node has found cannot be read: {problem}"
        return (Finding(check=NAME, status=Status.UNKNOWN, text=about),)


def grouped(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The nodes' own findings by node, those of one kind together: the first one stands for the others."""
    groups: dict[tuple[str, Status, Fault | None], list[tuple[str, Finding]]] = {}
    for name, its in findings.items():
        for finding in its:
            groups.setdefault((finding.check, finding.status, finding.fault), []).append((name, finding))
    return [_group(members) for members in groups.values()]


def _group(members: Sequence[tuple[str, Finding]]) -> Finding:
    names = list(dict.fromkeys(name for name, _ in members))
    first = members[0][1]
    others = f" (there; {len(names) - 1} more nodes have this, too)" if len(names) > 1 else ""
    return replace(first, subject=", ".join(names), text=f"on {names[0]}: {first.text}{others}")
