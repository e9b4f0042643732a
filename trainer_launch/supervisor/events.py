"""The words of the supervisor: what may happen to it (events) and what it may do (actions). Values only."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import Exit, Plan, Process, Verdict

# -- events: what happened, and when ----------------------------------------------------------


class Resolved(Struct, frozen=True):
    """All names resolve."""

    at_s: float


class Unresolved(Struct, frozen=True):
    """Some names do not resolve yet; `text` says which and what the resolver answers."""

    at_s: float
    text: str


class Exited(Struct, frozen=True):
    """A process we started has ended."""

    at_s: float
    exit: Exit


class SpawnFailed(Struct, frozen=True):
    """A process could not be started; `code` is 126 or 127."""

    at_s: float
    process: str
    code: int
    text: str


class Signalled(Struct, frozen=True):
    """We got a signal."""

    at_s: float
    number: int


class Deadline(Struct, frozen=True):
    """`State.deadline_s` is reached."""

    at_s: float


class Childless(Struct, frozen=True):
    """Nothing is left below us; reported after a `SignalAll` only."""

    at_s: float


class Hung(Struct, frozen=True):
    """What runs makes no progress and has to end; its stacks are saved."""

    at_s: float
    text: str
    lines: tuple[str, ...] = ()  # where its threads are
    rank: int | None = None  # who is to blame, of torch's workers
    local_rank: int | None = None
    reason: str = "Hung"  # the exit reason
    since_s: float | None = None  # the last progress


Event = Resolved | Unresolved | Exited | SpawnFailed | Signalled | Deadline | Childless | Hung


# -- actions: what the loop has to do ---------------------------------------------------------


class Resolve(Struct, frozen=True):
    """Begin to resolve these names."""

    names: tuple[str, ...]


class StopResolving(Struct, frozen=True):
    """Stop resolving."""


class Say(Struct, frozen=True):
    """Log this."""

    text: str


class Spawn(Struct, frozen=True):
    """Start this process; a failure comes back as `SpawnFailed`."""

    process: Process


class SignalLeader(Struct, frozen=True):
    """Signal the process we started, nobody else."""

    process: str
    number: int


class SignalGroup(Struct, frozen=True):
    """Signal everyone in the session or group of a process, also after its own end."""

    process: str
    number: int


class SignalAll(Struct, frozen=True):
    """Signal everything below us; unless `again`, spare who had this signal from us before.

    Programs of the names `sparing` are spared as long as something else runs below them.
    """

    number: int
    again: bool = False
    sparing: frozenset[str] = frozenset()


class Look(Struct, frozen=True):
    """Gather evidence now: the first failure has just happened."""


class NameHanging(Struct, frozen=True):
    """Log what SIGKILL did not end."""


class Clean(Struct, frozen=True):
    """Remove what the dead have left in shared memory: all is gone, and starts again."""


Action = Resolve | StopResolving | Say | Spawn | SignalLeader | SignalGroup | SignalAll | Look | NameHanging | Clean


# -- state -------------------------------------------------------------------------------------


RESTART_WINDOW_S = 3600.0  # in which starts count against the plan's bound
CLEAR_S = 2.0  # between SIGTERM and SIGKILL for what an ended leader left behind
KILL_AGAIN_S = 0.1  # first interval between two rounds of SIGKILL, then doubled


class Phase(Enum):
    """Where a run is; see the drawing."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    CLEARING = "clearing"
    KILLING = "killing"
    DONE = "done"


class State(Struct, frozen=True, kw_only=True):
    """Everything the supervisor knows; times are monotonic seconds, None: not set."""

    plan: Plan
    phase: Phase
    started_at_s: float
    alive: tuple[str, ...] = ()  # processes that were started and have not ended, in the plan's order
    exits: tuple[Exit, ...] = ()
    cause: Exit | None = None  # the first failure
    hung: Hung | None = None  # the hang watch found that what runs has to end
    text: str = ""  # what the resolver or exec said
    names_failed: bool = False
    stop_signal: int | None = None  # what asked us to stop, when nothing had failed before
    restarts: int = 0  # done so far
    restarts_at_s: tuple[float, ...] = ()  # and when, the last hour's
    gave_up: bool = False  # something survived SIGKILL
    asked: int = 0  # requests to stop
    draining: bool = False  # nothing is started again
    handed_on: frozenset[int] = frozenset()  # signals that the leaders were given unchanged
    everyone_told: bool = False  # the second rung
    wait_until_s: float | None = None
    stop_at_s: float | None = None  # the others are stopped, if none of them has ended as the faulty one
    tell_all_at_s: float | None = None
    kill_at_s: float | None = None
    again_at_s: float | None = None
    again_every_s: float = KILL_AGAIN_S
    give_up_at_s: float = 0.0
    leftovers: tuple[tuple[str, float], ...] = ()  # ended processes whose group gets SIGKILL, and when

    @property
    def stopped(self) -> bool:
        """Whether we were asked to stop before anything failed."""
        return self.stop_signal is not None

    @property
    def deadline_s(self) -> float | None:
        """When `step` wants a `Deadline`, None: never."""
        single = (self.wait_until_s, self.stop_at_s, self.tell_all_at_s, self.kill_at_s, self.again_at_s)
        return min([t for t in single if t is not None] + [t for _, t in self.leftovers], default=None)

    def clear_s(self, at_s: float) -> float:
        """How long what the leader that has just ended left behind has, from SIGTERM to SIGKILL."""
        rest_s = self.plan.grace_s if self.kill_at_s is None else max(0.0, self.kill_at_s - at_s)
        # A shell dies of a request to stop at once: what it ran hears of it only now, and may have to save.
        is_shell = self.plan.workers is None
        died_of_it = self.exits[-1].signal is not None and (
            self.stopped or (is_shell and self.phase is Phase.STOPPING)
        )
        return rest_s if self.plan.daemons or died_of_it else min(CLEAR_S, rest_s)

    def started_again(self, at_s: float) -> State:
        """One more start."""
        return replace(self, restarts=self.restarts + 1, restarts_at_s=(*self.restarts_before(at_s), at_s))

    def restarts_before(self, at_s: float) -> tuple[float, ...]:
        """Those that still count: a job may run for weeks, and what heals between is no loop."""
        return tuple(restart_s for restart_s in self.restarts_at_s if restart_s > at_s - RESTART_WINDOW_S)

    @property
    def again(self) -> str | None:
        """Why all is started again once nothing is left; None: it is not."""
        failed_at_s = self.hung.at_s if self.hung else self.cause.at_s if self.cause else self.started_at_s
        is_spent = len(self.restarts_before(failed_at_s)) >= self.plan.restarts
        if self.asked or self.draining or is_spent:
            return None
        if self.hung:
            return "what ran here hung"
        was_killed = self.cause is not None and self.cause.signal is not None
        return (
            f"{self.cause.process} was killed (signal {self.cause.signal})" if self.cause and was_killed else None
        )

    @property
    def verdict(self) -> Verdict:
        """How the run ended, for a state that is done."""
        if self.stopped:
            return Verdict.STOPPED
        return Verdict.FAILED if self.names_failed or self.cause or self.hung else Verdict.SUCCEEDED
