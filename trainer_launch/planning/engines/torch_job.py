"""What a torch job's command and topology say to the engines that run it; and what no engine of torch accepts."""

from __future__ import annotations

from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.planning import torchrun_options
from trainer_launch.planning.command import Kind
from trainer_launch.planning.engines import meeting
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import JOB_OPTIONS


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


def check_stdin(request: Request) -> None:
    """Refuse several workers of a program that is read from standard input."""
    workers = request.topology.local_world_size
    if request.command.reads_stdin and workers != 1:
        raise UsageError(
            f"{workers or 'several'} workers cannot read one program from standard input; "
            f"save it as a file, and run: trainer-launch run -- FILE.py"
        )


def options(request: Request) -> dict[str, str]:
    """All options of torchrun: PET_*, then the typed ones, then what the topology says about the job itself.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form.
    """
    typed = request.command.torchrun.options if request.command.torchrun else {}
    for name, value in typed.items():
        option = torchrun_options.OPTIONS[name]
        torchrun_options.check_value(option, value, option.flag)
    given = {**torchrun_options.from_variables(request.env), **typed}
    kept = {name: value for name, value in given.items() if name not in JOB_OPTIONS}
    kept.update(form_of_program(request))
    kept["nproc_per_node"] = workers(request)
    if request.topology.max_restarts is not None:
        kept["max_restarts"] = str(request.topology.max_restarts)
    nodes = meeting.nodes_of(request)
    kept.update(meeting.options(request, nodes))
    if "local_addr" not in kept and nodes.max == 1:
        # A single node's workers meet on loopback: a pod's own name often does not resolve.
        kept["local_addr"] = "127.0.0.1"
    return kept


def workers(request: Request) -> str:
    """How many workers; xpu stays a word, which torch alone can count."""
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


def unknown(request: Request) -> tuple[str, ...]:
    """Options of a torchrun that is newer than our list."""
    return request.command.torchrun.unknown if request.command.torchrun else ()


def node(request: Request) -> str:
    """This node in the prefix of a line."""
    rank = request.topology.node_rank
    return "?" if rank is None else str(rank)
