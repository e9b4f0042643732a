"""Where an MPI job is, what happens to it, and what has to be done: values. `job_state_machine` decides."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from msgspec import Struct

from trainer_launch.model import Death, Member
from trainer_launch.mpi.mpirun_messages import Said


class Phase(Enum):
    """Where a job is; see `job_state_machine`."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    ASKING = "asking"
    LEAVING = "leaving"
    DONE = "done"


class JobSettings(Struct, frozen=True, kw_only=True):
    """What a job is allowed; seconds, None: no limit of this kind."""

    min_hosts: int | None = None  # None: all
    max_hosts: int | None = None  # None: as many as there are
    first_hosts: int | None = None  # at the first start in place of `min_hosts`
    follows: bool = False  # what runs adds and drops hosts itself
    wait_s: float = 600.0  # for all hosts at the start
    rejoin_s: float = 600.0  # for a host that was lost
    shrink_s: float = 0.0  # before going on with fewer, where the minimum allows
    ask_s: float = 1.5  # for hosts to say that they are there, after mpirun has ended
    max_restarts: int = 3  # of failed ranks, for the whole job
    grace_s: float = 25.0
    has_list: bool = True  # False: mpirun runs here alone
    by_slot: bool = False  # ranks follow the slots of the list, as nobody has typed otherwise


class End(Struct, frozen=True, kw_only=True):
    """How the job ended; `failure` is for PID 1."""

    code: int
    failure: Mapping[str, object] | None = None


# -- events -----------------------------------------------------------------------------------


class Hosts(Struct, frozen=True):
    """Who belongs to the job now, in the order of ranks."""

    members: tuple[Member, ...]
    at_s: float


class Ready(Struct, frozen=True):
    """Which hosts would take a daemon now, and where each other one is stuck."""

    hosts: frozenset[str]
    stuck: Mapping[str, str]
    at_s: float


class Exited(Struct, frozen=True):
    """mpirun has ended; what it said, and the last lines of its stderr."""

    code: int  # as the shell has it
    said: Said
    lines: tuple[str, ...]
    at_s: float


class Lost(Struct, frozen=True):
    """A host is lost while mpirun still runs; `said` by itself, and then it ends its ranks by itself."""

    host: str
    at_s: float
    said: bool = True


class Answered(Struct, frozen=True):
    """Who of those asked is not there any more, and why."""

    missing: Mapping[str, str]
    at_s: float


class Asked(Struct, frozen=True):
    """We were asked to stop."""

    at_s: float


class Drained(Struct, frozen=True):
    """The ranks were told to end by themselves, and after that we stop."""

    at_s: float


class Tick(Struct, frozen=True):
    """Time has passed."""

    at_s: float


Event: TypeAlias = Hosts | Ready | Exited | Lost | Answered | Asked | Drained | Tick

# -- actions ----------------------------------------------------------------------------------


class Await(Struct, frozen=True):
    """Look for these hosts until told otherwise; `afresh` are not believed to be there any more."""

    members: tuple[Member, ...]
    afresh: tuple[str, ...] = ()
    check_keys: bool = False  # a host is ready only when it lets us in


class Start(Struct, frozen=True):
    """Start mpirun on these hosts."""

    members: tuple[Member, ...]
    number: int  # of the start, from 1


class Ask(Struct, frozen=True):
    """Find out which of these hosts are there, within a moment."""

    hosts: tuple[str, ...]
    limit_s: float


class TellRanks(Struct, frozen=True):
    """Let every rank know, on its own host, that it has to stop."""

    hosts: tuple[str, ...]


class Signal(Struct, frozen=True):
    """Signal mpirun."""

    number: int


class Sweep(Struct, frozen=True):
    """End what an mpirun that was killed may have left on these hosts."""

    hosts: tuple[str, ...]


class Say(Struct, frozen=True):
    """One sentence for the log."""

    text: str


Action: TypeAlias = Await | Start | Ask | TellRanks | Signal | Sweep | Say


class State(Struct, frozen=True, kw_only=True):
    """Everything the machine knows; times are monotonic seconds, None: not set."""

    settings: JobSettings
    phase: Phase
    members: tuple[Member, ...] = ()
    ready: frozenset[str] = frozenset()
    stuck: Mapping[str, str]
    running: tuple[Member, ...] = ()
    starts: int = 0
    started_s: float = 0.0
    wait_until_s: float = 0.0
    shrink_from_s: float | None = None  # since when enough hosts are there to go on with fewer
    most_ready: int = 0  # hosts at the last look
    admit_at_s: float | None = None  # when the job is interrupted for hosts that have come
    deadline_s: float | None = None  # of the phase: kill, or answer
    killed: bool = False
    check_keys: bool = False
    troubles_from_s: float | None = None  # since when daemons could not be started
    ended_by_us: bool = False  # for another membership
    lost: str | None = None  # the host for which the job waits, or is being ended
    last: Exited | None = None
    failures: int = 0  # that cost the budget
    before: Death | None = None  # the failure before, if it came soon after its start
    early: int = 0  # starts in a row that did not last
    asked: bool = False
    draining: bool = False  # nothing is started again; ranks have all the time that they need
    end: End | None = None
