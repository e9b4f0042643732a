"""MPI jobs: mpirun and horovodrun over the job's hosts, and sshd in their workers' pods. Pure.

`mpi.mpi_job` waits for the hosts, runs the program, and starts it again. Which MPI it is (Open MPI, MPICH, Intel)
the program itself says, so its command line is made then.
"""

from __future__ import annotations

import re

from msgspec import Struct

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Plan, Process, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.job import typed
from trainer_launch.planning.mpi_options import MIN_NUMBER, SLOTS, SSH_PORT, is_horovodrun
from trainer_launch.planning.task import Engine, Task, env_of_program

SSH, KUBEXEC, OWN = "ssh", "kubexec", "own"  # how mpirun reaches its hosts; own: as the user has set it up
_MAX_PORT = 65535
# A user who has set one of these reaches the hosts in a way of his own.
_OWN_AGENTS = (
    *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm"),
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)
_OWN_OPTIONS = frozenset(
    ("plm_rsh_agent", "plm_ssh_agent", "plm", "launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
)
# What has ranks below it and ends with them, by the kernel's names; asked to stop once their ranks have ended.
_DAEMONS = frozenset(
    ("sshd", "sshd-session", "sshd-auth", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy")
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


class Spec(Struct, frozen=True, kw_only=True):
    """An MPI job's hosts, slots and variables, beside its command."""

    task: Task
    reach: str = SSH
    slots: int | None = None  # per host where the list does not tell, or the user wants another number
    slots_are_given: bool = False  # by the user: what the list tells does not count
    min_hosts: int | None = None  # None: all
    max_hosts: int | None = None  # None: as many as there are
    forward: tuple[str, ...] = ()  # variables that ranks get, whatever they are called


def forwarded(words: str | None) -> frozenset[str]:
    """The variables of `--forward-env A,B`.

    Raises:
        UsageError: one of them is no variable's name.
    """
    names = frozenset(word.strip() for word in (words or "").split(",") if word.strip())
    for name in sorted(names):
        if _VARIABLE.fullmatch(name) is None:
            raise UsageError(
                f"--forward-env names {name[:60]!r}; expected names of variables, as in HF_TOKEN,WANDB_API_KEY"
            )
    return names


def _serves(job: Job, command: Command) -> str | None:
    """An mpirun command, and a Python program in the launcher of an MPI job."""
    if mpi_options.is_mpirun(command.argv[0]):
        return "the command is mpirun"
    return f"contract {job.contract} uses mpirun" if command.is_worker and job.engine == "mpirun" else None


def _plan_of_mpirun(task: Task, reason: str) -> Plan:
    """mpirun over the job's hosts.

    Raises:
        UsageError: the command does not parse, or nothing can be counted that slots are asked for by.
    """
    words = (
        () if mpi_options.is_mpirun(task.command.argv[0]) else ("mpirun",)
    )  # a Python program without one gets it
    return _plan(task, MPIRUN.name, (*words, *task.argv), (reason,))


def _serves_horovodrun(_job: Job, command: Command) -> str | None:
    """A horovodrun command."""
    return "the command is horovodrun" if is_horovodrun(command.argv) else None


def _plan_of_horovodrun(task: Task, reason: str) -> Plan:
    """horovodrun over the job's hosts.

    Raises:
        UsageError: the command does not parse.
    """
    typed = mpi_options.parse(task.command.argv)
    if typed.number is None:
        raise UsageError("horovodrun needs the number of processes; write: horovodrun -np 4 python train.py")
    for names in (MIN_NUMBER, (SLOTS,)):
        typed.number_of(*names)
    if (typed.number_of(*SSH_PORT) or 0) > _MAX_PORT:
        raise UsageError(f"horovodrun's --ssh-port is {typed.number_of(*SSH_PORT)}; expected 1 to {_MAX_PORT}")
    kind = (
        "elastic: Horovod adds and removes hosts itself"
        if typed.is_elastic
        else "static: the launcher waits for a lost host"
    )
    return _plan(task, HOROVODRUN.name, task.command.argv, (reason, kind))


def _plan(task: Task, engine: str, command: tuple[str, ...], reasons: tuple[str, ...]) -> Plan:
    process = Process(
        name="mpirun" if engine == MPIRUN.name else engine,
        argv=command,
        env={**env_of_program(task), runtime_directory.VARIABLE: task.scratch},
        label="launcher" if task.settings.prefix else None,
    )
    spec_of(task, process)  # whether it makes sense
    signal_policy.stop_signal(task.signals)  # one has to be left that stops the job
    return Plan(
        engine=engine,
        processes=(process,),
        grace_s=task.grace_s,
        signals=task.signals,
        reasons=(*reasons, _reach(task, command)[1]),
    )


def spec_of(task: Task, process: Process) -> Spec:
    """The hosts, slots and variables of the job of this mpirun or horovodrun.

    Raises:
        UsageError: the command does not parse, or nothing can be counted that slots are asked for by.
    """
    slots, given = _slots(task)
    nodes = task.topology.nodes
    return Spec(
        task=task,
        reach=_reach(task, process.argv)[0],
        slots=slots,
        slots_are_given=given,
        min_hosts=nodes.min if nodes is not None and nodes.fixed is None else None,
        max_hosts=nodes.max if nodes is not None and typed(task.job, "nnodes") else None,
        forward=tuple(sorted(forwarded(task.settings.forward_env))),
    )


def _slots(task: Task) -> tuple[int | None, bool]:
    """Ranks per host where the list does not tell, and whether the user says so in spite of it."""
    job, gpus = task.job, task.host.gpus
    asked = typed(job, "nproc_per_node")
    if asked is None:
        return (None if job.mpi is None else job.mpi.slots_env or None), False
    size = task.topology.local_world_size
    if size is None or (asked in ("auto", "gpu") and not gpus.count):
        raise UsageError(
            f"invalid value {asked!r} for --nproc-per-node: this launcher has no device to count "
            f"({gpus.reason}); set it to a number"
        )
    return size, True


def _reach(task: Task, command: tuple[str, ...]) -> tuple[str, str]:
    """How hosts are reached, and a sentence about it."""
    typed = mpi_options.parse(command)
    names = frozenset() if is_horovodrun(command) else typed.names
    launch_agent = None if task.job.mpi is None else task.job.mpi.launch_agent
    if launch_agent == "kubexec":
        return KUBEXEC, "hosts are reached by the platform's kubexec.sh"
    if not names.isdisjoint(_OWN_OPTIONS) or any(task.env.get(name) for name in _OWN_AGENTS):
        return OWN, "hosts are reached as the image or the command configures it"
    if task.job.ssh_dir is None and launch_agent != "ssh":
        return OWN, "the job has no ssh key: hosts are reached with the image's ssh configuration"
    return SSH, "hosts are reached by ssh; both sides authenticate with the job's key"


def _plan_of_sshd(task: Task, reason: str) -> Plan:
    """A single process, sshd, as `task.command` has it; a request to stop goes to the ranks first."""
    env = {**task.env, runtime_directory.VARIABLE: task.scratch}
    return Plan(
        engine=SSHD.name,
        processes=(Process(name="sshd", argv=task.command.argv, env=env, label=""),),
        grace_s=task.grace_s,
        signals=task.signals,
        daemons=_DAEMONS,
        reasons=(reason,),
    )


MPIRUN = Engine("mpi", _serves, _plan_of_mpirun)
HOROVODRUN = Engine("horovodrun", _serves_horovodrun, _plan_of_horovodrun)
SSHD = Engine("sshd", lambda _job, _command: None, _plan_of_sshd)  # `trainer-launch sshd` is a command of its own
