"""horovodrun over the job's hosts: one agent that waits for them, runs horovodrun, and starts it again.

An elastic job's hosts come and go under Horovod's own eyes, by a script of ours that tells whom we reach.
"""

from __future__ import annotations

from dataclasses import replace

from trainer_launch import run_folder
from trainer_launch.engines import child_env, mpi_spec
from trainer_launch.engines.request import Request
from trainer_launch.errors import UsageError
from trainer_launch.horovodrun_options import HorovodCommand, split_command
from trainer_launch.model import Plan, Process
from trainer_launch.mpi.spec import VARIABLE, Spec

NAME = "horovodrun"
# Not -m: it would look for our modules, and for Python's own, in the user's working directory first.
AGENT = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from trainer_launch.child.start import horovod_agent; horovod_agent()"
)


def plan(request: Request, reason: str) -> Plan:
    """One agent, which knows the job's hosts and the command.

    Raises:
        UsageError: the command does not parse.
    """
    if request.replace_launcher:
        raise UsageError("--exec replaces the launcher, and horovodrun needs it: set --engine plain")
    argv = request.command.argv
    command = split_command(argv[1:])
    if not command.has("num_proc") and not command.only_asks:
        raise UsageError("horovodrun needs the number of processes; write: horovodrun -np 4 python train.py")
    for name in ("num_proc", "min_num_proc", "max_num_proc", "slots"):
        command.number(name)
    failure_file = f"{request.scratch}/{run_folder.FAILURE}"
    spec, why = mpi_spec.of(request, frozenset(), failure_file)
    env = child_env.plain(request)
    env[VARIABLE] = _typed_over(spec, command).dumped()
    env[run_folder.VARIABLE] = request.scratch
    agent = Process(
        name="horovodrun",
        argv=(request.python, "-c", AGENT, *argv),
        env=env,
        label="launcher" if request.prefix else None,
    )
    kind = (
        "elastic: Horovod adds and drops hosts itself"
        if command.is_elastic
        else "static: a lost host is waited for"
    )
    return Plan(
        engine=NAME,
        processes=(agent,),
        grace_s=request.grace_s,
        stop_order=request.stop_order,
        signals=request.signals,
        restarts=mpi_spec.AGENT_RESTARTS,
        failure_file=failure_file,
        reasons=(reason, why, kind),
    )


def _typed_over(spec: Spec, command: HorovodCommand) -> Spec:
    """What was typed goes before what the platform says; the agent reads the list of -H itself."""
    hostfile, script, slots = (
        command.value("hostfile"),
        command.value("host_discovery_script"),
        command.number("slots"),
    )
    if hostfile is not None:
        spec = replace(spec, hostfile=hostfile, is_hydra_file=False)
    if script is not None:
        spec = replace(spec, discovery=script)
    if slots is not None:
        spec = replace(spec, slots=slots, slots_are_given=True)
    return replace(spec, min_hosts=1) if command.is_elastic else spec
