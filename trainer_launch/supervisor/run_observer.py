"""The observers of a run: the event log, the metrics, `status`, the goodput ledger."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class RunPhase(str, Enum):
    """Where a run is, for observers."""

    WAITING = "waiting"  # for other nodes
    RUNNING = "running"
    STOPPING = "stopping"  # leaders were asked to end
    CLEARING = "clearing"  # all leaders have ended; what they left behind was asked to
    KILLING = "killing"
    DONE = "done"


class TimeUse(Enum):
    """The use of a run's seconds, as far as its loop can tell."""

    STARTING = "starting"
    WAITING = "waiting"  # for other nodes
    MEETING = "meeting"  # all nodes are there
    TRAINING = "training"  # workers run, whatever they do
    STOPPING = "stopping"  # for a failure
    RESTARTING = "restarting"
    ENDING = "ending"


class RunObserver:
    """Is told what happens; may neither wait nor raise. This one does nothing: `observability.Observer` does."""

    def tell(self, event: str, **values: str | int | bool | tuple[str, ...] | None) -> None:
        """Something has happened, in the words of the event log."""

    def enter(self, phase: RunPhase, use: TimeUse, since_s: float | None = None) -> None:
        """Where the run is now, and what its seconds are spent on: since `since_s`, where that went unnoticed."""

    def asked_to_stop(self, number: int) -> None:
        """Note a signal that asks the run to stop, or says that nothing is to be started again."""

    def look(self, collectives: int) -> None:
        """The workers have come so far."""

    def suspect(self) -> None:
        """A hang is suspected."""

    def adopt(self, notes: Mapping[str, Any]) -> None:
        """Take the coordinator's notes about the job, by topic."""
