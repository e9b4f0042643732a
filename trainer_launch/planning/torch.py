"""torch's workers: as children of PID 1 that meet at the launcher's coordinator, or below the image's own torchrun.

PID 1 starts the workers of every program for which it can do what torchrun's options ask for. Otherwise, and with
`--engine torchrun`, the image's torchrun runs unmodified, and its nodes meet by torch's own rendezvous. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from trainer_launch.host import runtime_directory
from trainer_launch.model import (
    Endpoint,
    Hosting,
    Job,
    Membership,
    NodeRange,
    Origin,
    Plan,
    PortRange,
    Process,
    Rendezvous,
    Seats,
    Topology,
    Workers,
    signal_policy,
)
from trainer_launch.model.codec import MAX_NAME, MAX_NODES, MAX_RANKS
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction
from trainer_launch.model.units import counted
from trainer_launch.model.value_parsers import bad_value, parse_host
from trainer_launch.planning import interfaces, torchrun_options
from trainer_launch.planning.command import Command, CommandKind, launcher_in
from trainer_launch.planning.job import DEFAULT_PORT, JOB_OPTIONS, MEET_AT_NODE_0, typed
from trainer_launch.planning.task import Engine, Task, env_of_workers, ports_of
from trainer_launch.planning.torchrun_options import DEVICES, visible_devices

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun's own
DEFAULT_MAX_RESTARTS = 3  # torchrun's is 0, with which no failure is survived
_CONTRACTS = "torchrun"  # how contracts call the engine that they are made for
_NAME = re.compile(rf"[ -~]{{1,{MAX_NAME}}}")
_UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE", "2000"  # how many collectives torch keeps; without it none
_FAULT_HANDLER = "PYTHONFAULTHANDLER", "1"  # a crash of native code shows the Python code that called it


def serves(job: Job, command: Command) -> str | None:
    """A torchrun command, or a Python program of a job that is torch's or has no engine of its own."""
    if command.kind is CommandKind.TORCHRUN:
        return "the command is torchrun, as deepspeed has it" if command.is_deepspeed else "the command is torchrun"
    if not command.is_worker:
        return None
    if job.engine == _CONTRACTS:
        return f"contract {job.contract} uses torch"
    says_how_many = job.nodes is not None or job.nproc_per_node is not None or job.rendezvous is not None
    says_how_many |= bool(job.node_rank) and job.contract == "unknown"  # there are others: it must not train alone
    return "the number of nodes or workers is given" if job.engine is None and says_how_many else None


def serves_any_program(job: Job, command: Command) -> str | None:
    """Why it starts workers of a program that no engine knows: the user gave their number."""
    if typed(job, "nproc_per_node") is None:
        return None
    is_free = job.engine in (None, _CONTRACTS) and launcher_in(command.argv) is None
    return "the number of workers is given" if is_free else None


def plan(task: Task, reason: str) -> Plan:
    """The workers, and how this node becomes a member of the job.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form.
    """
    _check_place(task)
    options = task.torchrun_options | form_of_program(task)
    torchrun_options.check_form(options)
    _check_devices(task, options)
    workers, why = _workers(task, options)
    actions = signals_of(options, task.signals)
    signal_policy.stop_signal(actions)  # one has to be left that stops the job
    membership, topology = _membership(task, options.get("local_addr")), task.topology
    _check_messages(task, options, membership.job, workers.count)
    # Node 0 asks itself, whatever its name.
    asks_itself = topology.is_coordinator or topology.pods == 1
    place = Endpoint("localhost", membership.coordinator.port) if asks_itself else membership.coordinator
    return Plan(
        engine=TORCH.name,
        processes=(),
        workers=workers,
        membership=membership,
        grace_s=task.grace_s,
        signals=actions,
        hosting=_hosting(task, membership),
        meeting=(membership.job, place),
        reasons=(reason, why),
    )


def _workers(task: Task, options: Mapping[str, str]) -> tuple[Workers, str]:
    words, settings = program(task), task.settings
    forks, why = _way_to_start(task, options, words)
    env = env_of_workers(task)
    env[runtime_directory.VARIABLE] = task.scratch
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.get("signals_to_handle") or DEFAULT_SIGNALS
    if forks and settings.hang_report_after != "off":
        env.setdefault(*_FLIGHT_RECORDER)
    env.setdefault(*_FAULT_HANDLER)  # empty: it is off
    workers = Workers(
        count=task.topology.local_world_size or 1,
        argv=_argv(task, options, words),
        env=env,
        role=options.get("role", "default"),
        forks=forks,
        records=forks and settings.hang_report_after != "off",
        script=None if "module" in options else words[0],
        preload=_modules(settings.preload),
        python=task.python,
        run_dir=task.scratch,
        errors=runtime_directory.errors_in(task.scratch),
        node_label=task.node if settings.prefix else None,
        virtual_local_rank="virtual_local_rank" in options,
        meet_at=task.topology.coordinator,
        serve_store=task.env.get(_UNSHARED) == "1",
        of_deepspeed=task.command.is_deepspeed,
        logs={name: value for name, value in options.items() if name in torchrun_options.NAMES},
    )
    return workers, why


def _way_to_start(task: Task, options: Mapping[str, str], words: tuple[str, ...]) -> tuple[bool, str]:
    """Whether workers are forked from the fork server, and why or why not."""
    is_exec = task.settings.start_method == "exec"
    reason = "--start-method is exec" if is_exec else _obstacle(task, options, words)
    if reason is None:
        return True, "the fork server, which has imported torch, forks the workers"
    return False, f"workers start without the fork server: {reason}"


def _obstacle(task: Task, options: Mapping[str, str], words: tuple[str, ...]) -> str | None:
    """Why the program cannot run in a process that is forked from a server."""
    if "no_python" in options:
        return "the program is not a script or module of the launcher's own Python"
    if task.env.get("PYTHON_EXEC", task.python) != task.python:
        return "PYTHON_EXEC names another Python"
    if "module" not in options and not words[0].endswith(".py"):
        return f"{words[0]!r} is not a .py file"
    if task.env.get("PYTHONINSPECT"):
        return "with PYTHONINSPECT an interpreter ends otherwise"
    if any("$" in word for word in words[1:]):
        return "an argument contains $, which torchrun replaces for each worker"
    return None


def _argv(task: Task, options: Mapping[str, str], words: tuple[str, ...]) -> tuple[str, ...]:
    """The command of each worker, as torchrun makes it."""
    if "no_python" in options:
        return words
    python = task.env.get("PYTHON_EXEC", task.python)
    return (python, "-u", *(("-m",) if "module" in options else ()), *words)


def _modules(words: str | None) -> tuple[str, ...]:
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


_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def plan_of_torchrun(task: Task, reason: str) -> Plan:
    """Plan a torchrun with every option spelled out.

    Raises:
        ContractError: a job of several nodes lacks this node's rank or the address to meet at.
        UsageError: an option of torchrun is out of its form, or it cannot do what --signals asks for.
    """
    _check_place(task)
    _check_signals(task)
    options = _options(task)
    actions = signals_of(options, task.signals)
    unknown = task.command.torchrun.unknown if task.command.torchrun else ()
    template = options.pop("log_line_prefix_template", None)  # by its variable, which torch before 2.15 reads, too
    # After "--" torch takes nothing of the program for an option of its own, such as --n=3 for --nnodes.
    words = (*torchrun_options.render(options), *unknown, "--", *program(task))
    failure = f"{task.scratch}/{runtime_directory.FAILURE}"
    env = {
        # With the agents' store shared, torch 2.13 breaks restarts: a new group reads its dead predecessor's keys.
        _UNSHARED: "1",
        **env_of_workers(task),
        runtime_directory.VARIABLE: task.scratch,
        "TORCHELASTIC_ERROR_FILE": failure,
    }
    if template:
        env[torchrun_options.PREFIX_VARIABLE] = template
    # torch kills workers that need longer, and does not know the grace.
    env[_SHUTDOWN_TIMEOUT] = env.get(_SHUTDOWN_TIMEOUT) or str(math.ceil(task.grace_s))
    torchrun = Process(
        name="torchrun",
        argv=(task.python, "-m", "torch.distributed.run", *words),
        env=env,
        label=task.node if task.settings.prefix else None,
    )
    return Plan(
        engine=TORCHRUN.name,
        processes=(torchrun,),
        grace_s=task.grace_s,
        stop_signal=signal_policy.stop_signal(actions),
        signals=actions,
        failure_file=failure,
        reasons=(reason,),
    )


def _options(task: Task) -> dict[str, str]:
    """All options of torchrun: PET_*, then the typed ones, then what the topology says about the job itself."""
    options = {name: value for name, value in task.torchrun_options.items() if name not in JOB_OPTIONS}
    options.update(form_of_program(task))
    options["nproc_per_node"] = _worker_count(task)
    if task.topology.max_restarts is not None:
        options["max_restarts"] = str(task.topology.max_restarts)
    options.update(_rendezvous(task, nodes_of(task)))
    if task.topology.pods == 1:
        # A single node's workers meet on loopback: a pod's own name often does not resolve.
        options.setdefault("local_addr", "127.0.0.1")
    if options.keys().isdisjoint(("log_dir", "redirects", "tee")):
        # torchrun leaves its folder of logs behind; the runtime directory is removed at the end.
        options["log_dir"] = runtime_directory.errors_in(task.scratch)
    return options


def _worker_count(task: Task) -> str:
    """How many workers; xpu stays a word where only torch may see such devices."""
    size, words = task.topology.local_world_size, task.job.nproc_per_node
    if size is not None or words == "xpu":
        return str(size or words)
    raise UsageError(
        f"invalid value '{words}' for the number of workers per node: this container has no such device "
        f"({task.host.gpus.reason}); request devices in the pod's resources, or set --nproc-per-node to a number"
    )


def _rendezvous(task: Task, nodes: NodeRange) -> dict[str, str]:
    """Where and how torchrun's agents meet, by torch's own means."""
    if task.topology.pods == 1:
        # One node meets nobody: any free port will do, whatever port the platform names.
        return {"nnodes": "1", "standalone": "1"}
    rendezvous = task.topology.rendezvous
    if rendezvous is not None and rendezvous.kind == "dynamic" and rendezvous.endpoint is not None:
        return _dynamic(task.topology, nodes, rendezvous, rendezvous.endpoint)
    node_rank, coordinator = own_place(task, nodes)
    if nodes.fixed is None:
        raise UsageError(
            f"{nodes} nodes need an elastic rendezvous; "
            f"set --rdzv-backend c10d and --rdzv-endpoint in the torchrun command, or set a fixed number of nodes"
        )
    options = {
        "nnodes": str(nodes),
        "node_rank": str(node_rank),
        "master_addr": coordinator.host,
        "master_port": str(coordinator.port),
        "rdzv_backend": "static",
    }
    run_id = rendezvous.run_id if rendezvous else None
    return options if run_id is None else {**options, "rdzv_id": run_id}


def _dynamic(topology: Topology, nodes: NodeRange, rendezvous: Rendezvous, endpoint: Endpoint) -> dict[str, str]:
    conf = dict(rendezvous.conf)
    if rendezvous.backend == "c10d" and not endpoint.is_loopback and topology.node_rank is not None:
        # torch guesses from name lookups who hosts the store, and guesses wrong behind a Service.
        conf.setdefault("is_host", str(topology.is_coordinator).lower())
    options = {
        "nnodes": str(nodes),
        "rdzv_backend": rendezvous.backend or "c10d",
        "rdzv_endpoint": str(endpoint),
        "rdzv_conf": ",".join(f"{name}={value}" for name, value in conf.items()),
        "rdzv_id": rendezvous.run_id or "",
    }
    return {name: value for name, value in options.items() if value}


def _check_signals(task: Task) -> None:
    """Refuse what torchrun cannot do: each signal ends it, after its workers or without them."""
    for number, action in task.signals.items():
        if action is not signal_policy.action_of(number, {}):
            word = f"{signal_policy.name_of(number)}={action.value}"
            raise UsageError(
                f"--signals {word} is not possible with torchrun, which cannot {action.value} on this signal; "
                f"remove it, or set --engine torch"
            )


TORCH = Engine("torch", serves, plan)
TORCHRUN = Engine("torchrun", lambda _job, _command: None, plan_of_torchrun)  # asked for, or in place of the other


# Variables by which the user asks torch's agent for something that no launcher without torch has, and why.
_AGENTS = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": "torchrun serves the timers of torch.distributed.elastic.timer",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "torchrun watches for workers in uninterruptible sleep",
}
_NULL = ("", "null")


def handed_over(task: Task) -> str | None:
    """Why the image's own torchrun has to start the workers; None: PID 1 can do all that is asked.

    Raises:
        UsageError: an option is out of its form.
    """
    options = task.torchrun_options
    unknown = task.command.torchrun.unknown if task.command.torchrun else ()
    if unknown:
        return f"{unknown[0].partition('=')[0]} is an option of a newer torchrun"
    if "logs_specs" in options:
        return "--logs-specs loads a class into torchrun"
    if "numa_binding" in options:
        return f"--numa-binding {options['numa_binding']} has torchrun bind the workers that it starts"
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if options.get(name):
            return f"{torchrun_options.OPTIONS[name].flag} has torchrun look into each line of output"
    if options.get("event_log_handler", "") not in _NULL:
        return f"--event-log-handler {options['event_log_handler']} records events of torchrun's agent"
    if "run_path" in options:
        return "with --run-path torchrun itself runs the script in processes that it forks or spawns"
    for name, why in _AGENTS.items():
        if task.env.get(name, "0").strip() not in ("", "0"):
            return f"{name} is set: {why}"
    if task.topology.local_world_size is None:
        return f"only torch can count {task.job.nproc_per_node} devices"
    if meets_here(task):
        return None
    backend = task.topology.rendezvous.backend if task.topology.rendezvous is not None else None
    return f"the nodes meet by torch's rendezvous ({backend or 'static'})"


def signals_of(options: Mapping[str, str], given: Mapping[int, SignalAction]) -> dict[int, SignalAction]:
    """The signals' actions with --signals-to-handle; what the launcher's own --signals says takes precedence.

    torchrun ends the job at each of these signals: workers get the signal itself.

    Raises:
        UsageError: a name is not a signal's, or nobody can handle that signal.
    """
    named = signal_policy.numbers(options.get("signals_to_handle") or DEFAULT_SIGNALS, "--signals-to-handle")
    extra = {number: SignalAction.DRAIN for number in named if number not in STOP_SIGNALS}
    return {**extra, **given}


def form_of_program(task: Task) -> dict[str, str]:
    """Whether torch starts a script, a module, or a program without Python; torchrun has options for it."""
    command = task.command
    if command.kind is CommandKind.TORCHRUN:
        return {}
    is_plain_python = len(command.python) == 1 and task.python_is_ours
    if command.kind is CommandKind.PROGRAM or (command.python and not is_plain_python):
        return {"no_python": "1"}
    return {"module": "1"} if command.kind is CommandKind.MODULE else {}


def program(task: Task) -> tuple[str, ...]:
    """The script, module or program with its arguments, as torchrun takes it."""
    command = task.command
    if command.torchrun is not None:
        return command.torchrun.program
    return command.argv if "no_python" in form_of_program(task) else command.program


def _check_place(task: Task) -> None:
    """Refuse to be a second node 0, and several workers of a program that is read from standard input.

    Outside the trainer's own replicated job PET_NODE_RANK counts other pods.
    """
    job, nodes, workers = task.job, task.topology.nodes, task.topology.local_world_size
    if job.foreign_replicated_job:
        raise ContractError(
            f"this pod, {task.host.hostname}, belongs to another replicated job than the trainer's nodes, so "
            f"PET_NODE_RANK is not its rank in the job (contract {job.contract}); start workers in the "
            f"trainer's pods only, or set --engine plain"
        )
    if job.rank_behind_workers is not None and task.topology.node_rank is None and nodes is not None:
        raise ContractError(
            f"this pod is the Master of a job with at most {nodes.max} nodes, and the Workers take them all "
            f"(contract {job.contract}); raise elasticPolicy.maxReplicas by one, remove the Master, "
            f"or set --nodes {nodes.min}:{nodes.max + 1} in all pods"
        )
    meets = task.topology.coordinator
    if meets is not None and meets.port == 0 and task.topology.pods != 1:
        raise UsageError(
            f"the nodes cannot meet at {meets}: port 0 stands for any free port, which only one node would know; "
            f"write the port, such as {Endpoint(meets.host, DEFAULT_PORT)}"
        )
    if task.command.reads_stdin and workers != 1:
        raise UsageError(
            f"{workers or 'several'} workers cannot read one program from standard input; "
            f"save it as a file, and run: trainer-launch run -- FILE.py"
        )


def _check_messages(task: Task, options: Mapping[str, str], job: str, workers: int) -> None:
    """Refuse what the messages between the nodes cannot carry: there, the nodes would wait for each other."""
    nodes, contract, local_addr = nodes_of(task), task.job.contract, options.get("local_addr")
    if not _NAME.fullmatch(job):
        expected = f"at most {MAX_NAME} printable ASCII characters"
        raise bad_value("the job's id (--rdzv-id)", job, expected, contract)
    if len(role := options.get("role", "")) > MAX_NAME:
        raise bad_value("--role", role, f"at most {MAX_NAME} characters", contract)
    if local_addr and parse_host(local_addr) is None:
        raise bad_value("--local-addr", local_addr, "a host name or an IP address", contract)
    if workers > MAX_RANKS:
        raise bad_value("--nproc-per-node", str(workers), f"at most {MAX_RANKS} workers on a node", contract)
    if nodes.max + task.topology.spares > MAX_NODES:
        raise bad_value(
            "--nodes", str(nodes), f"at most {MAX_NODES}, spares included; set --nodes to fewer", contract
        )


def _check_devices(task: Task, options: Mapping[str, str]) -> None:
    visible, workers = visible_devices(task.env), task.topology.local_world_size
    if "virtual_local_rank" in options and visible is not None and workers is not None and workers > len(visible):
        raise UsageError(
            f"--virtual-local-rank gives each of the {counted(workers, 'worker')} its own device, but "
            f"{DEVICES}={task.env[DEVICES][:60]} names {len(visible)}; "
            f"set --nproc-per-node to at most {len(visible)}, or unset {DEVICES}"
        )


def check_spares(task: Task, reason: str, *, runs_workers: bool) -> None:
    """Refuse spares where nobody could let them take over, because of this reason for the engine.

    Raises:
        LaunchError: this job's nodes do not meet at our coordinator.
    """
    topology = task.topology
    if not topology.spares or runs_workers:
        return
    if any(fact.name == "--spares" for fact in task.job.facts):
        raise UsageError(
            f"--spares needs torch workers that meet at the launcher's coordinator ({reason}); remove it"
        )
    if topology.nodes is not None and (topology.node_rank or 0) >= topology.nodes.max:
        raise ContractError(
            f"this node's rank is {topology.node_rank} but the job has {counted(topology.nodes.max, 'node')}, and "
            f"only torch workers that meet at the launcher's coordinator have spares"
        )


def check_placement(task: Task, reason: str) -> None:
    """Refuse to order the ranks of workers that others start, for this reason.

    Raises:
        UsageError: --topology-label asks for what this engine cannot do.
    """
    if task.label is not None:
        raise UsageError(
            f"--topology-label needs torch workers that the launcher itself starts ({reason}); remove it"
        )


def warnings(task: Task) -> Iterator[str]:
    """Warnings about what is allowed, and probably not meant."""
    gpus, is_alone = task.host.gpus, task.topology.local_world_size == 1
    if gpus.count > 1 and is_alone and task.job.nproc_per_node is None:
        yield (
            f"1 worker starts in a pod with {gpus.count} accelerators ({gpus.reason}), and torch uses 1 of them; "
            f"add --nproc-per-node auto for a worker on each, or --nproc-per-node 1 if one is enough"
        )
    if task.network is not None:
        yield from interfaces.settled(task.network)[1]
    if task.label == "" and task.topology.pods != 1:
        yield (
            "this node has no topology label, so its ranks come last; "
            "put one into the file or variable that --topology-label names"
        )


_FIRST = re.compile(r"(?P<stem>[^.]*-)0")  # the first of some hosts with an index each


def nodes_of(task: Task) -> NodeRange:
    """The number of nodes of the job; an unknown number is an error."""
    if task.topology.nodes is None:
        raise ContractError(f"the number of nodes is unknown {_to_set(task)}")
    return task.topology.nodes


def meets_here(task: Task) -> bool:
    """Whether the nodes meet at our coordinator; a store of its own, such as etcd, is left to torch."""
    rendezvous = task.topology.rendezvous
    backend = rendezvous.backend if rendezvous is not None else None
    return task.topology.nodes is None or task.topology.pods == 1 or backend in MEET_AT_NODE_0


def job_name(topology: Topology, hostname: str, coordinator: Endpoint) -> str:
    """The name that distinguishes jobs at the same address: the user's run id, else host and port of node 0."""
    rendezvous = topology.rendezvous
    if rendezvous is not None and rendezvous.run_id:
        return rendezvous.run_id
    if coordinator.is_loopback and topology.pods not in (None, 1):
        # Operators up to 1.3 give node 0 localhost as its address, and its name to the others; any other node that
        # gets localhost is on the same machine.
        coordinator = Endpoint(hostname, coordinator.port)
    # Without colons and brackets: workers see it as TORCHELASTIC_RUN_ID, and torch names folders after it.
    return re.sub(r"[^\w.-]+", "-", str(coordinator)).strip("-")


def _to_set(task: Task) -> str:
    """Advice: the proof that there are several nodes, and the options for what is unknown, with their variables."""
    topology, shown = task.topology, task.job.several_nodes_shown_by
    values = {"nodes": topology.nodes, "node-rank": topology.node_rank, "master-addr": topology.coordinator}
    names = [name for name, value in values.items() if value is None]
    flags = ", ".join(f"--{name} (TRAINER_LAUNCH_{name.replace('-', '_').upper()})" for name in names)
    why = f", and {shown} shows that there are several" if shown else ""
    alone = ", or --nodes 1 to train on this node alone" if shown and topology.nodes is None else ""
    return f"(contract {task.job.contract}){why}; set {flags}{alone}"


def own_place(task: Task, nodes: NodeRange) -> tuple[int | None, Endpoint]:
    """The rank of this node, None where its arrival decides, and the endpoint where the nodes meet."""
    topology = task.topology
    if topology.pods == 1:
        # One node meets nobody else: its own loopback will do, whatever address the platform names.
        return 0, Endpoint("127.0.0.1", task.loopback_port)
    if topology.node_rank is None and not topology.by_arrival:
        raise ContractError(f"this job has {nodes} nodes, but the rank of this node is unknown {_to_set(task)}")
    if topology.coordinator is None:
        raise ContractError(f"this job has {nodes} nodes, but the address of node 0 is unknown {_to_set(task)}")
    return topology.node_rank, topology.coordinator


def _membership(task: Task, local_addr: str | None) -> Membership:
    """The membership of this node in the job that meets at our coordinator."""
    topology, nodes, hostname = task.topology, nodes_of(task), task.host.hostname
    node_rank, coordinator = own_place(task, nodes)
    seats = None
    if node_rank is not None and (nodes.fixed is None or topology.spares):
        seats = seats_by_index(coordinator, node_rank, hostname, nodes.max + topology.spares)
    is_on_same_machine = topology.by_arrival and coordinator.is_loopback
    return Membership(
        job=job_name(topology, hostname, coordinator),
        coordinator=coordinator,
        node_rank=node_rank,
        host=hostname,
        address=local_addr or ("127.0.0.1" if topology.pods == 1 or is_on_same_machine else None),
        patience_s=task.settings.wait_timeout,
        max_restarts=DEFAULT_MAX_RESTARTS if topology.max_restarts is None else topology.max_restarts,
        ports=_ports_of_store(task),
        seats=seats,
        secret_file=task.job.secret_file,
        nodes=0 if nodes.fixed is None else nodes.max + topology.spares,
        label=task.label or "",
    )


def _hosting(task: Task, member: Membership) -> Hosting | None:
    """The coordinator that this node hosts, if it is the one to do so."""
    topology, settings = task.topology, task.settings
    if not (topology.is_coordinator or topology.pods == 1 or member.seats is not None):
        return None
    return Hosting(
        job=member.job,
        host=member.coordinator.host if topology.pods == 1 else "",
        port=member.coordinator.port,
        nodes=nodes_of(task),
        spares=topology.spares,
        max_restarts=member.max_restarts,
        rejoin_timeout_s=settings.wait_timeout,
        shrink_after_s=task.shrink_after_s,
        secret_file=member.secret_file,
        seats=member.seats,
        seat=member.node_rank or 0,
        by_arrival=topology.by_arrival,
        finds_stragglers=settings.hang_report_after != "off",
    )


def _ports_of_store(task: Task) -> PortRange | None:
    """Where the store may listen: a typed --master-port, with which a script may call init_process_group itself.

    Nodes of a larger job meet at that port, so that their store has another one.
    """
    port = int(typed(task.job, "master_port", Origin.COMMAND) or 0)
    return PortRange(port, port) if port and task.topology.pods == 1 else ports_of(task.settings)


def seats_by_index(home: Endpoint, node_rank: int, hostname: str, count: int) -> Seats | None:
    """Where each node is, where node 0's host name and this node's differ in an index alone."""
    label, dot, domain = home.host.partition(".")
    first = _FIRST.fullmatch(label)
    if first is None:
        return None
    stem, offset = first["stem"], 0
    if stem.endswith("-master-"):  # PyTorchJob calls its other nodes worker-0, worker-1 ...
        stem, offset = f"{stem.removesuffix('-master-')}-worker-", -1
    seats = Seats(home, f"{stem}#{dot}{domain}", offset, count)
    own = seats.endpoint(node_rank).host.partition(".")[0]
    return seats if own == hostname.partition(".")[0] else None
