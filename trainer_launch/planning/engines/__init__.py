"""Engines turn a topology and a command into a plan; this file asks each whether it is the one.

A new engine is a file, a line in ENGINES, and its name in `settings.py` for `--engine`.
"""

from __future__ import annotations

from typing import Protocol

from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import Command
from trainer_launch.planning.engines import horovodrun, mpirun, plain, sshd, torch, torch_options, torchrun
from trainer_launch.planning.engines.request import Request


class Engine(Protocol):
    """What each engine's module offers."""

    NAME: str

    def serves(self, job: Job, command: Command) -> str | None:
        """Why this engine is to run the command, in words for people; None where it is not, unless asked for."""

    def plan(self, request: Request, reason: str) -> Plan:
        """Everything to start, as values; `reason` is why it was picked."""


# The first that says it serves is picked, so `plain`, which serves all, comes last.
ENGINES: tuple[Engine, ...] = (
    torch,
    torchrun,
    mpirun,
    horovodrun,
    sshd,
    plain,
)


def plan(request: Request) -> Plan:
    """The complete plan, made by the engine that was asked for or that fits.

    Raises:
        LaunchError: the engine cannot run this command in this topology.
    """
    engine, reason = pick(request.job, request.command, request.engine)
    if engine in (mpirun, horovodrun) and request.replace_launcher and request.engine == "auto":
        engine, reason = plain, "with --exec the command runs as it is"
    if engine is torch:
        why = torch_options.handed_over(request, torch_options.asked(request))
        if why is not None and request.start_method == "forkserver":
            raise UsageError(f"--start-method is forkserver, but {why}; set it to auto")
        engine, reason = (torch, reason) if why is None else (torchrun, f"{reason}; torchrun runs it: {why}")
    return engine.plan(request, reason)


def pick(job: Job, command: Command, asked: str) -> tuple[Engine, str]:
    """The engine, and why it was picked."""
    if asked != "auto":
        named = {engine.NAME: engine for engine in ENGINES}
        if asked not in named:
            raise UsageError(f"invalid value {asked!r} for --engine: expected one of auto, {', '.join(named)}")
        return named[asked], "--engine selects it"
    if job.role == "rank":
        return plain, "this process is already a rank of a running job"
    engine, reason = next((engine, reason) for engine in ENGINES if (reason := engine.serves(job, command)))
    workers = torch.serves_any_program(job, command) if engine is plain else None
    return (engine, reason) if workers is None else (torch, workers)
