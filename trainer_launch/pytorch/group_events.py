"""The words of the worker group: what may happen to it and what it may do, beside the supervisor's. Values only."""

from __future__ import annotations

from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import News
from trainer_launch.model import Exit, FailureRecord, Process
from trainer_launch.model.frozen import dataclass
from trainer_launch.supervisor import events as ev

# -- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """The coordinator said something, or is out of reach, or is back."""

    at_s: float
    news: News


@dataclass(frozen=True, slots=True)
class Prepared:
    """Workers, and a store, can be started."""

    at_s: float
    attempt_folder: str = ""  # for error files and logs, one folder for each worker in it; "": none


@dataclass(frozen=True, slots=True)
class CannotStart:
    """Workers or a store cannot be started, and never will be."""

    at_s: float
    text: str
    code: int  # the exit code that says it


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The store process of this generation is there."""

    at_s: float
    host: str  # where the other nodes reach it
    port: int


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """The store process has ended, and not by us."""

    at_s: float
    exit: Exit


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has ended, with what it said of it in its error file."""

    exit: Exit
    death: FailureRecord


Event = Heard | Prepared | CannotStart | StoreOpened | StoreEnded | WorkerEnded | ev.Event

# -- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the coordinator."""

    message: say.FromNode


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make sure of what starts workers; answered by Prepared or CannotStart."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Start the generation's store process; answered by StoreOpened or CannotStart."""


@dataclass(frozen=True, slots=True)
class CloseStore:
    """End the store process, if there is one."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start all workers of a generation; a failure comes back as `SpawnFailed`."""

    processes: tuple[Process, ...]


Action = Tell | Prepare | OpenStore | CloseStore | StartWorkers | ev.Action
