"""The words of the supervisor: what may happen to it (events) and what it may do (actions). Values only."""

from __future__ import annotations

from trainer_launch.model import Exit, Process
from trainer_launch.model.frozen import dataclass

# -- events: what happened, and when ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateOpened:
    """All names resolve."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Some names do not resolve yet; `text` says which and what the resolver answers."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process we started has ended."""

    at_s: float
    exit: Exit


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A process could not be started; `code` is 126 or 127."""

    at_s: float
    process: str
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """We got a signal."""

    at_s: float
    number: int


@dataclass(frozen=True, slots=True)
class Deadline:
    """`State.deadline_s` is reached."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Childless:
    """Nothing is left below us; reported after a `SignalAll` only."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Hung:
    """What runs shows no sign of life and has to end; its stacks are saved."""

    at_s: float
    text: str
    lines: tuple[str, ...] = ()  # where its threads are
    rank: int | None = None  # who is to blame, of torch's workers
    local_rank: int | None = None


Event = GateOpened | Unresolved | Exited | SpawnFailed | Signalled | Deadline | Childless | Hung


# -- actions: what the loop has to do ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Begin to resolve these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Stop resolving."""


@dataclass(frozen=True, slots=True)
class Say:
    """Log this."""

    text: str


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start this process; a failure comes back as `SpawnFailed`."""

    process: Process


@dataclass(frozen=True, slots=True)
class SignalLeader:
    """Signal the process we started, nobody else."""

    process: str
    number: int


@dataclass(frozen=True, slots=True)
class SignalGroup:
    """Signal everyone in the session or group of a process, also after its own end."""

    process: str
    number: int


@dataclass(frozen=True, slots=True)
class SignalAll:
    """Signal everything below us; unless `again`, spare who had this signal from us before.

    Programs of the names `sparing` are spared as long as something else runs below them.
    """

    number: int
    again: bool = False
    sparing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Look:
    """Gather evidence now: the first failure has just happened."""


@dataclass(frozen=True, slots=True)
class NameHanging:
    """Log what SIGKILL did not end."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Remove what the dead have left in shared memory: all is gone, and starts again."""


Action = OpenGate | CloseGate | Say | Spawn | SignalLeader | SignalGroup | SignalAll | Look | NameHanging | Clean
