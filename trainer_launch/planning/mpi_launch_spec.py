"""What the agent that runs mpirun has to know, as one value; the engine writes it, the agent reads it. Pure."""

from __future__ import annotations

from trainer_launch.model.frozen import dataclass

SSH, KUBEXEC, OWN = "ssh", "kubexec", "own"  # how mpirun reaches its hosts; own: as the user has set it up


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
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
    min_hosts: int | None = None  # None: all
    max_hosts: int | None = None  # None: as many as there are
    wait_s: float = 600.0  # for all hosts at the start
    rejoin_s: float = 600.0  # for a host that was lost
    shrink_s: float = 0.0  # before going on with fewer, where the minimum allows
    max_restarts: int = 3  # of failed ranks, for the whole job
    window_s: float | None = None  # in which so many are too many; None: ever
    grace_s: float = 25.0
    signals: str = ""  # what each is for, where it is not the default; as `signals.render` has it
    scratch: str
    failure_file: str | None = None
    forward: tuple[str, ...] = ()  # variables that ranks get, whatever they are called
