"""What is asked to go wrong in a rehearsal, held against the job before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainer_launch.rehearsal.controllers.pod_values import Draft
from trainer_launch.rehearsal.faults import targets
from trainer_launch.rehearsal.faults.chaos import Chaos
from trainer_launch.rehearsal.faults.fault import Fault
from trainer_launch.rehearsal.faults.grammar import KINDS

_APART = ("launcher",)  # roles that are no node of the job: they only start ranks elsewhere
_TRAINER = "node"  # the role of a TrainJob's nodes, beside which there may be initializers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All faults of a rehearsal."""

    faults: tuple[Fault, ...] = ()
    chaos: Chaos | None = None

    @property
    def anything(self) -> bool:
        """Whether anything may go wrong."""
        return bool(self.faults) or self.chaos is not None

    @property
    def samples(self) -> tuple[Fault, ...]:
        """The faults, and one of each kind that may come by chance: what this machine has to be able to do."""
        kinds = self.chaos.kinds if self.chaos is not None else ()
        return (*self.faults, *(Fault(kind=kind, when=KINDS[kind].first, text=kind) for kind in kinds))


NOTHING = Asked()


def fitted(asked: Asked, drafts: Sequence[Draft]) -> Asked:
    """The same, for this job.

    Raises:
        UsageError: a fault is for a pod that the job has not.
    """
    nodes, pods = nodes_of(drafts), tuple(draft.hostname for draft in drafts)
    to_come = tuple(fault.text for fault in asked.faults if fault.kind == "add node")
    for fault in asked.faults:
        targets.target(fault, (*nodes, *to_come) if fault.node is not None else nodes, pods)
    return asked if asked.chaos is None else replace(asked, chaos=asked.chaos.over(range(len(nodes))))


def nodes_of(drafts: Iterable[Draft]) -> tuple[str, ...]:
    """The pods that are nodes of the job, node 0 first; all of them where every pod only starts others."""
    found = [draft for draft in drafts if draft.role not in _APART]
    trainers = [draft for draft in found if draft.role == _TRAINER]
    return tuple(draft.hostname for draft in trainers or found or drafts)
