"""Present and missing nodes in sentences; and a look from outside at how far a missing node has come."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host.dns import Resolving
from trainer_launch.membership.client import Lines, LostError
from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint
from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import counted, grouped, printable
from trainer_launch.preflight.check import Where, at_once, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.nodes import Cluster, ClusterSettings, JobNode, label, listed

NAME = "roll-call"

MAX_NAMED = 50  # missing nodes that have a finding each, and are looked at for it
_MAX_OF_A_NODE = 20


class NodeStage(str, Enum):
    """How far a node has come, in the order of a pod's life."""

    UNNAMED = "unnamed"
    NO_RECORD = "no DNS record"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    SILENT = "silent"
    RUNS = "cut off"


class Stuck(Struct, frozen=True):
    """A stage, what was seen and what it means in words, and what to do."""

    stage: NodeStage
    text: str
    action: str


_BOTH_WAYS = "check that network policies allow node 0's port in both directions"
_MEANING: Mapping[NodeStage, tuple[str, str]] = {
    NodeStage.UNNAMED: ("its host name is unknown", "check which pods of the job are not running"),
    NodeStage.NO_RECORD: (
        "its pod is not created, not scheduled, or its Service does not publish addresses of pods that are not "
        "ready (publishNotReadyAddresses)",
        "check whether its pod is scheduled (kubectl describe pod), and the job's headless Service",
    ),
    NodeStage.UNREACHABLE: (
        "there is no route to its network",
        "check the routes and the CNI of both machines",
    ),
    NodeStage.REFUSED: (
        "its pod has an address, but its preflight is not running: the image is being pulled, an earlier init "
        "container runs, or it has ended",
        "check the events and the init containers of its pod",
    ),
    NodeStage.TIMEOUT: ("packets to it are lost: a network policy, a firewall, or the machine is gone", _BOTH_WAYS),
    NodeStage.SILENT: (
        "its process is stopped or stuck: it accepts connections but does not answer",
        "check what its process waits for; the machine may need a reboot",
    ),
    NodeStage.RUNS: ("its preflight runs, but could not reach node 0", f"read its log, and {_BOTH_WAYS}"),
}


def stuck_at(stage: NodeStage, evidence: str = "") -> Stuck:
    """With the evidence, and what it means."""
    meaning, action = _MEANING[stage]
    return Stuck(stage, f"{stage.value}{f' ({evidence})' if evidence else ''}: {meaning}", action)


def look(place: Endpoint | None, limit_s: float) -> Stuck:
    """Look a node up, connect, listen; None: nobody knows its name."""
    if place is None:
        return stuck_at(NodeStage.UNNAMED)
    until_s = time.monotonic() + limit_s
    try:
        addresses = Resolving(place.host, place.port).within(limit_s)
    except OSError as problem:
        return stuck_at(NodeStage.NO_RECORD, f"{place.host}: {problem.strerror or problem}")
    worst = stuck_at(NodeStage.NO_RECORD, place.host)
    for address in addresses[:4]:
        at, left_s = str(Endpoint(address, place.port)), max(0.05, until_s - time.monotonic())
        try:
            with socket.create_connection((address, place.port), timeout=left_s) as sock:
                return _hear(sock, at, until_s)
        except TimeoutError:
            worst = stuck_at(NodeStage.TIMEOUT, at)
        except OSError as problem:
            stage = NodeStage.REFUSED if problem.errno == errno.ECONNREFUSED else NodeStage.UNREACHABLE
            worst = stuck_at(stage, f"{at}: {problem.strerror}")
    return worst


def _hear(sock: socket.socket, at: str, until_s: float) -> Stuck:
    """Whether somebody to whom there is a connection says anything."""
    try:
        message = Lines(sock, msg.parse, at).next(until_s)
    except LostError as problem:
        return stuck_at(NodeStage.SILENT, str(problem))
    if isinstance(message, msg.Here):
        return stuck_at(NodeStage.RUNS, f"it says: {printable(message.stage[:300], ' ')}")
    return stuck_at(NodeStage.RUNS, f"{at} is a coordinator" if isinstance(message, Challenge) else at)


def look_at_all(places: Sequence[Endpoint | None], limit_s: float) -> list[Stuck]:
    """A look at each, side by side."""
    stuck = at_once(range(len(places)), lambda number: look(places[number], limit_s), max(1, len(places)))
    return list(stuck.values())


@check(NAME, Where.CLUSTER)
def all_present(cluster: Cluster) -> Iterator[Finding]:
    """All nodes are present, each with its own rank; the nodes' own findings are grouped by kind."""
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
    """A finding for all nodes that did not come, then one for each; of many, the last is for all that are left.

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
        was_here = f"; it was present before: {lost[rank]}" if lost.get(rank) else ""
        findings.append(_absent(name, stuck, f"{name} is missing{why}{was_here}"))
    if rest := names[MAX_NAMED:]:
        text = f"also missing: {counted(len(rest), 'more node')}: {listed(rest)}"
        findings.append(_absent(", ".join(rest), None, text))
    return findings


def _absent(who: str, stuck: Stuck | None, text: str) -> Finding:
    more = {} if stuck is None else {"measured": stuck.stage.value, "action": stuck.action}
    return all_present.failed(Fault.NODE, text, subject=who, **more)


def midway(node: JobNode) -> Finding:
    """A node that was lost after it had come."""
    how = node.lost or "it did not report the results of its own checks"
    text = f"{node.name} was lost during the cluster preflight: {how}"
    more = {"measured": NodeStage.SILENT.value, "action": "see the log and the events of its pod"}
    return all_present.failed(Fault.NODE, text, subject=node.name, **more)


def broken(defect: str) -> Finding:
    """A defect of this program, which accuses no node."""
    action = "no node is faulty; report this bug with the log of node 0"
    return all_present.unknown(defect, scope=Scope.JOB, action=action)


def collided(collisions: Mapping[int, Collection[str]]) -> list[Finding]:
    """Hosts that want the same rank."""
    action = "give each pod its own index (PET_NODE_RANK, --node-rank), in one replicatedJob"
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
    """The verdict of each node on its own, where node 0 is missing."""
    return _absent(home, stuck, f"{home} is missing after {waited_s:.0f} s: {stuck.text}")


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
