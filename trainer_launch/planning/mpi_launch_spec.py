"""What the agent that runs mpirun has to know, as one value; the engine writes it, the agent reads it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from trainer_launch.model.signal_policy import SignalAction

SSH, KUBEXEC, OWN = "ssh", "kubexec", "own"  # how mpirun reaches its hosts; own: as the user has set it up


class JobSettings(Struct, frozen=True, kw_only=True):
    """What a job is allowed; seconds, None: no limit of this kind. What only the agent sees, it replaces."""

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


class Spec(Struct, frozen=True, kw_only=True):
    """An MPI job as its launcher sees it."""

    contract: str
    hostname: str  # of this pod
    hostfile: str | None = None  # that the platform mounts, or the user typed
    is_hydra_file: bool = False  # its lines are HOST:N
    hosts: str = ""  # HOST:N,HOST:N, in place of the file
    slots: int | None = None  # per host where the list does not tell, or the user wants another number
    slots_are_given: bool = False  # by the user: what the list tells does not count
    discovery: str | None = None  # a script that prints the hosts of now
    agent: str = SSH
    agent_path: str | None = None  # kubexec.sh
    ssh_dir: str | None = None
    ssh_port: int | None = None
    check_host_keys: bool = True
    settings: JobSettings = JobSettings()
    signals: Mapping[int, SignalAction] = field(default_factory=dict)  # where they are not the default
    scratch: str
    failure_file: str | None = None
    forward: tuple[str, ...] = ()  # variables that ranks get, whatever they are called
