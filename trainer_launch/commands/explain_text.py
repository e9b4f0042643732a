"""What `explain` shows to people: the plan first, then where its values come from. `--json` has every detail."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.model.units import counted, in_mib
from trainer_launch.planning.engines import torch, torchrun

_NO_PLATFORM = """Contract: unknown. No variable or file of a training controller was found.
  In a pod:     the controller injects them into the training container only. An init container or a sidecar
                needs envInjection (Trainer v2); a job without spec.trainer gets none.
  By hand:      trainer-launch run --nodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 -- train.py
  On a laptop:  trainer-launch local --nodes 2 --nproc-per-node 2 -- train.py
  Another pod:  trainer-launch explain --pod pod.json   (written there by --save-pod pod.json)
"""
_WIDTH = 100
_SHOWN = 6  # hosts
# What the launcher tells its own children, which no program needs to know.
_INTERNAL = ("TRAINER_LAUNCH_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_CHILD = "trainer_launch.mpi"  # in the argv of what the launcher starts of its own
_STOPS = ("HUP", "INT", "QUIT", "TERM")
_TORCH = (torch.NAME, torchrun.NAME)


def table(explained: Mapping[str, Any], command: Sequence[str]) -> str:
    """The whole report for a command as it was typed, secrets redacted; ends with a newline."""
    known = explained["contract"] != "unknown"
    parts = [f"Contract: {explained['contract']}\n" if known else _NO_PLATFORM]
    parts += _section("Plan", _plan(explained["plan"], explained["job"], shlex.join(command)))
    parts += _section("Warnings", [("-", text) for text in explained["warnings"]])
    parts += _section("Read from the pod", _read(explained["facts"]["read"]))
    parts += _section("Machine", _machine(**explained["facts"]))
    parts.append("--json shows every detail.\n")
    return "\n".join(parts)


def _section(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    if not listed:
        return []
    width = min(30, max(len(name) for name, _ in listed))
    lines = [f"  {name:<{width}}  {_cut(value)}" for name, value in listed]
    return [f"{title}\n" + "\n".join(lines) + "\n"]


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


# -- the plan ---------------------------------------------------------------------------------


def _plan(plan: Mapping[str, Any] | None, job: Mapping[str, Any], command: str) -> Iterator[tuple[str, str]]:
    if plan is None:
        return
    yield "command", command or "none; write it after -- to see what would run"
    if plan["engine"] is not None:
        yield "engine", f"{plan['engine']} ({'; '.join(plan['reasons'])})"
    for process in _started(plan):
        runs = shlex.join(process["argv"])
        if _CHILD not in runs and runs != command:
            yield "runs", runs
    yield from _place(plan, job)
    if plan["engine"] is None:
        return
    if plan["wait_for"]:
        yield "waits for", f"{', '.join(plan['wait_for'])} to resolve"
    if plan["hosting"]:
        yield "restarts", _restarts(plan["hosting"])
    if plan["hang_timeout"] is not None:
        yield "hang detection", f"--hang-timeout {plan['hang_timeout']}"
    yield "stopping", f"SIGTERM to {_asked_to_stop(plan)}, SIGKILL after {plan['grace_s']:g} s"
    actions = plan["signals"]
    if any(name not in _STOPS or action != SignalAction.TERMINATE for name, action in actions.items()):
        yield (
            "signals",
            ", ".join([*(f"{name} {action}" for name, action in actions.items()), "all others forward"]),
        )
    yield from _environment(_started(plan))


def _started(plan: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the launcher starts: processes, or workers that are all alike."""
    return [*plan.get("processes", ()), *([plan["workers"]] if plan.get("workers") else [])]


def _asked_to_stop(plan: Mapping[str, Any]) -> str:
    if plan["engine"] == torchrun.NAME:
        return "torchrun, which sends it to each worker's process group"
    who = "each worker" if plan["engine"] == torch.NAME else "the program"
    return f"{who}'s process group" if plan["stop_order"] == "group" else who


def _place(plan: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How large the job is, and which part of it this pod runs."""
    why, least, most, workers = plan["because"], plan["min_nodes"], plan["max_nodes"], plan["nproc_per_node"]
    if most is not None:
        nodes = counted(most, "node") if least == most else f"{least} to {most} nodes"
        yield (
            "job",
            nodes + ("" if plan["world_size"] is None else f", {counted(plan['world_size'], 'worker')} in all"),
        )
    yield "this node", why["node_rank"]
    if plan["engine"] in (None, *_TORCH):
        ranks = _ranks(plan) if least == most else ""
        yield "workers here", f"{why['nproc_per_node']}{ranks}" if workers is not None else why["nproc_per_node"]
        if most != 1:
            here = "; this pod runs the coordinator" if plan.get("hosting") else ""
            yield "nodes meet at", f"{why['coordinator']}{here}"
    if job.get("hosts") and plan["engine"] not in _TORCH:
        hosts = job["hosts"]
        more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
        yield "hosts", f"{len(hosts)}: {', '.join(hosts[:_SHOWN])}{more}"


def _ranks(plan: Mapping[str, Any]) -> str:
    if plan["node_rank"] is None or plan["world_size"] is None:
        return ""
    first, count = plan["node_rank"] * plan["nproc_per_node"], plan["nproc_per_node"]
    return f": rank {first}" if count == 1 else f": ranks {first} to {first + count - 1}"


def _restarts(hosting: Mapping[str, Any]) -> str:
    nodes, window_s = hosting["nodes"], hosting["restart_window_s"]
    parts = [counted(hosting["max_restarts"], "worker failure")]
    parts[0] += " per job" if window_s is None else f" within {window_s:g} s"
    if nodes["max"] > 1:
        parts.append(f"a lost node is waited for {hosting['rejoin_timeout_s']:g} s")
    if nodes["min"] < nodes["max"]:
        parts.append(f"{nodes['min']} or more nodes continue after {hosting['shrink_after_s']:g} s")
    return ", ".join(parts)


def _environment(processes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Variables that the program gets otherwise than the pod has them."""
    changes = {name: value for process in processes for name, value in process["env_changes"].items()}
    shown = {name: value for name, value in changes.items() if not name.startswith(_INTERNAL)}
    for title, (name, value) in zip(["environment", *[""] * len(shown)], shown.items(), strict=False):
        yield title, f"{name} (unset)" if value is None else f"{name}={value}"


def _cut(text: str) -> str:
    flat = text.replace("\n", "\\n")
    return flat if len(flat) <= 4 * _WIDTH else flat[: 4 * _WIDTH] + "…"


def _mib(size: int | None) -> str:
    return "none" if size is None else in_mib(size)
