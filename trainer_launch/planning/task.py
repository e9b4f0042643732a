"""The task that an engine plans, and the environment of the processes that it starts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from trainer_launch.model import Host, Job, Member, Plan, PortRange, Topology, signal_policy, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import PREFIX, Settings
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.planning import interfaces
from trainer_launch.planning.command import Command, CommandKind, grace_of
from trainer_launch.planning.interfaces import NodeNetwork
from trainer_launch.planning.job import usable_threads
from trainer_launch.planning.torchrun_options import OPTIONS, check_value, from_variables

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_ONLY_WHERE_SET = ("no_grpc_proxy",)  # which gRPC reads in place of the others
_BYPASSES = ("no_proxy", "NO_PROXY", *_ONLY_WHERE_SET)
_MOST_HOSTS = 1000  # by name
_PATIENCE_S = 30.0  # for a lost node, where --min-nodes lets a fixed job go on without it
LAUNCHER = ("trainer-launch", "run", "--")  # without the command


class Task(Struct, frozen=True, kw_only=True):
    """Everything a plan is made of; `env` is the container's environment."""

    job: Job
    host: Host
    topology: Topology
    command: Command
    env: Mapping[str, str]
    settings: Settings
    # What was tried on this machine, and made for the plan.
    scratch: str = ""  # a private folder for this run's files
    python: str = ""  # the interpreter that has trainer_launch
    python_is_ours: bool = False  # whether the interpreter typed in the command is that one
    loopback_port: int = 0  # a free one, where a single node's agent meets its launcher
    shm_is_short: bool = False  # /dev/shm is too small for what the engines take by themselves
    copies_are_refused: bool = False  # process_vm_readv, with which Open MPI's ranks copy from each other
    shims: str | None = None  # the folder of a torchrun and others that use the launcher, for scripts
    label: str | None = None  # this node's topology label, "" where there is none; None: ranks follow node numbers
    front_end: tuple[str, str] = ("", "")  # the Python of a typed front end, and the path of its program
    launcher: tuple[str, ...] = LAUNCHER  # what a front end becomes, without the command
    network: NodeNetwork | None = None  # what torch workers find here; None: nobody has looked

    @property
    def argv(self) -> tuple[str, ...]:
        """The command as it is started: with our Python before a bare script or module."""
        command = self.command
        if command.python or command.kind not in (CommandKind.SCRIPT, CommandKind.MODULE):
            return command.argv
        return (self.python, *(("-m",) if command.kind is CommandKind.MODULE else ()), *command.program)

    @property
    def grace_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL: --grace, else torch's own timeout."""
        is_given = "grace" in self.settings.model_fields_set
        return grace_of(self.settings.grace, self.command, self.env, is_given=is_given)

    @property
    def signals(self) -> Mapping[int, SignalAction]:
        """The actions of signals that differ from the defaults."""
        return signal_policy.parse(self.settings.signals or "")

    @property
    def shrink_after_s(self) -> float:
        """How long a lost node is waited for where fewer may go on.

        A platform that allows fewer nodes means it; who lowers a fixed number still wants the lost node back.
        """
        if self.settings.shrink_after is not None:
            return float(self.settings.shrink_after)
        return 0.0 if self.settings.min_nodes is None else _PATIENCE_S

    @property
    def torchrun_options(self) -> dict[str, str]:
        """torchrun's options by name as the user wrote them: PET_* variables, then what the command says.

        Raises:
            UsageError: a value is out of its form.
        """
        typed = self.command.torchrun.options if self.command.torchrun else {}
        for name, value in typed.items():
            check_value(OPTIONS[name], value, OPTIONS[name].flag)
        return {**from_variables(self.env), **typed}

    @property
    def node(self) -> str:
        """The rank of this node, in the prefix of a line."""
        return "?" if self.topology.node_rank is None else str(self.topology.node_rank)


class Engine(Struct, frozen=True):
    """A way to run a command."""

    name: str
    serves: Callable[[Job, Command], str | None]  # why it is the one, for people; None: only where it is asked for
    plan: Callable[[Task, str], Plan]  # everything to start, as values; the text is why the engine was picked


def ports_of(settings: Settings) -> PortRange | None:
    """The ports that may be opened besides the port where the nodes meet; None: any.

    Raises:
        UsageError: --port-range makes no sense.
    """
    text = settings.port_range
    ports = None if text is None else value_parsers.parse_port_range(text)
    if text is not None and ports is None:
        raise UsageError(
            f"invalid value {text[:60]!r} for --port-range: expected LOW-HIGH, two ports from 1 to 65535"
        )
    return ports


_MPI = ("mpirun", "sshd")
_OPEN_MPI = "OMPI_MCA_btl_"
# Large messages go through shared memory, without process_vm_readv. Open MPI 3 and 4 would log "Read -1, expected
# N, errno = 1" for each message (open-mpi/ompi#4948). From 5.0, CMA is a component of its own.
# On mpirun's command line the same parameters take precedence.
_TWO_COPIES = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}


def env_of_workers(task: Task) -> dict[str, str]:
    """The environment that all torch workers have, before torchrun's options and a generation add to it."""
    env = repaired(task.env)
    threads, _ = usable_threads(task.host, task.topology.local_world_size, env.get("OMP_NUM_THREADS"))
    if threads is not None:
        env["OMP_NUM_THREADS"] = threads
    if task.network is not None:
        env |= interfaces.settled(task.network)[0]
    return _for_children(task, env)


def env_of_program(task: Task) -> dict[str, str]:
    """The environment of a program; a torchrun inside it finds PET_* values that it does not crash on."""
    env = dict(task.env)
    if task.job.engine == "torchrun":
        env = repaired(env)
        # torchrun's own `auto` and `cpu` do not see the cgroup's quota.
        size = task.topology.local_world_size
        if "PET_NPROC_PER_NODE" in env and size is not None:
            env["PET_NPROC_PER_NODE"] = str(size)
    return _for_children(task, env)


def sparing(task: Task, env: dict[str, str]) -> dict[str, str]:
    """The environment in which engines do without what this container lacks; the user's own values stand.

    Where /dev/shm is too small, NCCL goes through sockets or InfiniBand instead where GPUs cannot reach each other
    directly (its user guide, NCCL_SHM_DISABLE; NVIDIA/nccl#525). Open MPI puts the files that it maps elsewhere
    (vader's in 3.1 to 4.x, open-mpi/ompi#5422; sm's from 5.0, which has vader's name as an alias), and so does UCX.
    """
    if task.shm_is_short:
        if task.host.gpus.cuda:
            env.setdefault("NCCL_SHM_DISABLE", "1")
        if task.job.engine in _MPI and not any(name.startswith(_OPEN_MPI) for name in env):
            env |= {f"{_OPEN_MPI}{name}_backing_directory": "/tmp" for name in ("vader", "sm")}
        if task.job.engine in _MPI:
            env.setdefault("UCX_POSIX_DIR", "/tmp")
    if task.copies_are_refused and env.keys().isdisjoint(_TWO_COPIES):
        env |= _TWO_COPIES
    return env


def past_proxies(task: Task, env: dict[str, str]) -> dict[str, str]:
    """The environment with the job's hosts among those that no proxy is for: gRPC takes http_proxy (TF, JAX)."""
    proxies = (env.get(name) or env.get(name.upper()) for name in _PROXIES)
    if task.topology.pods == 1 or not any(proxies):
        return env
    members, coordinator = task.job.members or (), task.topology.coordinator
    hosts = [member.host for member in members] if len(members) <= _MOST_HOSTS else _domains(members)
    hosts = ["localhost", "127.0.0.1", task.host.hostname, *([coordinator.host] if coordinator else []), *hosts]
    given = [host.strip() for name in _BYPASSES for host in env.get(name, "").split(",") if host.strip()]
    if "*" in given:
        return env
    value = ",".join(dict.fromkeys([*given, *hosts]))
    return {**env, **{name: value for name in _BYPASSES if name in env or name not in _ONLY_WHERE_SET}}


def _domains(members: Sequence[Member]) -> list[str]:
    """The domains of very many names; addresses have none."""
    domains = (member.host.partition(".")[2] for member in members if not value_parsers.is_address(member.host))
    return sorted({f".{domain}" for domain in domains if domain})


def repaired(env: Mapping[str, str]) -> dict[str, str]:
    """PET_<FLAG> as 1 or 0: torchrun calls int() on them, and the v1 operator writes PET_STANDALONE=""."""
    fixed = dict(env)
    for option in OPTIONS.values():
        if option.form == "flag" and option.variable in fixed:
            fixed[option.variable] = check_value(option, fixed[option.variable], option.variable)
    return fixed


def with_log_level(env: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """The agents of torch and MPI read their level there."""
    given = "log_level" in settings.model_fields_set
    return {**env, f"{PREFIX}LOG_LEVEL": settings.log_level} if given else env


def _for_children(task: Task, env: dict[str, str]) -> dict[str, str]:
    """The environment of a child: one that is watched for output must not keep it in a buffer."""
    env = past_proxies(task, sparing(task, env))
    return {"PYTHONUNBUFFERED": "1", **env} if task.settings.hang_timeout is not None else env
