"""Engines turn a topology and a command into a plan; this file asks each whether it is the one.

A new engine is a file, a line in ENGINES, and its name in `settings.py` for `--engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

from msgspec.structs import replace

from trainer_launch.contracts.source import Pod
from trainer_launch.model import Job, Plan, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import PREFIX, Settings
from trainer_launch.planning.command import Command, parse_command
from trainer_launch.planning.engines import horovodrun, mpirun, plain, sshd, torch, torch_options, torchrun
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.reading import Reading, grace, ports_of, secret_file_of
from trainer_launch.planning.ssh_environment import named
from trainer_launch.planning.topology import place


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
    engine, reason = pick(request.job, request.command, request.settings.engine)
    if engine in (mpirun, horovodrun) and request.replace_launcher and request.settings.engine == "auto":
        engine, reason = plain, "with --exec the command runs as it is"
    torch_options.check_spares(request, runs_workers=engine in (torch, torchrun))
    if engine is torch:
        why = torch_options.handed_over(request, torch_options.asked(request))
        if why is not None and request.settings.start_method == "forkserver":
            raise UsageError(f"--start-method is forkserver, but {why}; set it to auto")
        engine, reason = (torch, reason) if why is None else (torchrun, f"{reason}; torchrun runs it: {why}")
    if engine is not torch:
        torch_options.check_placement(request, reason)
    made = engine.plan(request, reason)
    odd = torch_options.warnings(request) if engine in (torch, torchrun) else ()
    return replace(made, warnings=(*made.warnings, *odd))


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


# -- from what was read to a plan ---------------------------------------------------------------


_MAX_LABEL = 253
_PATIENCE_S = 30.0  # for a lost node, where --min-nodes lets a fixed job go on without it


def request_of(
    reading: Reading,
    settings: Settings,
    *,
    shm_is_short: bool,
    copies_are_refused: bool,
    replace_launcher: bool = False,
    scratch: str,
) -> Request:
    """Everything an engine needs for its plan; what had to be done or tried on this machine first is a value.

    Raises:
        LaunchError: missing command, or this node has no place in the job.
    """
    request = Request(
        job=reading.job,
        host=reading.host,
        topology=place(reading.job, reading.host),
        command=(command := _command(reading)),
        env=_with_log_level(reading.pod.env, settings),
        python=sys.executable,
        python_is_ours=reading.python_is_ours,
        settings=settings,
        grace_s=grace(settings, command, reading.pod)[0],
        signals=signal_policy.parse(settings.signals or ""),
        our_rendezvous=settings.engine != "torchrun" and not replace_launcher,
        loopback_port=reading.loopback_port,
        shrink_after_s=_patience(settings),
        forward_env=tuple(sorted(named(settings.forward_env))),
        port_range=ports_of(settings),
        secret_file=secret_file_of(reading.job),
        preload=_names(settings.preload),
        scratch=scratch,
        shm_is_short=shm_is_short,
        copies_are_refused=copies_are_refused,
        replace_launcher=replace_launcher,
    )
    return _of_workers(request, reading, settings)


def _of_workers(request: Request, reading: Reading, settings: Settings) -> Request:
    """The same with the CPUs that torch's workers run on, and where this node is."""
    if settings.topology_label is not None:
        request = replace(request, label=_label(settings.topology_label, reading.pod))
    mode = torch_options.numa_binding(request)
    if mode == "off":
        return request
    from trainer_launch.host import numa  # only who binds workers needs it

    machine = numa.read(request.env, request.host.gpus)
    bindings = numa.bindings(machine, mode, request.topology.local_world_size or 1)
    return replace(request, numa_binding=mode, bindings=bindings)


def _label(source: str, pod: Pod) -> str:
    """This node's topology label, from a file or a variable; "" where there is none.

    Raises:
        UsageError: it is no label.
    """
    is_file = source.startswith("/")
    told = (pod.files.read(source) or b"").decode(errors="replace") if is_file else pod.env.get(source, "")
    label = told.strip().strip("/")
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


def _with_log_level(env: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """The agents of torch and MPI read their level there."""
    given = "log_level" in settings.model_fields_set
    return {**env, f"{PREFIX}LOG_LEVEL": settings.log_level} if given else env


def _patience(settings: Settings) -> float:
    """A platform that allows fewer nodes means it; who lowers a fixed number still wants the lost node back."""
    if settings.shrink_after is not None:
        return settings.shrink_after
    return 0.0 if settings.min_nodes is None else _PATIENCE_S


def _names(words: str | None) -> tuple[str, ...]:
    """A list of modules.

    Raises:
        UsageError: one of them is no module's name.
    """
    names = tuple(name.strip() for name in (words or "").split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"invalid value {name!r} for --preload: expected Python modules, such as numpy,my_package.data"
            )
    return names
