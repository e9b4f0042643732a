"""horovodrun over the job's hosts: one agent that waits for them, runs horovodrun, and starts it again.

An elastic job's hosts come and go under Horovod's own eyes, by a script of ours that tells whom we reach.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import Command
from trainer_launch.planning.engines import mpi_spec
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.horovodrun_options import HorovodCommand, is_horovodrun, split_command
from trainer_launch.planning.mpi_launch_spec import Spec

NAME = "horovodrun"
_MAX_PORT = 65535


def serves(_job: Job, command: Command) -> str | None:
    """A horovodrun command."""
    return "the command is horovodrun" if is_horovodrun(command.argv) else None


def plan(request: Request, reason: str) -> Plan:
    """One agent, which knows the job's hosts and the command.

    Raises:
        UsageError: the command does not parse.
    """
    if request.replace_launcher:
        raise UsageError("--exec replaces the launcher, which horovodrun needs; drop --exec, or add --engine plain")
    argv = request.command.argv
    command = split_command(argv[1:])
    if not command.has("num_proc") and not command.only_asks:
        raise UsageError("horovodrun needs the number of processes; write: horovodrun -np 4 python train.py")
    for name in ("num_proc", "min_num_proc", "max_num_proc", "slots", "ssh_port"):
        command.number(name)
    if (command.number("ssh_port") or 0) > _MAX_PORT:
        raise UsageError(f"horovodrun's --ssh-port is {command.number('ssh_port')}; expected 1 to {_MAX_PORT}")
    spec, why = mpi_spec.of(request, frozenset())
    kind = (
        "elastic: Horovod adds and removes hosts itself"
        if command.is_elastic
        else "static: the launcher waits for a lost host"
    )
    return mpi_spec.plan(request, NAME, NAME, argv, _typed_over(spec, command), (reason, why, kind))


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
