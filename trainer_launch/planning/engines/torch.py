"""torch workers as children of PID 1: the worker group, for a Python program or any other."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Plan, Workers, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import torchrun_options
from trainer_launch.planning.command import Command, Kind, launcher_in
from trainer_launch.planning.engines import child_env, meeting, torch_options
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.topology import workers_asked_for

NAME = "torch"
_CONTRACTS = "torchrun"  # how contracts call the engine that they are made for
_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE", "2000"  # how many collectives torch keeps; without it none


def serves(job: Job, command: Command) -> str | None:
    """A torchrun command, and a Python program of a job that is torch's or has no engine of its own."""
    if command.kind is Kind.TORCHRUN:
        return "the command is torchrun"
    if not command.is_worker:
        return None
    if job.engine == _CONTRACTS:
        return f"contract {job.contract} uses torch"
    says_how_many = job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
    return "the number of nodes or workers is given" if job.engine is None and says_how_many else None


def serves_any_program(job: Job, command: Command) -> str | None:
    """Why it starts workers of a program that no engine knows: the user said how many."""
    if workers_asked_for(job) is None or command.kind is not Kind.PROGRAM:
        return None
    is_free = job.engine in (None, _CONTRACTS) and launcher_in(command.argv) is None
    return "the number of workers is given" if is_free else None


def plan(request: Request, reason: str) -> Plan:
    """The workers, and how this node becomes a member of the job.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form.
    """
    torch_options.check_membership(request)
    torch_options.check_stdin(request)
    options = torch_options.asked(request) | torch_options.form_of_program(request)
    torch_options.check(request, options)
    workers, why = _workers(request, options)
    bound, told = request.bindings
    actions = torch_options.signals_of(options, request.signals)
    signal_policy.stop_signal(actions)  # one has to be left that stops the job
    return Plan(
        engine=NAME,
        processes=(),
        workers=workers,
        membership=meeting.membership(request, _address(request, options)),
        grace_s=request.grace_s,
        signals=actions,
        wait_for=meeting.wait_for(request),
        wait_s=request.settings.wait_timeout,
        hosting=meeting.hosting(request),
        meeting=meeting.meeting(request),
        reasons=(reason, why, *([told] if bound else [])),
        warnings=(told,) if told and not bound else (),
    )


def _workers(request: Request, options: Mapping[str, str]) -> tuple[Workers, str]:
    program = torch_options.program(request)
    forks, why = _way_to_start(request, options, program)
    env = child_env.workers(request)
    env |= {runtime_directory.VARIABLE: request.scratch, **torch_options.constants(options)}
    if forks and request.settings.hang_report_after != "off":
        env.setdefault(*_FLIGHT_RECORDER)
    workers = Workers(
        count=request.topology.local_world_size or 1,
        argv=_argv(request, options, program),
        env=env,
        role=options.get("role", "default"),
        forks=forks,
        must_fork=request.settings.start_method == "forkserver",
        records=forks and request.settings.hang_report_after != "off",
        script=None if "module" in options else program[0],
        module=program[0] if "module" in options else None,
        preload=request.preload,
        python=request.python,
        run_dir=request.scratch,
        errors=runtime_directory.errors_in(request.scratch),
        node_label=torch_options.node(request) if request.settings.prefix else None,
        bindings=request.bindings[0],
        virtual_local_rank="virtual_local_rank" in options,
        logs={name: value for name, value in options.items() if name in torchrun_options.NAMES},
    )
    return workers, why


def _way_to_start(request: Request, options: Mapping[str, str], program: tuple[str, ...]) -> tuple[bool, str]:
    """Whether workers are forked from the fork server, and why or why not.

    Raises:
        UsageError: it is asked for, but cannot be.
    """
    method = request.settings.start_method
    reason = "--start-method is exec" if method == "exec" else _obstacle(request, options, program)
    if reason is None:
        return True, "the fork server, which has imported torch, forks the workers"
    if method == "forkserver":
        raise UsageError(f"--start-method is forkserver, but {reason}; set it to auto")
    return False, f"workers start without the fork server: {reason}"


def _obstacle(request: Request, options: Mapping[str, str], program: tuple[str, ...]) -> str | None:
    """Why the program cannot run in a process that is forked from a server."""
    if "no_python" in options:
        return "the program is not a script or module of the launcher's own Python"
    if request.env.get("PYTHON_EXEC", request.python) != request.python:
        return "PYTHON_EXEC names another Python"
    if "module" not in options and not program[0].endswith(".py"):
        return f"{program[0]!r} is not a .py file"
    if any("$" in word for word in program[1:]):
        return "an argument contains $, which torchrun replaces for each worker"
    return None


def _address(request: Request, options: Mapping[str, str]) -> str | None:
    """Where the others reach this node; a single node's workers meet on loopback: its name may not resolve."""
    meeting.nodes_of(request)
    is_alone = request.topology.pods == 1
    return options.get("local_addr") or ("127.0.0.1" if is_alone else None)


def _argv(request: Request, options: Mapping[str, str], program: tuple[str, ...]) -> tuple[str, ...]:
    """The command of each worker, as torchrun makes it."""
    if "no_python" in options:
        return program
    python = request.env.get("PYTHON_EXEC", request.python)
    return (python, "-u", *(("-m",) if "module" in options else ()), *program)
