"""torch elastic, for any program: our agent around torch's own `elastic_launch`, or torchrun itself with --exec."""

from __future__ import annotations

from trainer_launch import launchers, run_folder, signals, torchrun_options
from trainer_launch.command import Command, Kind
from trainer_launch.engines import agents, bypass, child_env, meeting, torch_job, warm
from trainer_launch.engines.request import Request
from trainer_launch.model import Job, Plan, Process

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
    torch_job.check_membership(request)
    torch_job.check_stdin(request)
    options, program = _options(request), torch_job.program(request)
    # After "--" torch takes nothing of the program for an option of its own, such as --n=3 for --nnodes.
    words = (*torchrun_options.render(options), *torch_job.unknown(request), "--", *program)
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
        label=torch_job.node(request) if request.prefix else None,
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


def _options(request: Request) -> dict[str, str]:
    """All options; torch's logs go where they are removed at the end."""
    options = torch_job.options(request)
    if not request.replace_launcher and options.keys().isdisjoint(("log_dir", "redirects", "tee")):
        # torch makes a folder for logs that nobody asked for, and leaves it behind; ours is removed at the end.
        options["log_dir"] = run_folder.errors_in(request.scratch)
    return options


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
    return tuple(f"{torch_job.node(request)}:{first + local}" for local in range(size))
