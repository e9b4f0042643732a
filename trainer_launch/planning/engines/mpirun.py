"""mpirun over the job's hosts: one agent waits for them, runs mpirun, starts it again (`mpi.job_state_machine`).

Which MPI it is (Open MPI, MPICH, Intel) the program itself says, so its command line is made by the agent.
"""

from __future__ import annotations

from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import typed_mpirun
from trainer_launch.planning.command import Command, Kind
from trainer_launch.planning.engines import mpi_spec
from trainer_launch.planning.engines.request import Request

NAME = "mpi"


def serves(job: Job, command: Command) -> str | None:
    """An mpirun command, and a Python program in the launcher of an MPI job."""
    if typed_mpirun.is_mpirun(command.argv[0]):
        return "the command is mpirun"
    return f"contract {job.contract} uses mpirun" if command.is_worker and job.engine == "mpirun" else None


def plan(request: Request, reason: str) -> Plan:
    """One agent, which knows the job's hosts and the command.

    Raises:
        UsageError: the command does not parse, or nothing can be counted that slots are asked for by.
    """
    if request.replace_launcher:
        raise UsageError("--exec replaces the launcher, which mpirun needs; drop --exec, or add --engine plain")
    command = _command(request)
    spec, why = mpi_spec.of(request, typed_mpirun.parse(command).names)
    return mpi_spec.plan(request, NAME, "mpirun", command, spec, (reason, why))


def _command(request: Request) -> tuple[str, ...]:
    """What was typed; a Python program without an mpirun gets one."""
    command = request.command
    if typed_mpirun.is_mpirun(command.argv[0]):
        return command.argv
    if command.kind in (Kind.SCRIPT, Kind.MODULE) and not command.python:
        module = ("-m",) if command.kind is Kind.MODULE else ()
        return ("mpirun", request.python, *module, *command.program)
    return ("mpirun", *command.argv)
