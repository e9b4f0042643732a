"""A job scaled up while it runs, as by `kubectl scale` or an autoscaler: its manifest with more workers. Pure."""

from __future__ import annotations

from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Workload

_WORKER = "worker"


def scaled(documents: tuple[Field, ...], more: int) -> tuple[Field, ...]:
    """The same documents, the job among them with that many more workers.

    Raises:
        UsageError: it is of a kind whose number of pods is fixed once it runs, or has no workers.
    """
    changed = tuple(_scaled(found, more) for found in documents)
    if not any(new is not old for new, old in zip(changed, documents, strict=True)):
        raise UsageError(
            "this job cannot grow: adding a node needs Worker replicas (an elastic PyTorchJob, an MPIJob, ...); "
            "the number of nodes of a running TrainJob is fixed"
        )
    return changed


def fresh(before: Workload, after: Workload) -> tuple[int, ...]:
    """Which drafts of the scaled job were not there before."""
    known = {draft.hostname for draft in before.drafts}
    return tuple(number for number, draft in enumerate(after.drafts) if draft.hostname not in known)


def _scaled(found: Field, more: int) -> Field:
    for name, specs in found.get("spec").fields() if isinstance(found.get("spec").value, dict) else []:
        if not name.endswith("ReplicaSpecs"):
            continue
        for role, spec in specs.fields():
            if role.lower() == _WORKER and spec.given:
                count = spec.get("replicas").number(1) + more
                return with_value(found, ("spec", name, role, "replicas"), count)
    return found


def with_value(found: Field, keys: tuple[str, ...], value: Any) -> Field:
    """The document with another value at this place; nothing of the first one changes."""
    whole: dict[str, Any] = dict(found.mapping())
    inner = whole
    for number, key in enumerate(keys[:-1]):
        inner[key] = dict(found.get(*keys[: number + 1]).mapping())
        inner = inner[key]
    inner[keys[-1]] = value
    return Field(whole, found.path, found.where)
