"""The program as it is, once per node: TensorFlow, XGBoost, Paddle, JAX, mpirun as typed, anything."""

from __future__ import annotations

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Plan, Process
from trainer_launch.planning.command import Command, Kind
from trainer_launch.planning.engines import bypass, child_env
from trainer_launch.planning.engines.request import Request

NAME = "plain"


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
    env = dict(child_env.plain(request))
    if not request.replace_launcher:
        env[runtime_directory.VARIABLE] = request.scratch
    process = Process(
        name="program",
        argv=argv,
        env=env,
        label=("?" if rank is None else str(rank)) if request.prefix else None,
    )
    return Plan(
        engine=NAME,
        processes=(process,),
        grace_s=request.grace_s,
        stop_order=request.stop_order,
        signals=request.signals,
        warnings=bypass.warnings(request),
        reasons=(reason,),
    )
