"""The program as it is, once per node: TensorFlow, XGBoost, Paddle, JAX, mpirun as typed, anything."""

from __future__ import annotations

import re

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Origin, Plan, Process
from trainer_launch.model.settings import JOB_FLAGS, variable_of
from trainer_launch.model.value_parsers import named
from trainer_launch.planning.command import (
    OURS,
    Command,
    Kind,
    Launcher,
    launcher_of,
    runs_one_program,
    through_shims,
)
from trainer_launch.planning.engines import child_env
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.topology import workers_asked_for

NAME = "plain"
_RUNS = re.compile(r"\S+ (?:run|profile) |ncu ")  # such as uv run, nsys profile
_TRAINS = re.compile(r"(?:.*/)?python[0-9.]*|.*\.py")


def serves(job: Job, command: Command) -> str | None:
    """Whatever no other engine serves."""
    if command.kind is Kind.PROGRAM:
        return "the command is not a Python program"
    if command.kind is Kind.MODULE and not command.is_worker:
        return f"{command.program[0]} starts the workers itself"
    return f"contract {job.contract} starts one program per node"


def plan(request: Request, reason: str) -> Plan:
    """One process: the command, with `python` put before a bare script or module."""
    command = request.command
    argv = command.argv
    if command.kind in (Kind.SCRIPT, Kind.MODULE) and not command.python:
        argv = (request.python, *(("-m",) if command.kind is Kind.MODULE else ()), *command.program)
    rank = request.topology.node_rank
    env, reasons = dict(child_env.plain(request)), [reason]
    if not request.replace_launcher:
        env[runtime_directory.VARIABLE] = request.scratch
    if request.shims is not None:
        argv = through_shims(argv, request.shims)
        env |= {"PATH": f"{request.shims}:{env.get('PATH', '/usr/bin:/bin')}", **_typed(request.job)}
        reasons.append("launchers that it calls, such as torchrun, run under trainer-launch")
    process = Process(
        name="program",
        argv=argv,
        env=env,
        label=("?" if rank is None else str(rank)) if request.settings.prefix else None,
    )
    return Plan(
        engine=NAME,
        processes=(process,),
        grace_s=request.grace_s,
        signals=request.signals,
        warnings=warnings(request),
        reasons=tuple(reasons),
    )


def _typed(job: Job) -> dict[str, str]:
    """Options that describe the job, for the launchers in a script."""
    names = {option: variable_of(name) for name, option in JOB_FLAGS.items()}
    facts = (fact for fact in job.facts if fact.origin is Origin.FLAG and fact.field in names)
    return {names[fact.field]: fact.value for fact in facts}


# -- warnings about commands that run as they are ----------------------------------------------


def warnings(request: Request) -> tuple[str, ...]:
    """What to tell about a command that the plain engine runs; nothing where that is what was asked for."""
    job, command = request.job, request.command
    launcher = launcher_of(command)
    if request.settings.engine != "auto" or request.replace_launcher or job.role == "rank":
        return ()
    if launcher is not None and launcher.name == OURS:
        return ()
    if launcher is not None and launcher.is_inside and launcher.is_shim and request.shims:
        return ()  # the shim uses the launcher, or says why not
    asked = workers_asked_for(job)
    if launcher is not None and _is_covered(job, launcher):
        return (_starts_its_own(request, launcher, asked),)
    if asked is not None and job.engine not in ("mpirun", "sshd"):
        return (_no_effect(job, launcher, asked),)
    if launcher is None and command.kind is Kind.PROGRAM and _is_torchs(job):
        return (_runs_as_it_is(request),)
    return ()


def _is_covered(job: Job, launcher: Launcher) -> bool:
    """Whether an engine would have started the workers of this job."""
    if launcher.is_mpi and not launcher.is_inside:
        return False  # a question, such as horovodrun --help: everything else has its engine
    return launcher.is_mpi if job.engine == "mpirun" else job.engine in (None, "torchrun")


def _is_torchs(job: Job) -> bool:
    has_sizes = job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
    return job.engine == "torchrun" or (job.engine is None and has_sizes)


def _starts_its_own(request: Request, launcher: Launcher, asked: str | None) -> str:
    """accelerate, deepspeed, or a torchrun inside a shell."""
    name, nodes = launcher.name, request.topology.nodes
    sentences = [f"{name} starts the workers itself, so trainer-launch cannot restart a failed worker in place."]
    if nodes is not None and nodes.max > 1 and not launcher.nodes_meet:
        sentences.append(f"Each of the {nodes} nodes trains alone unless {name}'s own options name the others.")
    if asked is not None:
        sentences.append(f"--nproc-per-node {asked} has no effect.")
    if launcher.is_torchrun or launcher.is_mpi:
        sentences.append(f"Put `trainer-launch run --` directly in front of {name}.")
    else:
        count = "N" if request.job.nproc_per_node is None else asked
        flag = "" if count is None else f"--nproc-per-node {count} "
        sentences.append(f"Instead, type: trainer-launch run {flag}-- {named(launcher.script)} …")
    return " ".join(sentences)


def _no_effect(job: Job, launcher: Launcher | None, asked: str) -> str:
    advice = " To start torch workers, add --engine torchrun." if launcher is None else ""
    return f"--nproc-per-node {asked} has no effect: contract {job.contract} starts one program per node.{advice}"


def _runs_as_it_is(request: Request) -> str:
    """A shell, a script of one, or any program, in a pod that was told about workers."""
    name, workers = _shown(request.command), request.topology.local_world_size or "N"
    lost = f"{name} runs once on this node: trainer-launch sets no RANK and restarts no failed worker in place."
    if runs_one_program(request.command.argv):
        words = request.command.argv
        at = next((at for at, word in enumerate(words) if _TRAINS.fullmatch(word)), 2)
        also = (
            f", or type: {named(' '.join(words[:at]))} trainer-launch run -- …"
            if _RUNS.match(" ".join(words))
            else "."
        )
        return f"{lost} To start its workers, add --nproc-per-node {workers}{also}"
    return (
        f"{lost} If {name} starts the training, put `trainer-launch run --` in front of the training command in "
        f"it. If it is the worker itself, add --nproc-per-node {workers}."
    )


def _shown(command: Command) -> str:
    """A program as messages call it, with `-c` or `-` where that is what it is about."""
    first, *rest = command.argv
    return named(" ".join((first, *(word for word in rest[:1] if word.startswith("-") and len(word) < 8))))
