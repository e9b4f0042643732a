"""`explain`: everything that was read, where from, what it became, and the plan that would run. Changes nothing."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from msgspec import to_builtins
from msgspec.structs import replace

from trainer_launch.commands import options, sshd
from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import snapshot
from trainer_launch.contracts.snapshot import flat
from trainer_launch.contracts.source import PodInput
from trainer_launch.host import runtime_directory
from trainer_launch.model import Fact, Host, Job, Json, Origin, Plan, Topology, Workers, signal_policy
from trainer_launch.model.errors import LaunchError, NotRunnableError, UsageError
from trainer_launch.model.redaction import redact, redact_command
from trainer_launch.model.settings import Settings, load
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.model.units import aligned, counted, in_mib, listed, named_ranks, printable
from trainer_launch.planning import engines, shared_memory
from trainer_launch.planning.command import OURS
from trainer_launch.planning.job import place, usable_threads
from trainer_launch.planning.mpi import SSHD
from trainer_launch.planning.plain import FRONT_END
from trainer_launch.planning.reading import Reading, check_command, check_torch, live_pod, read
from trainer_launch.planning.shared_memory import Decision
from trainer_launch.planning.task import Task
from trainer_launch.planning.torch import TORCH, TORCHRUN

_SNAPSHOT_LIMIT = 33_554_432  # bytes
_RUNNING = (("run",), ("preflight",), ("sshd",))
_UNREAD = "unknown"  # the contract of a pod that no contract fits
_SCRATCH = "/tmp/trainer-launch"  # stands for the private folder that a run makes


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        LaunchError: what was read makes no sense, or no plan can be made of it.
    """
    pod, settings = _pod(parsed)
    path = parsed.flags["save_pod"]
    try:
        reading = read(pod, settings)
    except LaunchError:  # what is odd about a pod is what a report of it is for
        if path:
            _save(path, snapshot.snapshot_of(pod, Job(contract=_UNREAD)))
        raise
    job = reading.job
    if path:
        _save(path, snapshot.snapshot_of(reading.pod, job))
    plan, memory, odd, problem = _plan(reading, settings, is_here=not parsed.flags["pod"])
    explained: dict[str, Json] = {
        "contract": job.contract,
        "job": flat(job),
        "plan": plan,
        "facts": {
            "read": [_fact_json(fact) for fact in job.facts if fact.origin is not Origin.DERIVED],
            "machine": to_builtins(reading.host),
            "shared_memory": to_builtins(memory),
        },
        "warnings": [
            *job.warnings,
            *odd,
            *([memory.warning] if memory.warning else []),
            *([] if problem is None else [f"no plan: {problem}"]),
            *(
                [] if plan is None or parsed.flags["pod"] else _lacking(reading, plan)
            ),  # another pod's files are not here
        ],
    }
    if parsed.flags["json"]:
        sys.stdout.write(json.dumps(explained, indent=2) + "\n")
    else:
        command = () if reading.command is None else redact_command(reading.command.argv)
        sys.stdout.write(table(explained, command))
    if problem is not None:
        raise problem
    return 0


def _pod(parsed: Parsed) -> tuple[PodInput, Settings]:
    """The pod to explain, with its own settings; what is on our own line wins over a snapshot's."""
    path = parsed.flags["pod"]
    if not path:
        return live_pod(parsed.argv), parsed.settings
    pod = snapshot.pod_from_snapshot(_load(path))
    typed: dict[str, Any] = {}
    words = pod.command
    if PurePosixPath(words[0] if words else "").name == OURS and words[1:2] in _RUNNING:
        _, typed, words, _ = options.typed(OURS, words[1:])
    return replace(pod, command=parsed.argv or words), load({**typed, **parsed.given}, pod.env)


def _plan(
    reading: Reading, settings: Settings, *, is_here: bool
) -> tuple[dict[str, Json] | None, Decision, tuple[str, ...], LaunchError | None]:
    """The place of this node, the plan and its warnings, or why there is none; without a command only the place."""
    memory = Decision()
    try:
        topology = place(reading.job, reading.host)
        memory = shared_memory.decided(reading, settings)
        placed = _place_json(topology, reading.host, reading.pod.env)
        is_worker = reading.command is None and reading.job.engine == SSHD.name
        if reading.command is None and not is_worker:
            return {**placed, "engine": None, "reasons": [], "processes": []}, memory, (), None
        reading = replace(reading, command=sshd.COMMAND) if is_worker else reading
        shims = f"{_SCRATCH}/{runtime_directory.SHIMS}" if reading.calls_others else None
        task = engines.task_of(reading, settings, scratch=_SCRATCH, shm_is_short=memory.is_short, shims=shims)
        task = engines.with_network(task) if is_here else task
        made = SSHD.plan(task, "this is an MPI worker: trainer-launch sshd") if is_worker else engines.plan(task)
        unheard = signal_policy.unheard(reading.pod.stop_signal or "SIGTERM", made.signals)
        plan = {
            **placed,
            **_plan_json(task, made),
            "hang_timeout": settings.hang_timeout,
        }
        return plan, memory, (*made.warnings, *([unheard] if unheard else [])), None
    except LaunchError as problem:
        return None, memory, (), problem


def _lacking(reading: Reading, plan: Mapping[str, Json]) -> list[str]:
    """Why `run` would not start this plan in this container."""
    if reading.command is None:
        return []
    try:
        check_command(reading.command, reading.pod.env.get("PATH"))
        check_torch(str(plan["engine"]))
    except NotRunnableError as error:
        return [f"run would end with {error.exit_code}: {error}"]
    return []


def _place_json(topology: Topology, machine: Host, env: Mapping[str, str]) -> dict[str, Json]:
    threads, why = usable_threads(machine, topology.local_world_size, env.get("OMP_NUM_THREADS"))
    return {
        "node_rank": topology.node_rank,
        "min_nodes": topology.nodes.min if topology.nodes else None,
        "max_nodes": topology.nodes.max if topology.nodes else None,
        "spares": topology.spares,
        "nproc_per_node": topology.local_world_size,
        "world_size": topology.world_size,
        "coordinator": None if topology.coordinator is None else str(topology.coordinator),
        "omp_num_threads": threads,
        "because": {**topology.because, "OMP_NUM_THREADS": why},
    }


def _plan_json(task: Task, plan: Plan) -> dict[str, Json]:
    return {
        "engine": plan.engine,
        "topology_label": task.label,
        "reasons": plan.reasons,
        "grace_s": plan.grace_s,
        "hosting": None if plan.hosting is None else to_builtins(plan.hosting),
        "signals": {
            signal_policy.name_of(number): signal_policy.action_of(number, plan.signals).value
            for number in sorted(signal_policy.STOP_SIGNALS | plan.signals.keys())
        },
        "processes": [
            {
                "name": process.name,
                "argv": tuple(redact_command(process.argv)),
                "env_changes": _changes(task.env, process.env),
            }
            for process in plan.processes
        ],
        "workers": None if plan.workers is None else _workers_json(task, plan.workers),
    }


def _workers_json(task: Task, workers: Workers) -> dict[str, Json]:
    return {
        "count": workers.count,
        "argv": tuple(redact_command(workers.argv)),
        "env_changes": _changes(task.env, workers.env),
        "start_method": "forkserver" if workers.forks else "exec",
        "role": workers.role,
    }


def _fact_json(fact: Fact) -> dict[str, Json]:
    return {
        "name": fact.name,
        "value": redact(fact.name, fact.value),
        "origin": fact.origin.value,
        "field": fact.field,
    }


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Json]:
    """Variables that a child gets otherwise than we have them; null means taken away."""
    names = sorted(before.keys() | after.keys())
    return {
        name: redact(name, after[name]) if name in after else None
        for name in names
        if before.get(name) != after.get(name)
    }


def _load(path: str) -> object:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_SNAPSHOT_LIMIT + 1)
        if len(data) > _SNAPSHOT_LIMIT:
            raise UsageError(f"{path} is larger than {_SNAPSHOT_LIMIT} bytes; this is not a pod snapshot")
        return json.loads(data)
    except OSError as problem:
        raise UsageError(f"--pod {path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"--pod {path} is not JSON: {problem}") from None


def _save(path: str, data: Mapping[str, Json]) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2, sort_keys=True) + "\n")
    except OSError as problem:
        raise UsageError(f"--save-pod {path} cannot be written: {problem.strerror}") from None


_NO_PLATFORM = """Contract: unknown. No variable or file of a training controller was found.
  In a pod:     the controller injects them into the training container only. An init container or a sidecar
                needs envInjection (Trainer v2); a job without spec.trainer gets none.
  By hand:      trainer-launch run --nodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 -- train.py
  On a laptop:  trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- train.py
  Another pod:  trainer-launch explain --pod pod.json   (written there by --save-pod pod.json)
"""
_WIDTH = 100
_SHOWN = 6  # hosts
# What the launcher tells its own children, which no program needs to know.
_INTERNAL = ("TRAINER_LAUNCH_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_STOPS = ("HUP", "INT", "QUIT", "TERM")
_TORCH = (TORCH.name, TORCHRUN.name)


def table(explained: Mapping[str, Any], command: Sequence[str]) -> str:
    """The whole report for a command as it was typed, secrets redacted; ends with a newline."""
    contract = explained["contract"]
    parts = [_NO_PLATFORM if contract == "unknown" else f"Contract: {contract}\n"]
    parts += _section("Plan", _plan_rows(explained["plan"], explained["job"], shlex.join(command)))
    parts += _section("Warnings", [("-", text) for text in explained["warnings"]])
    parts += _section("Read from the pod", _read(explained["facts"]["read"]))
    parts += _section("Machine", _machine(**explained["facts"]))
    parts.append("--json shows every detail.\n")
    return "\n".join(parts)


def _section(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = aligned([(printable(name), _cut(value)) for name, value in rows], most=30)
    return ["\n  ".join((title, *lines)) + "\n"] if lines else []


def _read(facts: list[Mapping[str, str]]) -> list[tuple[str, str]]:
    rows = []
    for fact in facts:
        became = f" -> {fact['field']}" if fact["field"] and fact["field"] != fact["name"] else ""
        rows.append((fact["name"], f"{fact['value']}  ({fact['origin']}){became}"))
    return rows


def _machine(*, machine: Mapping[str, Any], shared_memory: Mapping[str, Any], **_: Any) -> list[tuple[str, str]]:
    cpus = cast("Mapping[str, Any]", machine["cpus"])
    quota = "no cgroup quota" if cpus["quota"] is None else f"cgroup quota {cpus['quota']:g}"
    return [
        ("host name", machine["hostname"]),
        ("CPUs", f"{cpus['affinity']} in the affinity mask, {quota}"),
        ("GPUs", f"{machine['gpus']['count']} ({machine['gpus']['reason']})"),
        ("memory limit", _mib(machine["memory_limit_bytes"])),
        ("/dev/shm", _shm(machine, shared_memory["text"])),
    ]


def _shm(machine: Mapping[str, Any], text: str) -> str:
    if machine["shm_bytes"] is None:
        return "none"
    return f"{_mib(machine['shm_bytes'])}, {_mib(machine['shm_free_bytes'])} free" + (f": {text}" if text else "")


def _plan_rows(plan: Mapping[str, Any] | None, job: Mapping[str, Any], command: str) -> Iterator[tuple[str, str]]:
    if plan is None:
        return
    yield "command", command or "none; write it after -- to see what would run"
    if plan["engine"] is not None:
        yield "engine", f"{plan['engine']} ({'; '.join(plan['reasons'])})"
    for process in _started(plan):
        runs = shlex.join(process["argv"])
        if runs != command and plan["engine"] != FRONT_END.name:
            yield "runs", runs
    yield from _place(plan, job)
    if plan["engine"] is None:
        return
    if plan["hosting"]:
        yield "restarts", _restarts(plan["hosting"])
    yield "stopping", f"SIGKILL {plan['grace_s']:g} s after SIGTERM"
    actions = plan["signals"]
    if any(name not in _STOPS or action != SignalAction.TERMINATE for name, action in actions.items()):
        yield (
            "signals",
            ", ".join([*(f"{name} {action}" for name, action in actions.items()), "all others forward"]),
        )
    yield from _environment(_started(plan))


def _started(plan: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The processes that the launcher starts, or its workers, which are all alike."""
    return [*plan.get("processes", ()), *([plan["workers"]] if plan.get("workers") else [])]


def _place(plan: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How large the job is, and which part of it this pod runs."""
    why, least, most, workers = plan["because"], plan["min_nodes"], plan["max_nodes"], plan["nproc_per_node"]
    if most is not None:
        nodes = counted(most, "node") if least == most else f"{least} to {most} nodes"
        is_open = plan["world_size"] is None or plan["engine"] == FRONT_END.name
        workers_in_all = "" if is_open else f", {counted(plan['world_size'], 'worker')} in all"
        spares = f", {counted(plan['spares'], 'spare')}" if plan["spares"] else ""
        yield "job", nodes + workers_in_all + spares
    yield "this node", why["node_rank"]
    if plan["engine"] in (None, *_TORCH):
        ranks = _ranks(plan) if least == most else ""
        yield "workers here", f"{why['nproc_per_node']}{ranks}" if workers is not None else why["nproc_per_node"]
        if most != 1 or plan["spares"]:
            here = "; this pod runs the coordinator" if plan.get("hosting") else ""
            yield "nodes meet at", f"{why['coordinator']}{here}"
    if job.get("hosts") and plan["engine"] not in _TORCH:
        hosts = job["hosts"]
        yield "hosts", f"{len(hosts)}: {listed(hosts, _SHOWN)}"


def _ranks(plan: Mapping[str, Any]) -> str:
    if plan.get("topology_label") is not None:
        return f": ranks by topology label {plan['topology_label'] or '(none)'}"
    if plan["node_rank"] is None or plan["world_size"] is None:
        return ""
    if plan["node_rank"] >= plan["max_nodes"]:
        return ": none while this node is a spare"
    first, count = plan["node_rank"] * plan["nproc_per_node"], plan["nproc_per_node"]
    return f": {named_ranks(range(first, first + count))}"


def _restarts(hosting: Mapping[str, Any]) -> str:
    nodes = hosting["nodes"]
    parts = [f"{counted(hosting['max_restarts'], 'worker failure')} per job"]
    if nodes["max"] > 1:
        parts.append(f"waiting {hosting['rejoin_timeout_s']:g} s for a lost node")
    if nodes["min"] < nodes["max"]:
        parts.append(f"continuing with {nodes['min']} or more nodes after {hosting['shrink_after_s']:g} s")
    return ", ".join(parts)


def _environment(processes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Variables that the program gets otherwise than the pod has them."""
    changes = {name: value for process in processes for name, value in process["env_changes"].items()}
    shown = {name: value for name, value in changes.items() if not name.startswith(_INTERNAL)}
    for title, (name, value) in zip(["environment", *[""] * len(shown)], shown.items(), strict=False):
        yield title, f"{name} (unset)" if value is None else f"{name}={value}"


def _cut(text: str) -> str:
    flat = printable(text.replace("\n", "\\n"))
    return flat if len(flat) <= 4 * _WIDTH else flat[: 4 * _WIDTH] + "…"


def _mib(size: int | None) -> str:
    return "none" if size is None else in_mib(size)
