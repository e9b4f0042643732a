"""What torchrun's options mean for the worker group, and which of them only torchrun itself can carry out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer_launch.model import signal_policy
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction
from trainer_launch.model.units import counted
from trainer_launch.planning import torchrun_options
from trainer_launch.planning.command import Kind
from trainer_launch.planning.engines import meeting
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import JOB_OPTIONS
from trainer_launch.planning.torchrun_options import DEVICES, visible_devices

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun's own
# Variables by which the user asks torch's agent for something that no launcher without torch has, and why.
_AGENTS = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": "torchrun serves the timers of torch.distributed.elastic.timer",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "torchrun watches for workers in uninterruptible sleep",
}
_NULL = ("", "null")


def asked(request: Request) -> dict[str, str]:
    """torchrun's options by name as the user wrote them: PET_* variables, then what the command says.

    Raises:
        UsageError: a value is out of its form.
    """
    typed = request.command.torchrun.options if request.command.torchrun else {}
    for name, value in typed.items():
        option = torchrun_options.OPTIONS[name]
        torchrun_options.check_value(option, value, option.flag)
    return {**torchrun_options.from_variables(request.env), **typed}


def numa_binding(request: Request) -> str:
    """How torch's workers are bound: torchrun's own option, or its variable; off otherwise.

    Raises:
        UsageError: a value is out of its form.
    """
    return asked(request).get("numa_binding", "off")


def handed_over(request: Request, options: Mapping[str, str]) -> str | None:
    """Why the image's own torchrun has to start the workers; None: the worker group can do all that is asked."""
    if request.replace_launcher:
        return "with --exec, torchrun replaces the launcher"
    unknown = request.command.torchrun.unknown if request.command.torchrun else ()
    if unknown:
        return f"{unknown[0].partition('=')[0]} is an option of a newer torchrun"
    by_option = _by_option(options)
    if by_option is not None:
        return by_option
    for name, why in _AGENTS.items():
        if request.env.get(name, "0").strip() not in ("", "0"):
            return f"{name} is set: {why}"
    if request.topology.local_world_size is None:
        return f"only torch can count {request.job.nproc_per_node} devices"
    return _by_meeting(request)


def check(request: Request, options: Mapping[str, str]) -> None:
    """See that the options' values mean something on this node.

    Raises:
        UsageError: one does not.
    """
    torchrun_options.check(options)
    _check_devices(request, options)
    signals_of(options, {})


def signals_of(options: Mapping[str, str], given: Mapping[int, SignalAction]) -> dict[int, SignalAction]:
    """The signals' actions with --signals-to-handle; what the launcher's own --signals says takes precedence.

    torchrun ends the job at each of these signals: workers get the signal itself.

    Raises:
        UsageError: a name is not a signal's, or nobody can handle that signal.
    """
    named = signal_policy.numbers(options.get("signals_to_handle") or DEFAULT_SIGNALS, "--signals-to-handle")
    extra = {number: SignalAction.DRAIN for number in named if number not in STOP_SIGNALS}
    return {**extra, **given}


def constants(options: Mapping[str, str]) -> dict[str, str]:
    """What torchrun sets for all workers once, beside OMP_NUM_THREADS."""
    return {"TORCHELASTIC_SIGNALS_TO_HANDLE": options.get("signals_to_handle") or DEFAULT_SIGNALS}


def _by_option(options: Mapping[str, str]) -> str | None:
    if "logs_specs" in options:
        return "--logs-specs loads a class into torchrun"
    if options.get("event_log_handler", "") not in _NULL:
        return f"--event-log-handler {options['event_log_handler']} records events of torchrun's agent"
    if "run_path" in options:
        return "with --run-path torchrun itself runs the script in processes that it forks or spawns"
    return None


def _by_meeting(request: Request) -> str | None:
    if meeting.is_ours(request):
        return None
    backend = request.topology.rendezvous.backend if request.topology.rendezvous is not None else None
    return f"the nodes meet by torch's rendezvous ({backend or 'static'})"


def _check_devices(request: Request, options: Mapping[str, str]) -> None:
    visible, workers = visible_devices(request.env), request.topology.local_world_size
    if "virtual_local_rank" in options and visible is not None and workers is not None and workers > len(visible):
        raise UsageError(
            f"--virtual-local-rank gives each of the {counted(workers, 'worker')} a device of its own, but "
            f"{DEVICES}={request.env[DEVICES][:60]} names {len(visible)}; "
            f"set --nproc-per-node to at most {len(visible)}, or unset {DEVICES}"
        )


# -- what a command and a topology say to the engines of torch ---------------------------------


def check_membership(request: Request) -> None:
    """Refuse to be a second node 0: outside the trainer's own replicated job PET_NODE_RANK counts other pods."""
    if request.job.details.get("foreign_replicated_job"):
        raise ContractError(
            f"this pod, {request.host.hostname}, belongs to another replicated job than the trainer's nodes, so "
            f"PET_NODE_RANK is not its rank in the job (contract {request.job.contract}); start workers in the "
            f"trainer's pods only, or set --engine plain"
        )
    nodes = request.topology.nodes
    if "rank_behind_workers" in request.job.details and request.topology.node_rank is None and nodes is not None:
        raise ContractError(
            f"this pod is the Master of a job with at most {nodes.max} nodes, and the Workers take them all "
            f"(contract {request.job.contract}); raise elasticPolicy.maxReplicas by one, remove the Master, "
            f"or set --nodes {nodes.min}:{nodes.max + 1} in all pods"
        )


def check_spares(request: Request, *, runs_workers: bool) -> None:
    """Refuse spares where nobody could let them take over.

    Raises:
        LaunchError: this job's nodes do not meet at our coordinator.
    """
    topology = request.topology
    if not topology.spares or (runs_workers and meeting.is_ours(request)):
        return
    if any(fact.name == "--spares" for fact in request.job.facts):
        raise UsageError("--spares needs torch workers that meet at the launcher's coordinator; remove it")
    if topology.nodes is not None and (topology.node_rank or 0) >= topology.nodes.max:
        raise ContractError(
            f"this node's rank is {topology.node_rank} but the job has {counted(topology.nodes.max, 'node')}, and "
            f"only torch workers that meet at the launcher's coordinator have spares"
        )


def check_placement(request: Request, reason: str) -> None:
    """Refuse to order the ranks of workers that others start, for this reason.

    Raises:
        UsageError: --topology-label asks for what this engine cannot do.
    """
    if request.label is not None:
        raise UsageError(
            f"--topology-label needs torch workers that the launcher itself starts ({reason}); remove it"
        )


def warnings(request: Request) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    gpus, is_alone = request.host.gpus, request.topology.local_world_size == 1
    if gpus.count > 1 and is_alone and request.job.nproc_per_node is None:
        yield (
            f"1 worker starts in a pod with {gpus.count} accelerators ({gpus.reason}), and torch uses 1 of them; "
            f"add --nproc-per-node auto for a worker on each, or --nproc-per-node 1 if one is enough"
        )
    if request.label == "" and request.topology.pods != 1:
        yield (
            "this node has no topology label, so its ranks come last; "
            "put one into the file or variable that --topology-label names"
        )


def check_stdin(request: Request) -> None:
    """Refuse several workers of a program that is read from standard input."""
    workers = request.topology.local_world_size
    if request.command.reads_stdin and workers != 1:
        raise UsageError(
            f"{workers or 'several'} workers cannot read one program from standard input; "
            f"save it as a file, and run: trainer-launch run -- FILE.py"
        )


def all_options(request: Request) -> dict[str, str]:
    """All options of torchrun: PET_*, then the typed ones, then what the topology says about the job itself.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form.
    """
    kept = {name: value for name, value in asked(request).items() if name not in JOB_OPTIONS}
    kept.update(form_of_program(request))
    kept["nproc_per_node"] = worker_count(request)
    if request.topology.max_restarts is not None:
        kept["max_restarts"] = str(request.topology.max_restarts)
    nodes = meeting.nodes_of(request)
    kept.update(meeting.options(request, nodes))
    if "local_addr" not in kept and request.topology.pods == 1:
        # A single node's workers meet on loopback: a pod's own name often does not resolve.
        kept["local_addr"] = "127.0.0.1"
    return kept


def worker_count(request: Request) -> str:
    """How many workers; xpu stays a word where only torch may see such devices."""
    size, asked = request.topology.local_world_size, request.job.nproc_per_node
    if size is not None or asked == "xpu":
        return str(size or asked)
    raise UsageError(
        f"invalid value '{asked}' for the number of workers per node: this container has no such device "
        f"({request.host.gpus.reason}); request devices in the pod's resources, or set --nproc-per-node to a number"
    )


def form_of_program(request: Request) -> dict[str, str]:
    """Whether torch starts a script, a module, or a program without Python; a torchrun command said it itself."""
    command = request.command
    if command.kind is Kind.TORCHRUN:
        return {}
    if command.kind is Kind.PROGRAM or (command.python and not _is_plain_python(request)):
        return {"no_python": "1"}
    return {"module": "1"} if command.kind is Kind.MODULE else {}


def _is_plain_python(request: Request) -> bool:
    """Whether `python` was typed without flags and means the interpreter that torch runs in."""
    return len(request.command.python) == 1 and request.python_is_ours


def program(request: Request) -> tuple[str, ...]:
    """The script, module or program with its arguments, as torchrun takes it."""
    command = request.command
    if command.torchrun is not None:
        return command.torchrun.program
    return command.argv if "no_python" in form_of_program(request) else command.program


def unknown_options(request: Request) -> tuple[str, ...]:
    """Options of a torchrun that is newer than our list."""
    return request.command.torchrun.unknown if request.command.torchrun else ()


def node(request: Request) -> str:
    """This node in the prefix of a line."""
    rank = request.topology.node_rank
    return "?" if rank is None else str(rank)
