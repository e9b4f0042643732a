"""`--nodes` and `--nproc-per-node` with a manifest: the job as if its author had written these numbers. Pure."""

from __future__ import annotations

from typing import Any

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Workload
from trainer_launch.rehearsal.controllers.scaling import with_value

_WORKER, _LAUNCHER = "worker", "launcher"
_NODES = ("master", "chief", _WORKER)  # replica types each of whose pods is a node
_NPROC = {
    "TrainJob": ("spec", "trainer", "numProcPerNode"),
    "PyTorchJob": ("spec", "nprocPerNode"),
    "MPIJob": ("spec", "slotsPerWorker"),
}


def check_typed(workload: Workload, option: str) -> None:
    """See that no command has the option itself, which would take precedence.

    Raises:
        UsageError: one has.
    """
    for draft in workload.drafts:
        container = draft.template.container(draft.main)
        words = (*container.command, *container.args) if container else ()
        text = " ".join(words).replace("_", "-")
        if any(word.partition("=")[0] == option for word in text.split()):
            raise UsageError(
                f"the command of container {draft.main} of {draft.hostname} has its own {option}; "
                "change it there, or run another one with --command"
            )


def with_nproc(found: Field, nproc: str) -> Field:
    """The job with that many workers per node.

    Raises:
        UsageError: its kind has no such number.
    """
    kind = found.get("kind").text()
    if kind not in _NPROC:
        raise UsageError(f"--nproc-per-node does not apply to a {kind}: it has no number of workers per node")
    value: Any = int(nproc) if nproc.isdigit() and kind != "PyTorchJob" else nproc
    if found.get("spec", "elasticPolicy", "nProcPerNode").given:
        return with_value(
            found, ("spec", "elasticPolicy", "nProcPerNode"), int(nproc) if nproc.isdigit() else nproc
        )
    return with_value(found, _NPROC[kind], value)


def with_nodes(found: Field, nodes: NodeRange) -> Field:
    """The job with that many nodes.

    Raises:
        UsageError: its kind has other pods too, or it is not elastic and a range is given.
    """
    if found.get("spec", "elasticPolicy").given:
        found = _in_range(found, nodes)
    elif nodes.fixed is None:
        raise UsageError(
            f"--nodes {nodes} needs an elastic job; this {found.get('kind').text()} has no elasticPolicy"
        )
    if found.get("kind").text() == "TrainJob":
        return with_value(found, ("spec", "trainer", "numNodes"), nodes.max)
    return _with_workers(found, nodes.max)


def _in_range(found: Field, nodes: NodeRange) -> Field:
    """An elastic job whose range holds these numbers; a single number only widens it."""
    policy = found.get("spec", "elasticPolicy")
    low, high = nodes.min, nodes.max
    if nodes.fixed is not None:
        low = min(low, policy.get("minReplicas").number(low))
        high = max(high, policy.get("maxReplicas").number(high))
    found = with_value(found, ("spec", "elasticPolicy", "minReplicas"), low)
    return with_value(found, ("spec", "elasticPolicy", "maxReplicas"), high)


def _with_workers(found: Field, nodes: int) -> Field:
    name = next((name for name, _ in found.get("spec").fields() if name.endswith("ReplicaSpecs")), "")
    given = {role: spec for role, spec in found.get("spec", name).fields() if spec.given}
    nodes_too = (*_NODES, *((_LAUNCHER,) if found.get("spec", "runLauncherAsWorker").flag() else ()))
    others = [role for role in given if role.lower() not in (*nodes_too, _LAUNCHER)]
    if others:
        raise UsageError(
            f"--nodes does not apply to a job with {' and '.join(others)}; change replicas in the manifest"
        )
    counts = {role: spec.get("replicas").number(1) for role, spec in given.items() if role.lower() in nodes_too}
    worker = next((role for role in counts if role.lower() == _WORKER), None)
    workers = nodes - sum(count for role, count in counts.items() if role != worker)
    if worker is None:
        if workers:
            raise UsageError(f"--nodes {nodes} needs Worker replicas, which the job does not have")
        return found
    if workers < 0:
        raise UsageError(f"--nodes {nodes} is less than the job's pods without its Worker replicas")
    return with_value(found, ("spec", name, worker, "replicas"), workers)
