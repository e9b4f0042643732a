"""torch elastic, for any program: our agent around torch's own `elastic_launch`, or torchrun itself with --exec."""

from __future__ import annotations

from trainer_launch import launchers, run_folder, signals, torchrun_options
from trainer_launch.command import Command, Kind
from trainer_launch.engines import agents, bypass, child_env, meeting, warm
from trainer_launch.engines.request import Request
from trainer_launch.errors import ContractError, UsageError
from trainer_launch.model import Job, Plan, Process
from trainer_launch.overlay import JOB_OPTIONS

NAME = "torchrun"
AGENT = agents.code("torch_agent")


def serves(job: Job, command: Command) -> str | None:
    """A torchrun command, and a Python program of a job that is torch's or has no engine of its own."""
    if command.kind is Kind.TORCHRUN:
        return "the command is torchrun"
    if not command.is_worker:
        return None
    if job.engine == NAME:
        return f"contract {job.contract} uses torch"
    says_how_many = job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
    return "the number of nodes or workers is given" if job.engine is None and says_how_many else None


def serves_any_program(job: Job, command: Command) -> str | None:
    """Why it starts workers of a program that no engine knows: the user said how many."""
    if bypass.workers_asked_for(job) is None or command.kind is not Kind.PROGRAM:
        return None
    is_free = job.engine in (None, NAME) and launchers.find(command.argv) is None
    return "the number of workers is given" if is_free else None


def plan(request: Request, reason: str) -> Plan:
    """One agent with every option spelled out; it starts the workers.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form.
    """
    _check_membership(request)
    _check_stdin(request)
    options, program = _options(request), _program(request)
    # After "--" torch takes nothing of the program for an option of its own, such as --n=3 for --nnodes.
    words = (*torchrun_options.render(options), *_unknown(request), "--", *program)
    fork_server, why = warm.settings(request, options, program[0])
    # Not buffered: workers are, by torch's own doing, and their fork-server may be forked from the agent.
    start = ("-m", "torch.distributed.run") if request.replace_launcher else ("-u", "-c", AGENT)
    failure_file = f"{request.scratch}/{run_folder.FAILURE}"
    env = child_env.agent(request)
    if not request.replace_launcher:
        env["TRAINER_LAUNCH_FAILURE_FILE"] = failure_file
        env[run_folder.VARIABLE] = request.scratch
        if fork_server is not None:
            env["TRAINER_LAUNCH_WARM"] = fork_server
        env["TRAINER_LAUNCH_STOP_ORDER_OF_WORKERS"] = request.stop_order.value
        if request.secret_file is not None:
            env["TRAINER_LAUNCH_SECRET_FILE"] = request.secret_file
        env["TRAINER_LAUNCH_SIGNALS_OF_WORKERS"] = signals.render(request.signals)
    agent = Process(
        name="agent",
        argv=(request.python, *start, *words),
        env=env,
        label=_node(request) if request.prefix else None,
        rank_labels=_rank_labels(request),
    )
    return Plan(
        engine=NAME,
        processes=(agent,),
        grace_s=request.grace_s,
        stop_order=request.stop_order,
        stop_signal=signals.stop_signal(request.signals),
        signals=request.signals,
        wait_for=meeting.wait_for(request),
        wait_s=request.wait_s,
        restarts=agents.RESTARTS,
        hosting=meeting.hosting(request),
        meeting=meeting.meeting(request),
        failure_file=failure_file,
        reasons=(reason, why),
    )


def _check_membership(request: Request) -> None:
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


def _check_stdin(request: Request) -> None:
    workers = request.topology.local_world_size
    if request.command.reads_stdin and workers != 1:
        raise UsageError(
            f"{workers or 'several'} workers cannot read one program from standard input; "
            f"save it as a file, and run: trainer-launch run -- FILE.py"
        )


def _options(request: Request) -> dict[str, str]:
    """All options: PET_*, then the typed ones, then what the topology says about the job itself."""
    typed = request.command.torchrun.options if request.command.torchrun else {}
    for name, value in typed.items():
        option = torchrun_options.OPTIONS[name]
        torchrun_options.check_value(option, value, option.flag)
    options = {**torchrun_options.from_variables(request.env), **typed}
    kept = {name: value for name, value in options.items() if name not in JOB_OPTIONS}
    kept.update(_form_of_program(request))
    kept["nproc_per_node"] = _workers(request)
    if request.topology.max_restarts is not None:
        kept["max_restarts"] = str(request.topology.max_restarts)
    nodes = meeting.nodes_of(request)
    kept.update(meeting.options(request, nodes))
    if "local_addr" not in kept and nodes.max == 1:
        # A single node's workers meet on loopback: a pod's own name often does not resolve.
        kept["local_addr"] = "127.0.0.1"
    if not request.replace_launcher and kept.keys().isdisjoint(("log_dir", "redirects", "tee")):
        # torch makes a folder for logs that nobody asked for, and leaves it behind; ours is removed at the end.
        kept["log_dir"] = run_folder.errors_in(request.scratch)
    return kept


def _workers(request: Request) -> str:
    """How many workers; xpu stays a word, which torch alone can count."""
    size, asked = request.topology.local_world_size, request.job.nproc_per_node
    if size is not None or asked == "xpu":
        return str(size or asked)
    raise UsageError(
        f"invalid value '{asked}' for the number of workers per node: this container has no such device "
        f"({request.host.gpus.reason}); request devices in the pod's resources, or set --nproc-per-node to a number"
    )


def _form_of_program(request: Request) -> dict[str, str]:
    """Whether torch starts a script, a module, or a program without Python; a torchrun command said it itself."""
    command = request.command
    if command.kind is Kind.TORCHRUN:
        return {}
    if command.kind is Kind.PROGRAM or (command.python and not _is_plain_python(request)):
        return {"no_python": "1"}
    return {"module": "1"} if command.kind is Kind.MODULE else {}


def _is_plain_python(request: Request) -> bool:
    """Whether `python` was typed without flags and means the interpreter that the agent runs in."""
    return len(request.command.python) == 1 and request.python_is_ours


def _program(request: Request) -> tuple[str, ...]:
    command = request.command
    if command.torchrun is not None:
        return command.torchrun.program
    return command.argv if "no_python" in _form_of_program(request) else command.program


def _unknown(request: Request) -> tuple[str, ...]:
    return request.command.torchrun.unknown if request.command.torchrun else ()


def _rank_labels(request: Request) -> tuple[str | None, ...]:
    """`node:rank` for each worker; the rank is the job's where it is known before the nodes have met."""
    topology = request.topology
    size = topology.local_world_size
    if size is None or request.replace_launcher:
        return ()
    if not request.prefix:
        return (None,) * size
    is_fixed = topology.nodes is not None and topology.nodes.fixed is not None
    first = topology.node_rank * size if topology.node_rank is not None and is_fixed else 0
    return tuple(f"{_node(request)}:{first + local}" for local in range(size))


def _node(request: Request) -> str:
    rank = request.topology.node_rank
    return "?" if rank is None else str(rank)
