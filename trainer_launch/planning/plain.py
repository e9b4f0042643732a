"""Programs as they are: any program once per node, and front ends such as `accelerate launch`. Pure.

A program is TensorFlow, XGBoost, Paddle, JAX, a script of a shell, anything. A front end runs, by
`pytorch/front_end.py`, until it would start the workers: there it becomes the launcher.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import PurePosixPath

import trainer_launch
from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Origin, Plan, Process
from trainer_launch.model.errors import ContractError, LaunchError, UsageError
from trainer_launch.model.settings import JOB_FLAGS, variable_of
from trainer_launch.model.value_parsers import named
from trainer_launch.planning import torch
from trainer_launch.planning.command import (
    OURS,
    Command,
    CommandKind,
    Launcher,
    is_starter,
    launcher_of,
    runs_single_program,
    through_shims,
)
from trainer_launch.planning.job import typed
from trainer_launch.planning.task import Engine, Task, env_of_program, repaired


def _serves(job: Job, command: Command) -> str | None:
    """Serve every command that no other engine serves."""
    if command.kind is CommandKind.PROGRAM:
        return "the command is not a Python program"
    if command.kind is CommandKind.MODULE and not command.is_worker:
        return f"{command.program[0]} starts the workers itself"
    if job.contract == "unknown":
        return "no platform was found, so the program runs once"
    return f"contract {job.contract} runs the program once per node"


def _plan(task: Task, reason: str) -> Plan:
    """Plan a single process: the command, with `python` before a bare script or module."""
    command = task.command
    argv = task.argv
    env, reasons = {**env_of_program(task), runtime_directory.VARIABLE: task.scratch}, [reason]
    if task.shims is not None:
        argv = through_shims(argv, task.shims)
        env |= {"PATH": f"{task.shims}:{env.get('PATH', '/usr/bin:/bin')}", **_typed(task.job)}
        reasons.append("launchers that it calls, such as torchrun, run under trainer-launch")
    if _is_torchs(task.job) and task.topology.pods != 1:
        if is_starter(command.argv):
            env = {**_nodes_for_starters(task), **env}
        elif any(is_starter((word,)) for word in " ".join((*command.argv, command.shell or "")).split()):
            with contextlib.suppress(LaunchError):  # a script may say itself what is unknown here
                env = {**_nodes_for_starters(task), **env}
    process = Process(
        name="program",
        argv=argv,
        env=env,
        label=task.node if task.settings.prefix else None,
    )
    return Plan(
        engine=PLAIN.name,
        processes=(process,),
        grace_s=task.grace_s,
        signals=task.signals,
        warnings=_warnings(task),
        reasons=tuple(reasons),
    )


def _nodes_for_starters(task: Task) -> dict[str, str]:
    """Variables that LLaMA-Factory, ms-swift and XTuner hand to torchrun; without them each node trains alone.

    Raises:
        ContractError: the rank of this node or the address of node 0 is unknown.
        UsageError: the number of nodes may vary, which they cannot say.
    """
    nodes = torch.nodes_of(task)
    node_rank, coordinator = torch.own_place(task, nodes)
    if nodes.fixed is None or node_rank is None:
        raise UsageError(
            f"{_shown(task.command)} starts torchrun on a fixed number of nodes, each with a rank; this job has "
            f"{nodes} (contract {task.job.contract}); set --nodes and --node-rank, or run torchrun itself"
        )
    host, port = coordinator.host, str(coordinator.port)
    size = task.topology.local_world_size
    workers = {} if size is None or task.job.nproc_per_node is None else {"NPROC_PER_NODE": str(size)}
    where = {"MASTER_ADDR": host, "MASTER_PORT": port, "ADDR": host, "PORT": port}
    return {"FORCE_TORCHRUN": "1", "NNODES": str(nodes.max), "NODE_RANK": str(node_rank), **workers, **where}


def _typed(job: Job) -> dict[str, str]:
    """Options that describe the job, for the launchers in a script."""
    names = {option: variable_of(name) for name, option in JOB_FLAGS.items()}
    facts = (fact for fact in job.facts if fact.origin is Origin.FLAG and fact.field in names)
    return {names[fact.field]: fact.value for fact in facts}


PLAIN = Engine("plain", _serves, _plan)


def _warnings(task: Task) -> tuple[str, ...]:
    """Warnings about a command that the plain engine runs; none where the user asked for that."""
    job, command = task.job, task.command
    launcher = launcher_of(command)
    if task.settings.engine != "auto" or job.role == "rank":
        return ()
    if launcher is not None and launcher.name == OURS:
        return ()
    reaches_shim = is_starter(command.argv) or (launcher is not None and launcher.is_inside and launcher.is_shim)
    if reaches_shim and task.shims:
        return ()  # the shim uses the launcher, or says why not
    asked = typed(job, "nproc_per_node")
    if launcher is not None and _is_covered(job, launcher):
        return (_starts_its_own(task, launcher, asked),)
    if asked is not None and job.engine not in ("mpirun", "sshd"):
        return (_no_effect(job, launcher, asked),)
    if launcher is None and command.kind is CommandKind.PROGRAM and _is_torchs(job):
        return (_runs_as_it_is(task),)
    return ()


def _is_covered(job: Job, launcher: Launcher) -> bool:
    """Whether an engine would have started the workers of this job."""
    if launcher.is_mpi and not launcher.is_inside:
        return False  # a question, such as horovodrun --help: everything else has its engine
    return launcher.is_mpi if job.engine == "mpirun" else job.engine in (None, "torchrun")


def _is_torchs(job: Job) -> bool:
    has_sizes = job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
    return job.engine == "torchrun" or (job.engine is None and has_sizes)


def _starts_its_own(task: Task, launcher: Launcher, asked: str | None) -> str:
    """deepspeed with options of its own, or a torchrun inside a shell.

    Raises:
        ContractError: it would train on this node alone.
    """
    name, nodes = launcher.name, task.topology.nodes
    sentences = [f"{name} starts the workers itself, so trainer-launch cannot restart a failed worker in place."]
    if nodes is not None and nodes.max > 1 and not launcher.nodes_meet:
        if not (launcher.is_inside or _names_nodes(task, launcher)):
            raise ContractError(
                f"{name} would train on each of the {nodes} nodes alone (contract {task.job.contract}); "
                f"{_INSTEAD}, name the other nodes in {name}'s own options, or set --nodes 1 "
                f"(TRAINER_LAUNCH_NODES) to train on this node alone"
            )
        sentences.append(f"Each of the {nodes} nodes trains alone unless {name}'s own options name the others.")
    if asked is not None:
        sentences.append(f"--nproc-per-node {asked} has no effect.")
    if launcher.is_torchrun or launcher.is_mpi:
        sentences.append(f"Put `trainer-launch run --` directly in front of {name}.")
    else:
        sentences.append(f"Instead, {_INSTEAD}.")
    return " ".join(sentences)


def _names_nodes(task: Task, launcher: Launcher) -> bool:
    """Whether the launcher may know the other nodes: by options, variables of its own, or deepspeed's hostfile."""
    names_them = any(_OF_NODES.match(word.replace("-", "_")) for word in launcher.words)
    return names_them or task.command.is_deepspeed or any(name in task.env for name in ("NODE_RANK", "WORLD_SIZE"))


def _no_effect(job: Job, launcher: Launcher | None, asked: str) -> str:
    advice = " To start torch workers, add --engine torch." if launcher is None else ""
    return (
        f"--nproc-per-node {asked} has no effect: contract {job.contract} runs the program once per node.{advice}"
    )


def _runs_as_it_is(task: Task) -> str:
    """A shell, a script of one, or any program, in a pod whose platform sets a number of workers."""
    name, workers = _shown(task.command), task.topology.local_world_size or "N"
    lost = f"{name} runs once on this node: trainer-launch sets no RANK and restarts no failed worker in place."
    if runs_single_program(task.command.argv):
        return f"{lost} To start its workers, add --nproc-per-node {workers}."
    return (
        f"{lost} If {name} starts the training, put `trainer-launch run --` in front of the training command in "
        f"it. If it is the worker itself, add --nproc-per-node {workers}."
    )


def _shown(command: Command) -> str:
    """A program as messages call it, with `-c` or `-` where that is what it is about."""
    first, *rest = command.argv
    return named(" ".join((first, *(word for word in rest[:1] if word.startswith("-") and len(word) < 8))))


_INSTEAD = "start the training script itself: trainer-launch run --nproc-per-node N -- SCRIPT.py"
# Options of launchers that speak of other nodes.
_OF_NODES = re.compile(
    r"__?(n?nodes|num_(nodes|machines)|host(file|s)?|world_size|(node|machine)_rank|ma(ster|in)_addr\w*|"
    r"include|exclude|rdzv\w*|H|help|version)\b"
)
_PROGRAM = str(PurePosixPath(trainer_launch.__file__).parent / "pytorch" / "front_end.py")
# Each one's own option for the number of nodes, by the beginning of its name.
_NODES = {"accelerate": "--num_machines", "trl": "--num_machines", "fabric": "--num-nodes", "tune": "--nnodes"}
_OF_ACCELERATE, _ALL_WORKERS = "--num_machines", "--num_processes"


def _plan_of_front_end(task: Task, reason: str) -> Plan:
    """The front end, which becomes the launcher with the command that it decides on.

    Raises:
        UsageError: the front end would start on each node the workers that were typed for all nodes.
    """
    command, settings = task.command, task.settings
    name, nodes = command.front_end, task.job.nodes
    several = nodes if nodes is not None and nodes.max > 1 else None
    has = f"the job has {nodes} nodes (contract {task.job.contract})"
    option = next((option for start, option in _NODES.items() if start in name), "its number of nodes")
    typed = {word.partition("=")[0].replace("-", "_") for word in command.argv if word.startswith("--")}
    is_total = _ALL_WORKERS.replace("-", "_") in typed and _OF_ACCELERATE.replace("-", "_") not in typed
    if several is not None and is_total and option == _OF_ACCELERATE and settings.nproc_per_node is None:
        raise UsageError(
            f"{_ALL_WORKERS} of {name} counts the workers of all nodes, and {has}; add {_OF_ACCELERATE} "
            f"{several.max} --machine_rank 0 (the pod knows its own), or remove {_ALL_WORKERS} and set "
            f"--nproc-per-node (TRAINER_LAUNCH_NPROC_PER_NODE)"
        )
    orders = {
        "name": name,
        "launcher": task.launcher,
        "is_one_of_several": several is not None,
        "conflict": has if several is not None and settings.nodes is None else "",
        "workers": (variable_of("nproc_per_node"), "1") if several and not _is_number(task.job) else None,
        "advice": f"set {option}, or --nodes 1 (TRAINER_LAUNCH_NODES) to train on this node alone",
        "termination_log": settings.termination_log,
    }
    words = command.argv[len(command.python) :]
    python, program = task.front_end
    words = words if words[0] == "-m" else (program, *words[1:])
    process = Process(
        name=name,
        argv=(*(command.python or (python,)), _PROGRAM, json.dumps(orders), *words),
        env=repaired(task.env),
    )
    becomes = (
        f"where it starts the workers it becomes: {OURS} run … -- torchrun …, with the options that it chooses"
    )
    return Plan(engine=FRONT_END.name, processes=(process,), grace_s=task.grace_s, reasons=(reason, becomes))


def _is_number(job: Job) -> bool:
    return job.nproc_per_node is not None and str(job.nproc_per_node).isdecimal()


FRONT_END = Engine("front end", lambda _job, _command: None, _plan_of_front_end)  # picked before all others
