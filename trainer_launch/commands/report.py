"""The table of `explain` for people, made of the same object that --json prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, cast

from trainer_launch.sizes import counted, in_mib

_NO_PLATFORM = """No platform was recognised: no variable or file of a training controller is here.
  In a pod:     the controller injects them into the trainer's container only; an init container or a sidecar
                needs envInjection (Trainer v2), and a job without spec.trainer gets none.
  By hand:      trainer-launch run --nodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 -- train.py
  On a laptop:  trainer-launch local --nodes 2 --nproc-per-node 2 -- train.py
  Another pod:  trainer-launch explain --pod pod.json   (written there by --save-pod pod.json)
"""
_WIDTH = 100


def table(explained: Mapping[str, Any]) -> str:
    """The whole report; ends with a newline."""
    known = explained["contract"] != "unknown"
    parts = [f"Contract: {explained['contract']}\n" if known else _NO_PLATFORM]
    parts += _section("Job", _pairs(explained["job"], hide=("contract",)))
    parts += _section("Read", _read(explained["facts"]["read"]))
    parts += _section("Machine", _machine(**explained["facts"]))
    parts += _section("Plan", _plan(explained["plan"]))
    parts += _section("Warnings", [("-", text) for text in explained["warnings"]])
    return "\n".join(parts)


def _section(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    if not listed:
        return []
    width = min(30, max(len(name) for name, _ in listed))
    lines = [f"  {name:<{width}}  {_cut(value)}" for name, value in listed]
    return [f"{title}\n" + "\n".join(lines) + "\n"]


def _pairs(values: Mapping[str, Any], hide: tuple[str, ...]) -> list[tuple[str, str]]:
    """Only what is known; unknown keys would drown it."""
    known = {name: value for name, value in values.items() if value is not None and name not in hide}
    if known.get("status_enabled") is False:
        del known["status_enabled"], known["should_report_progress"]  # the rule; only the exception is worth a line
    return [(name, _text(value)) for name, value in known.items()]


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


def _plan(plan: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if plan is None:
        return []
    rows = list(plan["because"].items())
    if plan["engine"] is None:
        return [*rows, ("engine", "none: give the command after -- to see what would run")]
    rows.append(("engine", f"{plan['engine']} ({'; '.join(plan['reasons'])})"))
    if plan["wait_for"]:
        rows.append(("waits for", ", ".join(plan["wait_for"])))
    if plan.get("hosting"):
        rows.append(("coordinator here", _hosting(plan["hosting"])))
    for process in plan["processes"]:
        rows.append((process["name"], shlex.join(process["argv"])))
        rows += [("  " + name, _text(value)) for name, value in process["env_changes"].items()]
    if plan["hang_timeout"] is not None:
        rows.append(("hang watch", f"--hang-timeout {plan['hang_timeout']}"))
    rows.append(("stop", f"SIGTERM to the {plan['stop_order']} first, SIGKILL after {plan['grace_s']:g} s"))
    actions = (f"{name} {action}" for name, action in plan["signals"].items())
    rows.append(("signals", ", ".join((*actions, "all others forward"))))
    return rows


def _hosting(hosting: Mapping[str, Any]) -> str:
    nodes = hosting["nodes"]
    window_s = hosting["restart_window_s"]
    parts = [
        f"{hosting['host'] or '*'}:{hosting['port']}",
        f"{nodes['min']} to {nodes['max']} nodes",
        counted(hosting["max_restarts"], "failure") + ("" if window_s is None else f" within {window_s:g} s"),
        f"a lost node is waited for {hosting['rejoin_timeout_s']:g} s",
    ]
    if nodes["min"] < nodes["max"]:
        parts.append(f"fewer go on after {hosting['shrink_after_s']:g} s")
    if hosting["secret_file"] is not None:
        parts.append(f"secret in {hosting['secret_file']}")
    return ", ".join(parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    flat = text.replace("\n", "\\n")
    return flat if len(flat) <= 4 * _WIDTH else flat[: 4 * _WIDTH] + "…"


def _mib(size: int | None) -> str:
    return "none" if size is None else in_mib(size)
