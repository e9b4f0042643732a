"""Engines turn a topology and a command into a plan; this file picks one. Adding one: a file, and a line here."""

from __future__ import annotations

from types import ModuleType

from trainer_launch.command import Command, Kind
from trainer_launch.engines import horovodrun, mpirun, plain, sshd, torchrun
from trainer_launch.engines.request import Request
from trainer_launch.errors import UsageError
from trainer_launch.horovodrun_options import is_horovodrun
from trainer_launch.model import Job, Plan
from trainer_launch.mpi import typed

ENGINES: tuple[ModuleType, ...] = (torchrun, mpirun, horovodrun, sshd, plain)


def plan(request: Request) -> Plan:
    """The complete plan, made by the engine that was asked for or that fits.

    Raises:
        LaunchError: the engine cannot run this command in this topology.
    """
    engine, reason = pick(request.job, request.command, request.engine)
    if engine in (mpirun, horovodrun) and request.replace_launcher and request.engine == "auto":
        engine, reason = plain, "with --exec the command runs as it is"
    made: Plan = engine.plan(request, reason)
    return made


def pick(job: Job, command: Command, asked: str) -> tuple[ModuleType, str]:
    """The engine, and why it was picked."""
    if asked != "auto":
        named = {engine.NAME: engine for engine in ENGINES}
        if asked not in named:
            raise UsageError(f"--engine is {asked!r}; expected one of auto, {', '.join(named)}")
        return named[asked], "--engine names it"
    if job.role == "rank":
        return plain, "this process is already a rank of a running job"
    if command.kind is Kind.TORCHRUN:
        return torchrun, "the command is torchrun"
    if typed.is_mpirun(command.argv[0]):
        return mpirun, "the command is mpirun"
    if is_horovodrun(command.argv):
        return horovodrun, "the command is horovodrun"
    if command.kind is Kind.PROGRAM:
        return plain, "the command is no Python program"
    if job.engine == "mpirun":
        return mpirun, f"contract {job.contract} is made for it"
    if job.engine == torchrun.NAME:
        return torchrun, f"contract {job.contract} is made for it"
    if job.engine is None and _says_how_many(job):
        return torchrun, "the number of nodes or workers is given"
    return plain, f"contract {job.contract} starts one program per node"


def _says_how_many(job: Job) -> bool:
    return job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
