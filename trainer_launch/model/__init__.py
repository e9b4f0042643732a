"""The central values: what travels from the environment to the exit code.

All are frozen; a value that exists is consistent, because its reader raised otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from signal import SIGTERM
from types import MappingProxyType
from typing import TypeAlias

from msgspec import Struct, field

from trainer_launch.model.signal_policy import SignalAction

Json: TypeAlias = "bool | int | float | str | list[Json] | tuple[Json, ...] | Mapping[str, Json] | None"


def _nothing() -> Mapping[str, str]:
    """An empty mapping that nobody can change."""
    return MappingProxyType({})


class Origin(str, Enum):
    """Where a fact was read."""

    ENV = "env"
    FILE = "file"
    FLAG = "flag"
    COMMAND = "command"
    HOSTNAME = "hostname"
    DEFAULT = "default"
    DERIVED = "derived"  # from several facts


class Fact(Struct, frozen=True, kw_only=True):
    """A fact that was read, and the field that it became."""

    name: str  # the variable, path or flag
    value: str
    origin: Origin
    field: str  # the key of `job` or `plan` it became, or "" when it only informs
    became: Json = None  # the value under that key, where no field of Job has it


class NodeRange(Struct, frozen=True):
    """How many nodes a job may have: `min` to `max`, both at least 1."""

    min: int
    max: int

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}:{self.max}"

    @property
    def fixed(self) -> int | None:
        """The node count when there is only one, else None."""
        return self.min if self.min == self.max else None


class Member(Struct, frozen=True):
    """A node of the job by name; `slots` is its room for ranks, None where none is given."""

    host: str
    slots: int | None = None
    max_slots: int | None = None  # up to which Open MPI may oversubscribe them


class Rendezvous(Struct, frozen=True, kw_only=True):
    """How torch elastic's agents are told to meet."""

    kind: str  # "static": ranks are given; "dynamic": agents agree on them
    backend: str | None = None
    endpoint: Endpoint | None = None
    written: str | None = None  # the endpoint as the platform wrote it
    run_id: str | None = None
    conf: Mapping[str, str] = field(default_factory=_nothing)


class Mpi(Struct, frozen=True, kw_only=True):
    """How an MPI launcher finds and reaches its hosts."""

    hostfile_path: str
    launch_agent: str  # ssh, or kubexec: the platform's script around `kubectl exec`
    launch_agent_path: str | None = None  # that script
    mpi_implementation: str | None = None  # OpenMPI, Intel, MPICH; None: the platform names several
    slots_env: int | None = None  # ranks per host for which a variable asks
    launcher_in_hostfile: bool = False  # this pod hosts ranks, too


class StatusEndpoint(Struct, frozen=True, kw_only=True):
    """The status server of a TrainJob, and the files that open it."""

    scheme: str
    server_host: str
    server_port: int
    path: str
    ca_file: str
    token_file: str  # a path: the token rotates, and belongs in no Job


class Job(Struct, frozen=True, kw_only=True):
    """The platform's description of the job, in our words. None always means: not given."""

    contract: str = ""  # its name; `contracts.read_job` fills it in
    role: str | None = None  # the platform's word: node, launcher, worker, master, chief, ps …
    nodes: NodeRange | None = None
    nproc_per_node: int | str | None = None  # a number, or a word (auto, gpu, cpu, xpu) as given
    node_rank: int | None = None
    hostname_index: int | None = None  # index that only the host name tells
    world_size: int | None = None  # processes in the job
    coordinator: Endpoint | None = None
    is_coordinator: bool | None = None  # whether this node hosts the coordinator
    rendezvous: Rendezvous | None = None
    members: tuple[Member, ...] | None = None
    max_restarts: int | None = None
    spares: int = 0  # nodes beyond `nodes`, which wait to replace another
    engine: str | None = None  # the engine this contract is made for; None: decide by the command
    several_nodes_shown_by: str | None = None  # a variable: the pod never trains alone
    completion_index: int | None = None  # of an Indexed Job; 0 is no rank until something speaks of nodes
    foreign_replicated_job: bool = False  # node_rank counts the pods of another replicatedJob than the trainer's
    rank_behind_workers: int | None = None  # of the Master of an elastic job, whose workers have their own indices
    worker_for_each_gpu: bool = False  # the platform starts nothing, and counts no GPUs
    sparse: bool = False  # the platform lists only some of the nodes
    has_servers: bool = False  # parameter servers: pods of two replica types have the same hostname_index
    ssh_dir: str | None = None  # where the job's ssh key is mounted
    mpi: Mpi | None = None  # of an MPI launcher
    secret_file: str | None = None  # what a node must know to be let in
    status: StatusEndpoint | None = None  # where the job's progress may be reported
    should_report_progress: bool = False  # each report replaces the whole status: only rank 0 sends it
    facts: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()


class Cpus(Struct, frozen=True, kw_only=True):
    """CPUs that this container may use."""

    affinity: int  # CPUs in the scheduler's mask
    quota: float | None  # CPUs' worth of time per period from the cgroup, None: no limit

    @property
    def usable(self) -> int:
        """CPUs to plan for: the smaller of both, a fraction rounded up as Kubeflow does, at least 1."""
        if self.quota is None:
            return max(1, self.affinity)
        return max(1, min(self.affinity, -int(-self.quota // 1)))


class Gpus(Struct, frozen=True, kw_only=True):
    """Accelerators that this container can see; `reason` says how they were counted."""

    count: int
    reason: str
    is_nvidia: bool = True
    device: str = "cuda"  # torch's word for them

    @property
    def cuda(self) -> int:
        """Devices that torch.cuda counts, NVIDIA's and AMD's."""
        return self.count if self.device == "cuda" else 0


class Host(Struct, frozen=True, kw_only=True):
    """The machine as the container sees it."""

    hostname: str
    cpus: Cpus
    gpus: Gpus
    memory_limit_bytes: int | None  # None: the cgroup sets no limit
    shm_bytes: int | None  # size of /dev/shm, None: not there
    shm_free_bytes: int | None = None
    may_enlarge_shm: bool = False  # this container can mount
    memory_used_bytes: int | None = None  # of the limit, without what the kernel can drop at once


class Topology(Struct, frozen=True, kw_only=True):
    """The place of this node among the others."""

    node_rank: int | None
    nodes: NodeRange | None  # None: nobody said how many
    local_world_size: int | None  # None: asked for in a word that means nothing on this machine
    coordinator: Endpoint | None
    is_coordinator: bool  # this node hosts the coordinator
    rendezvous: Rendezvous | None
    max_restarts: int | None
    spares: int = 0  # nodes beyond `nodes`, which wait to replace another
    because: Mapping[str, str] = field(default_factory=_nothing)  # how each number was found, for people

    @property
    def by_arrival(self) -> bool:
        """Whether nodes get their ranks in the order in which they come: agents of torch agree on them likewise."""
        is_c10d = self.rendezvous is not None and self.rendezvous.backend == "c10d"
        return is_c10d and self.node_rank is None and self.pods != 1

    @property
    def pods(self) -> int | None:
        """Nodes that may be there, spares included; None: nobody said how many."""
        return None if self.nodes is None else self.nodes.max + self.spares

    @property
    def world_size(self) -> int | None:
        """Processes in the job, None while the number of nodes may vary."""
        fixed = self.nodes.fixed if self.nodes else None
        return None if fixed is None or self.local_world_size is None else fixed * self.local_world_size


class Destination(Struct, frozen=True, kw_only=True):
    """Where a worker's stream goes, where that is not the launcher's own stream alone."""

    file: str | None = None  # all of it
    is_shown: bool = True  # on the launcher's own stream, too
    prefix: str = ""  # of each line that is shown


class Process(Struct, frozen=True, kw_only=True):
    """A process to start, completely described."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]  # complete, not a delta
    cwd: str | None = None
    label: str | None = None  # prefix for its lines; None: its output is passed on byte for byte
    streams: Mapping[int, Destination] = field(default_factory=dict)  # of 1 and 2, which do not only go to ours


class Hosting(Struct, frozen=True, kw_only=True):
    """The coordinator that this node's launcher hosts for all nodes."""

    job: str
    host: str  # the address to listen at, "": all
    port: int
    nodes: NodeRange
    max_restarts: int  # of failed workers, for the whole job
    rejoin_timeout_s: float  # how long the others wait for a lost node
    shrink_after_s: float = 0.0  # how long before they go on without it, where the minimum allows
    secret_file: str | None = None  # what a node must know to be let in
    seats: Seats | None = None  # all nodes' coordinators, where each hosts one; None: only node 0 does
    seat: int = 0  # whose this is
    deadline_s: float | None = None  # after which the job fails; None: never
    spares: int = 0  # nodes beyond `nodes`, which wait to replace another
    finds_stragglers: bool = False
    failing: tuple[str, ...] = ()  # hosts that preflight found faulty
    by_arrival: bool = False  # nodes have no ranks of their own, and another launcher of this machine may host it


class Workers(Struct, frozen=True, kw_only=True):
    """The torch workers of this node, which PID 1 starts itself in each generation."""

    count: int
    argv: tuple[str, ...]  # the ordinary command of each: `python -u [-m] program args…`, or any program
    env: Mapping[str, str]  # complete, but for what a generation adds
    cwd: str | None = None
    role: str = "default"
    forks: bool = False  # from the fork server; False: each is a new interpreter
    records: bool = False  # a forked worker answers what torch's flight recorder knows
    script: str | None = None  # the program, for the fork server
    preload: tuple[str, ...] = ()
    python: str = ""  # the interpreter that has trainer_launch, and torch
    run_dir: str = ""  # the run's private folder
    errors: str = ""  # the folder of the files that torch's @record writes
    node_label: str | None = None  # in the prefix of each line; None: output is passed on byte for byte
    virtual_local_rank: bool = False
    meet_at: Endpoint | None = None  # where torchrun would have the store: a forked worker finds it there, too
    serve_store: bool = False  # rank 0 serves a generation's store, not a process of the launcher's
    of_deepspeed: bool = False  # they get the variables of the `deepspeed` command, too
    logs: Mapping[str, str] = field(default_factory=_nothing)  # torchrun's options about output, by name


class Membership(Struct, frozen=True, kw_only=True):
    """The node as a member of a job that meets at our coordinator."""

    job: str
    coordinator: Endpoint
    node_rank: int | None  # None: the coordinator gives it one, in the order of arrival
    host: str  # its own name
    address: str | None  # where the others reach it; None: find out
    patience_s: float  # how long the coordinator may stay away
    max_restarts: int
    ports: PortRange | None = None  # what the stores may use
    seats: Seats | None = None
    secret_file: str | None = None
    fault: str = ""  # what preflight found faulty on this node
    nodes: int = 0  # of the job, spares included; 0: their number may vary
    label: str = ""  # where this node is in the network, such as block-a/rack-3; "": ranks follow node numbers


class Plan(Struct, frozen=True, kw_only=True):
    """Everything to run and how to stop it; another program could carry it out."""

    engine: str
    processes: tuple[Process, ...]
    grace_s: float  # from the request to stop until SIGKILL
    stop_signal: int = SIGTERM  # what asks a leader to stop
    signals: Mapping[int, SignalAction] = field(default_factory=dict)  # where it is not the default
    daemons: frozenset[str] = frozenset()  # programs that hear SIGTERM only once nothing else runs below them
    hosting: Hosting | None = None  # on node 0 of a torch job that meets at our coordinator
    meeting: tuple[str, Endpoint] | None = None  # the job's name, and where our coordinator is found
    failure_file: str | None = None  # where torchrun leaves the first failure as JSON
    workers: Workers | None = None  # torch's, in place of `processes`
    membership: Membership | None = None  # with `workers`
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what the user should know about this plan


class Death(Struct, frozen=True, kw_only=True):
    """How a process ended, as far as it is known: from PID 1 to the termination message, for torch and MPI alike.

    Of a program it is the program's own end, of a job the first failed worker's.
    """

    process: str = ""  # its name, for people; "": it was no process of ours
    rank: int | None = None  # in the job
    local_rank: int | None = None
    host: str | None = None  # None: this one; "": another one, nobody knows which
    code: int | None = None  # as the shell has it; None: of a signal, or not known
    signal: int | None = None
    at_s: float = 0.0  # monotonic seconds; of a hang, the last progress
    attempt: int = 0  # a torch job's generation, or the start of mpirun
    error: str | None = None  # the type of the exception that ended it
    message: str | None = None  # what it said itself, type and all
    lines: tuple[str, ...] = ()  # its traceback, or what it wrote last
    reason: str | None = None  # the exit reason, where more is known than how it ended
    why_not_again: str | None = None  # why the job does not go on from its last checkpoint
    fault: str = ""  # its last error, where that proves that a device failed

    @property
    def exit_code(self) -> int:
        """As the shell has it: the code, or 128 + signal; 1 where neither is known."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.code is None else self.code


class Failure(Struct, frozen=True, kw_only=True):
    """The first cause of a failed run."""

    reason: str  # CamelCase, for machines
    message: str  # a sentence, for people
    exit_code: int
    rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()  # what shows that it was so, one phrase each
    hint: str | None = None
    again: bool | None = None  # whether a restart can help; None: the cause does not tell
    is_elsewhere: bool = False  # it was on another node, which ends with the cause's own exit code

    @property
    def restart_helps(self) -> bool | None:
        """Whether a restart can help: a signal or the infrastructure may not come again; None: nobody knows."""
        is_judged_by_code = self.again is None and not self.is_elsewhere
        return True if is_judged_by_code and self.exit_code >= 128 else self.again


class GivenUp(Struct, frozen=True, kw_only=True):
    """Why the coordinator ended a torch job, and the worker that failed first, on whatever node."""

    reason: str
    rank: int | None = None  # None: it was no worker's failure
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""  # the worker's own


class Verdict(str, Enum):
    """How a run ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class Outcome(Struct, frozen=True, kw_only=True):
    """How a run ended, and why."""

    verdict: Verdict
    stop_signal: int | None = None  # what asked us to stop
    failure: Failure | None = None
    given_up: GivenUp | None = None
    took_s: float = 0.0
    attempt: int = 1  # how often it was started: its workers, or all of it
    survivors: tuple[str, ...] = ()  # descendants that even SIGKILL did not end
    spent_s: Mapping[str, float] | None = None  # the wall time by its kinds; None: of who trains nothing
    node_rank: int | None = None
    host: str = ""
    note: str = ""  # what else a person should know


class PortRange(Struct, frozen=True):
    """Ports from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


class Endpoint(Struct, frozen=True):
    """A host name or address, and a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine itself can mean anything by it."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Seats(Struct, frozen=True):
    """Where each node's launcher listens, in a job that may go on without node 0; `pattern` has # for an index."""

    home: Endpoint  # node 0's
    pattern: str
    offset: int  # from a node's rank to the index in its name
    count: int

    def endpoint(self, rank: int) -> Endpoint:
        """A node's seat."""
        if rank == 0:
            return self.home
        return Endpoint(self.pattern.replace("#", str(rank + self.offset)), self.home.port)
