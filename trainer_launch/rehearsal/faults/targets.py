"""Whom a fault is for: one pod of the job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.faults.fault import Fault

OF_ALL = ("delay dns", "add node")  # these are for the whole job


def target(fault: Fault, nodes: Sequence[str], pods: Sequence[str]) -> str | None:
    """The name of the pod; None for a fault of the whole job.

    `nodes` are those with an index, in its order; `pods` all, a launcher too. Of a name its end suffices: worker-0.

    Raises:
        UsageError: the job has no such pod.
    """
    if fault.kind in OF_ALL:
        return None
    if fault.pod is not None:
        return _named(fault, fault.pod, pods)
    if fault.node is None:
        return nodes[-1]
    if fault.node >= len(nodes):
        there = f"nodes 0 to {len(nodes) - 1}" if len(nodes) > 1 else "one node, 0"
        raise UsageError(f"--fault {shown(fault.text)}: there is no node {fault.node}; the job has {there}")
    return nodes[fault.node]


def _named(fault: Fault, name: str, pods: Sequence[str]) -> str:
    found = [pod for pod in pods if pod == name] or [pod for pod in pods if pod.endswith(f"-{name}")]
    if len(found) == 1:
        return found[0]
    said = f"--fault {shown(fault.text)}"
    if found:
        raise UsageError(f"{said}: {name} is ambiguous: {' or '.join(found[:5])}; give the full name")
    hint = did_you_mean(name, pods) or f"the job has {', '.join(pods[:5])}{'…' if len(pods) > 5 else ''}"
    raise UsageError(f"{said}: the job has no pod {name}; {hint}")
