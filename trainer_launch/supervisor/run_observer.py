"""The observers of a run: the event log, the metrics, `status`, the goodput ledger."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from trainer_launch.model.codec import Amount, Count
from trainer_launch.model.units import counted


class RunPhase(str, Enum):
    """Where a run is, for observers."""

    WAITING = "waiting"  # for other nodes
    RUNNING = "running"
    STOPPING = "stopping"  # leaders were asked to end
    CLEARING = "clearing"  # all leaders have ended; what they left behind was asked to
    KILLING = "killing"
    DONE = "done"


class TimeKind(str, Enum):
    """The purpose that a second was spent on."""

    STARTING = "starting"  # until the first step: the launcher, imports, data
    TRAINING = "training"  # steps that were done for the first time
    CHECKPOINTING = "checkpointing"  # as reported
    DETECTING = "detecting"  # from the last sign of progress until a failure was noticed
    STOPPING = "stopping"  # the workers of a generation that has failed
    WAITING = "waiting_for_nodes"
    MEETING = "meeting"  # all nodes are there: ranks, the store
    RESTARTING = "restarting"  # from the start of new workers to their first step
    REPLACING = "replacing_ranks"  # the same and `stopping`, where surviving ranks keep their state
    REPEATING = "repeating_steps"  # that had been done before a restart
    ENDING = "ending"  # the workers have finished, or the pod was asked to stop

    @property
    def words(self) -> str:
        """For people."""
        return self.value.replace("_", " ")


class StateKept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss of ranks after which the surviving ones went on with their state."""

    generation: Count  # that followed
    ranks: Count  # that kept their state, of the whole job
    replaced: Count  # ranks
    step: Count  # from which all went on
    took_s: Amount  # from the loss until all had the state

    def __str__(self) -> str:
        replaced, kept = counted(self.replaced, "rank"), counted(self.ranks, "rank")
        whose = "its" if self.ranks == 1 else "their"
        text = f"{replaced} replaced in {self.took_s:.2f} s; {kept} kept {whose} state at step {self.step}"
        return f"{text}, no step is repeated"


class RunObserver:
    """Is told what happens; may neither wait nor raise. This one does nothing: `observability.Observer` does."""

    def tell(self, event: str, **values: str | float | bool | tuple[str, ...] | None) -> None:
        """Something has happened, in the words of the event log."""

    def enter(self, phase: RunPhase, use: TimeKind, since_s: float | None = None) -> None:
        """Where the run is now, and what its seconds are spent on: since `since_s`, where that went unnoticed."""

    def asked_to_stop(self, number: int) -> None:
        """Note a signal that asks the run to stop, or says that nothing is to be started again."""

    def look(self, collectives: int) -> None:
        """The workers have come so far."""

    def suspect(self) -> None:
        """A hang is suspected."""

    def adopt(self, notes: Mapping[str, Any]) -> None:
        """Take the coordinator's notes about the job, by topic."""
