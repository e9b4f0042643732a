"""From what was read to a plan: the engine that was asked for or that fits makes it of a task.

A new engine is an `Engine` in a module beside this one, its line in ENGINES, and its name in `settings.py` for
`--engine`.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from trainer_launch.contracts.source import PodInput
from trainer_launch.host import network
from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import Settings
from trainer_launch.planning import torch
from trainer_launch.planning.command import Command, CommandKind, launcher_in, parse_command
from trainer_launch.planning.job import place
from trainer_launch.planning.mpi import HOROVODRUN, MPIRUN, SSHD
from trainer_launch.planning.plain import FRONT_END, PLAIN
from trainer_launch.planning.reading import Reading, front_end, has_name, is_our_python, look_at_network
from trainer_launch.planning.shared_memory import copies_are_refused
from trainer_launch.planning.task import LAUNCHER, Engine, Task, ports_of, with_log_level
from trainer_launch.planning.torch import TORCH, TORCHRUN

# The first that says it serves is picked, so `plain`, which serves all, comes last.
ENGINES: tuple[Engine, ...] = (
    TORCH,
    TORCHRUN,
    MPIRUN,
    HOROVODRUN,
    SSHD,
    FRONT_END,
    PLAIN,
)
OF_TORCH = (TORCH.name, TORCHRUN.name, FRONT_END.name)


def plan(task: Task) -> Plan:
    """The complete plan, made by the engine that was asked for or that fits.

    Raises:
        LaunchError: the engine cannot run this command in this topology.
    """
    engine, reason = pick(task.job, task.command, task.settings.engine)
    if engine in (TORCH, TORCHRUN):
        why = torch.handed_over(task)
        if why is not None and engine is TORCH:
            engine, reason = TORCHRUN, f"{reason}; torchrun runs it: {why}"
    if engine is not FRONT_END:
        torch.check_spares(task, reason, runs_workers=engine is TORCH)
    if engine not in (TORCH, FRONT_END):
        torch.check_placement(task, reason)
    plan = engine.plan(task, reason)
    odd = torch.warnings(task) if engine in (TORCH, TORCHRUN) else ()
    return replace(plan, warnings=(*plan.warnings, *odd, *_without_sshd(task)))


def _without_sshd(task: Task) -> tuple[str, ...]:
    """A warning about an MPI pod that mpirun reaches by ssh, but whose command is another than sshd."""
    trains = task.command.is_worker or launcher_in(task.command.argv) is not None  # a script may start sshd
    if task.job.engine != SSHD.name or not trains:
        return ()
    return (
        f"this pod is an MPI worker (contract {task.job.contract}), but its command is {task.command.argv[0]}. "
        "Without sshd mpirun cannot reach this pod; set the command to: trainer-launch sshd",
    )


def pick(job: Job, command: Command, asked: str) -> tuple[Engine, str]:
    """The engine, and why it was picked."""
    names = {engine.name: engine for engine in ENGINES}
    if asked not in ("auto", *names):
        raise UsageError(f"invalid value {asked!r} for --engine: expected one of auto, {', '.join(names)}")
    if (
        command.kind is CommandKind.FRONT_END
        and asked in ("auto", TORCH.name, TORCHRUN.name)
        and job.role != "rank"
    ):
        return FRONT_END, f"{command.front_end} decides on the command"
    if asked != "auto":
        return names[asked], "--engine selects it"
    if job.role == "rank":
        return PLAIN, "this process is already a rank of a running job"
    engine, reason = next((engine, reason) for engine in ENGINES if (reason := engine.serves(job, command)))
    workers = torch.serves_any_program(job, command) if engine is PLAIN else None
    return (engine, reason) if workers is None else (TORCH, workers)


_MAX_LABEL = 253


def task_of(
    reading: Reading,
    settings: Settings,
    *,
    scratch: str = "",
    shm_is_short: bool = False,
    shims: str | None = None,
    launcher: tuple[str, ...] = LAUNCHER,
) -> Task:
    """Everything an engine needs for its plan; what was made or done on this machine first is as in `Task`.

    Raises:
        LaunchError: missing command, or this node has no place in the job.
    """
    topology = place(reading.job, reading.host)
    if topology.by_arrival and topology.coordinator is not None:
        topology = replace(topology, is_coordinator=has_name(reading.host.hostname, topology.coordinator.host))
    command, path = _command(reading), reading.pod.env.get("PATH")
    is_ours = bool(command.python) and is_our_python(command.python[0], path)
    label = None if settings.topology_label is None else _label(settings.topology_label, reading.pod)
    return Task(
        job=reading.job,
        host=reading.host,
        topology=topology,
        command=command,
        env=with_log_level(reading.pod.env, settings),
        settings=settings,
        scratch=scratch,
        python=sys.executable,
        python_is_ours=is_ours,
        loopback_port=network.free_port(ports_of(settings), keeps=True),
        shm_is_short=shm_is_short,
        copies_are_refused=copies_are_refused(reading.job, command),
        shims=shims,
        label=label,
        front_end=front_end(command, path),
        launcher=launcher,
    )


def with_network(task: Task) -> Task:
    """The task with what torch workers find in this machine's network; others choose interfaces otherwise."""
    if pick(task.job, task.command, task.settings.engine)[0] not in (TORCH, TORCHRUN):
        return task
    return replace(task, network=look_at_network(task.topology, task.host, task.env))


def _label(source: str, pod: PodInput) -> str:
    """The topology label of this node, from a file or a variable; "" where there is none.

    Raises:
        UsageError: it is no label.
    """
    is_file = source.startswith("/")
    text = (pod.files.read(source) or b"").decode(errors="replace") if is_file else pod.env.get(source, "")
    label = text.strip().strip("/")
    if not (label.isascii() and label.isprintable() and len(label) <= _MAX_LABEL):
        raise UsageError(
            f"{source} holds {label[:60]!r}: expected a topology label such as block-a/rack-3, of at most "
            f"{_MAX_LABEL} ASCII characters; correct it, or set --topology-label to another file or variable"
        )
    return label


def _command(reading: Reading) -> Command:
    if reading.command is None and reading.job.engine == "sshd":
        raise UsageError("missing command; this pod is an MPI worker, whose command is: trainer-launch sshd")
    return reading.command or parse_command(reading.pod.command)
