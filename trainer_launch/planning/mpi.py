"""MPI jobs: mpirun and horovodrun over the job's hosts, and sshd in their workers' pods. Pure.

One agent waits for the hosts, runs the program, and starts it again (`mpi.job_state_machine`). Which MPI it is
(Open MPI, MPICH, Intel) the program itself says, so its command line is made by the agent. An elastic horovodrun's
hosts come and go under Horovod's own eyes, by a script of ours that tells whom we reach.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import runtime_directory
from trainer_launch.model import Fact, Forked, Job, Origin, Plan, Process, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command, Kind
from trainer_launch.planning.mpi_options import HorovodCommand, is_horovodrun, split_command
from trainer_launch.planning.ssh_environment import named
from trainer_launch.planning.task import Engine, Task, env_of_program

SSH, KUBEXEC, OWN = "ssh", "kubexec", "own"  # how mpirun reaches its hosts; own: as the user has set it up
_AGENTS = {"mpirun": "trainer_launch.mpi.agent", "horovodrun": "trainer_launch.mpi.horovod_agent"}
_MAX_PORT = 65535
_AGENT_RESTARTS = 3  # an hour, when PID 1 starts a killed agent again; its own exit code is final
_MAX_RESTARTS = 3  # of failed ranks, unless the user says
# A user who has set one of these reaches the hosts in a way of his own.
_OWN_AGENTS = (
    *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm"),
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)
_OWN_OPTIONS = frozenset(
    ("plm_rsh_agent", "plm_ssh_agent", "plm", "launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
)


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
    window_s: float | None = None  # in which so many are too many; None: ever
    grace_s: float = 25.0
    has_list: bool = True  # False: mpirun runs here alone
    by_slot: bool = False  # ranks follow the slots of the list, as nobody has typed otherwise


class Spec(Struct, frozen=True, kw_only=True):
    """An MPI job as its launcher sees it: what the agent that runs mpirun or horovodrun has to know."""

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


# -- mpirun ------------------------------------------------------------------------------------


def _serves(job: Job, command: Command) -> str | None:
    """An mpirun command, and a Python program in the launcher of an MPI job."""
    if mpi_options.is_mpirun(command.argv[0]):
        return "the command is mpirun"
    return f"contract {job.contract} uses mpirun" if command.is_worker and job.engine == "mpirun" else None


def _plan(task: Task, reason: str) -> Plan:
    """One agent, which knows the job's hosts and the command.

    Raises:
        UsageError: the command does not parse, or nothing can be counted that slots are asked for by.
    """
    command = task.command
    words = command.argv
    if not mpi_options.is_mpirun(words[0]):  # a Python program without an mpirun gets one
        if command.kind in (Kind.SCRIPT, Kind.MODULE) and not command.python:
            words = (task.trial.python, *(("-m",) if command.kind is Kind.MODULE else ()), *command.program)
        words = ("mpirun", *words)
    spec, why = _spec(task, mpi_options.parse(words).names)
    return _agents_plan(task, MPIRUN.name, "mpirun", words, spec, (reason, why))


MPIRUN = Engine("mpi", _serves, _plan)


# -- horovodrun --------------------------------------------------------------------------------


def _serves_horovodrun(_job: Job, command: Command) -> str | None:
    """A horovodrun command."""
    return "the command is horovodrun" if is_horovodrun(command.argv) else None


def _plan_of_horovodrun(task: Task, reason: str) -> Plan:
    """One agent, which knows the job's hosts and the command.

    Raises:
        UsageError: the command does not parse.
    """
    argv = task.command.argv
    command = split_command(argv[1:])
    if not command.has("num_proc") and not command.only_asks:
        raise UsageError("horovodrun needs the number of processes; write: horovodrun -np 4 python train.py")
    for name in ("num_proc", "min_num_proc", "max_num_proc", "slots", "ssh_port"):
        command.number(name)
    if (command.number("ssh_port") or 0) > _MAX_PORT:
        raise UsageError(f"horovodrun's --ssh-port is {command.number('ssh_port')}; expected 1 to {_MAX_PORT}")
    spec, why = _spec(task, frozenset())
    kind = (
        "elastic: Horovod adds and removes hosts itself"
        if command.is_elastic
        else "static: the launcher waits for a lost host"
    )
    spec = _typed_over(spec, command)
    return _agents_plan(task, HOROVODRUN.name, "horovodrun", argv, spec, (reason, why, kind))


def _typed_over(spec: Spec, command: HorovodCommand) -> Spec:
    """What was typed goes before what the platform says; the agent reads the list of -H itself."""
    hostfile, script, slots = (
        command.value("hostfile"),
        command.value("host_discovery_script"),
        command.number("slots"),
    )
    if hostfile is not None:
        spec = replace(spec, hostfile=hostfile, is_hydra_file=False)
    if script is not None or command.has("hosts"):  # a typed list is all there is
        spec = replace(spec, discovery=script)
    if slots is not None:
        spec = replace(spec, slots=slots, slots_are_given=True)
    spec = replace(spec, ssh_port=spec.ssh_port or command.number("ssh_port"))
    return replace(spec, settings=replace(spec.settings, min_hosts=1)) if command.is_elastic else spec


HOROVODRUN = Engine("horovodrun", _serves_horovodrun, _plan_of_horovodrun)


# -- the agent of both -------------------------------------------------------------------------


def _agents_plan(
    task: Task, engine: str, program: str, command: tuple[str, ...], spec: Spec, reasons: tuple[str, ...]
) -> Plan:
    """One agent, which runs `command`, an mpirun or a horovodrun (`program`), over the job's hosts.

    Raises:
        UsageError: no signal is left to stop by.
    """
    agent = Process(
        name=program,
        argv=command,
        env={**env_of_program(task), runtime_directory.VARIABLE: task.trial.scratch},
        label="launcher" if task.settings.prefix else None,
        forked=Forked(_AGENTS[program], spec),
    )
    return Plan(
        engine=engine,
        processes=(agent,),
        grace_s=task.grace_s,
        stop_signal=signal_policy.stop_signal(task.signals),
        signals=task.signals,
        restarts=_AGENT_RESTARTS,
        failure_file=spec.failure_file,
        reasons=reasons,
    )


def _spec(task: Task, names: frozenset[str]) -> tuple[Spec, str]:
    """The job for the agent, and how its hosts are reached; `names` are those of mpirun's typed options.

    Raises:
        UsageError: nothing can be counted that slots are asked for by.
    """
    from trainer_launch.contracts.mpi_operator import (
        DISCOVERY,  # the agents, which load this module, load no contract
    )

    job, mpi, settings, scratch = task.job, task.job.mpi, task.settings, task.trial.scratch
    slots, given = _slots(task)
    agent, why = _agent(task, names)
    nodes, restarts = task.topology.nodes, task.topology.max_restarts
    is_elastic = nodes is not None and nodes.fixed is None
    spec = Spec(
        contract=job.contract,
        hostname=task.host.hostname,
        hostfile=None if settings.hosts is not None or mpi is None else mpi.hostfile_path,
        is_hydra_file=mpi is not None and mpi.mpi_implementation in ("Intel", "MPICH"),
        hosts=settings.hosts or "",
        slots=slots,
        slots_are_given=given,
        discovery=settings.host_discovery_script or DISCOVERY,
        agent=agent,
        agent_path=None if mpi is None else mpi.launch_agent_path,
        ssh_dir=job.ssh_dir,
        ssh_port=settings.ssh_port,
        check_host_keys=not settings.insecure_host_keys,
        settings=JobSettings(
            min_hosts=nodes.min if nodes is not None and is_elastic else None,
            max_hosts=nodes.max if nodes is not None and _flag(job, "nnodes") else None,
            wait_s=settings.wait_timeout,
            rejoin_s=settings.rejoin_timeout,
            shrink_s=task.shrink_after_s,
            max_restarts=_MAX_RESTARTS if restarts is None else restarts,
            window_s=settings.restart_window,
            grace_s=task.grace_s,
        ),
        signals=task.signals,
        scratch=scratch,
        failure_file=f"{scratch}/{runtime_directory.FAILURE}",
        forward=tuple(sorted(named(settings.forward_env))),
    )
    return spec, why


def _slots(task: Task) -> tuple[int | None, bool]:
    """Ranks per host where the list does not tell, and whether the user says so in spite of it."""
    job, gpus = task.job, task.host.gpus
    fact = _flag(job, "nproc_per_node")
    if fact is None:
        return (None if job.mpi is None else job.mpi.slots_env or None), False
    size = task.topology.local_world_size
    if size is None or (fact.value in ("auto", "gpu") and not gpus.count):
        raise UsageError(
            f"invalid value {fact.value!r} for --nproc-per-node: this launcher has no device to count "
            f"({gpus.reason}); set it to a number"
        )
    return size, True


def _agent(task: Task, names: frozenset[str]) -> tuple[str, str]:
    launch_agent = None if task.job.mpi is None else task.job.mpi.launch_agent
    if launch_agent == "kubexec":
        return KUBEXEC, "hosts are reached by the platform's kubexec.sh"
    if not names.isdisjoint(_OWN_OPTIONS) or any(task.env.get(name) for name in _OWN_AGENTS):
        return OWN, "hosts are reached as the image or the command configures it"
    if task.job.ssh_dir is None and launch_agent != "ssh":
        return OWN, "the job has no ssh key: hosts are reached with the image's ssh configuration"
    return SSH, "hosts are reached by ssh; both sides authenticate with the job's key"


def _flag(job: Job, name: str) -> Fact | None:
    """What the user himself said about the job."""
    facts = (fact for fact in reversed(job.facts) if fact.field == name and fact.origin is Origin.FLAG)
    return next(facts, None)


# -- sshd --------------------------------------------------------------------------------------


_RESPAWNS = 100  # each costs milliseconds and ends no rank
# What has ranks below it and ends with them, by the kernel's names; asked to stop once their ranks have ended.
_DAEMONS = frozenset(
    ("sshd", "sshd-session", "sshd-auth", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy")
)


def _plan_of_sshd(task: Task, reason: str) -> Plan:
    """One process, sshd, as `task.command` has it; who is asked to stop first are the ranks.

    It stays while ranks come and go, and comes back when it crashes.
    """
    env = {**task.env, runtime_directory.VARIABLE: task.trial.scratch}
    return Plan(
        engine=SSHD.name,
        processes=(Process(name="sshd", argv=task.command.argv, env=env, label=""),),
        grace_s=task.grace_s,
        signals=task.signals,
        respawns=_RESPAWNS,
        daemons=_DAEMONS,
        reasons=(reason,),
    )


SSHD = Engine("sshd", lambda _job, _command: None, _plan_of_sshd)  # `trainer-launch sshd` is a command of its own
