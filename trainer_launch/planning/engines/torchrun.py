"""The image's own torchrun, unmodified: PID 1 supervises it; its nodes meet at our coordinator through the plug-in.

PID 1 hosts the coordinator on node 0; torchrun joins it as a member (`pytorch/torchrun_rendezvous.py`). How a
worker ended is read from the error file that torchrun writes: torchrun itself ends with 1.
"""

from __future__ import annotations

import math

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Plan, Process, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction
from trainer_launch.planning import torchrun_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.engines import child_env, meeting, torch_options
from trainer_launch.planning.engines.request import Request

NAME = "torchrun"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def serves(job: Job, command: Command) -> str | None:
    """Never by itself: `--engine` or the torch engine picks it."""


def plan(request: Request, reason: str) -> Plan:
    """One torchrun with every option spelled out.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form, or it cannot do what --signals asks for.
    """
    torch_options.check_membership(request)
    torch_options.check_stdin(request)
    _check_signals(request)
    options = _options(request)
    actions = torch_options.signals_of(options, request.signals)
    # After "--" torch takes nothing of the program for an option of its own, such as --n=3 for --nnodes.
    words = (
        *torchrun_options.render(options),
        *torch_options.unknown_options(request),
        "--",
        *torch_options.program(request),
    )
    torchrun = Process(
        name="torchrun",
        argv=(request.python, "-m", "torch.distributed.run", *words),
        env=child_env.agent(request) if request.replace_launcher else _environment(request),
        label=torch_options.node(request) if request.settings.prefix else None,
    )
    return Plan(
        engine=NAME,
        processes=(torchrun,),
        grace_s=request.grace_s,
        stop_signal=signal_policy.stop_signal(actions),
        signals=actions,
        wait_for=meeting.wait_for(request),
        wait_s=request.settings.wait_timeout,
        restarts=child_env.AGENT_RESTARTS,
        hosting=meeting.hosting(request),
        meeting=meeting.meeting(request),
        failure_file=_error_file(request),
        reasons=(reason,),
    )


def _check_signals(request: Request) -> None:
    """Refuse what torchrun cannot do: every signal that it handles stops the workers."""
    for number, action in request.signals.items():
        wanted = SignalAction.TERMINATE if number in STOP_SIGNALS else SignalAction.FORWARD
        if action not in (wanted, SignalAction.CHECKPOINT) or (number in STOP_SIGNALS and action is not wanted):
            word = f"{signal_policy.name_of(number)}={action.value}"
            raise UsageError(
                f"--signals {word} is not possible with torchrun, which cannot {action.value} on this signal; "
                f"remove it, or set --engine torch"
            )


def _options(request: Request) -> dict[str, str]:
    options = torch_options.all_options(request)
    if not request.replace_launcher and options.keys().isdisjoint(("log_dir", "redirects", "tee")):
        # torchrun leaves its folder of logs behind; the runtime directory is removed at the end.
        options["log_dir"] = runtime_directory.errors_in(request.scratch)
    return options


def _environment(request: Request) -> dict[str, str]:
    env = child_env.agent(request)
    env[runtime_directory.VARIABLE] = request.scratch
    env[_ERROR_FILE] = _error_file(request)
    # torch kills workers that need longer, and does not know the grace.
    if not env.get(_SHUTDOWN_TIMEOUT):
        env[_SHUTDOWN_TIMEOUT] = str(math.ceil(request.grace_s))
    return env


def _error_file(request: Request) -> str:
    """Where a platform wants it, if nothing older is there: our plug-in clears it, torch does not."""
    ours = f"{request.scratch}/{runtime_directory.FAILURE}"
    return ours if meeting.meeting(request) is None else request.env.get(_ERROR_FILE) or ours
