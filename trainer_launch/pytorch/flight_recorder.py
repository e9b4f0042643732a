"""The thread of a forked worker that answers PID 1: what torch's flight recorder knows of its collectives.

It sleeps in a read until PID 1 asks, and knows nothing but what torch has recorded by then. It holds no lock while
it sleeps, and never raises: a program must not notice it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_launch.model.collectives import spans

MOST = 64  # collectives of each process group that are told
_QUESTION_BYTES = 65536


def answer_in_thread(fd: int, rank: int) -> None:
    """Start the thread; the caller has blocked all signals, so that the program's own threads get them."""
    import _thread  # threading would show it to the program

    _thread.start_new_thread(_serve, (fd, rank))


def _serve(fd: int, rank: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            question = os.read(fd, _QUESTION_BYTES)
        except OSError:
            return
        if not question:
            return
        try:
            said = answer(json.loads(question.splitlines()[-1]), rank)
        except Exception as problem:  # noqa: BLE001  whatever it is, PID 1 is told, and the program is not
            said = {"why": f"{type(problem).__name__}: {problem}"}
        try:
            _send(fd, json.dumps(said).encode() + b"\n")
        except OSError:
            return


def answer(question: dict[str, Any], rank: int) -> dict[str, Any]:
    """Save torch's dump in the folder that the question names, if it names one, and tell the last collectives.

    The file has torch's own format and name: `torchfrtrace FOLDER` reads it.
    """
    torch = sys.modules.get("torch")
    recorded = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    if recorded is None or not hasattr(recorded, "_dump_fr_trace_json"):
        return {"number": question["number"], "why": "torch has not been imported, or records nothing"}
    number = question["number"]
    if question.get("only_far"):
        trace = json.loads(recorded._dump_fr_trace_json(includeCollectives=False, onlyActive=False))
        return {"number": number, **told(trace, dict.fromkeys(trace.get("pg_status") or (), ("", ())))}
    members = _members(torch)
    saved = 0
    if folder := question.get("folder"):
        path, dump = f"{folder}/nccl_trace_rank_{rank}", _dump(recorded, members)
        with open(f"{path}.new", "wb") as file:
            saved = file.write(dump)
        os.rename(f"{path}.new", path)
    trace = json.loads(recorded._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    return {"number": number, "saved": saved, **told(trace, members)}


def _dump(recorded: Any, members: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """With the groups' members: torch's readers need them, and torch itself adds them for NCCL only.

    Without stacks, which take seconds; the workers' stacks are collected by themselves.
    """
    data: bytes = recorded._dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    dump = pickle.loads(data)
    groups = dump.setdefault("pg_config", {})
    for name, (title, ranks) in members.items():
        groups.setdefault(name, {"name": name, "desc": title, "ranks": str([*ranks])})
    for entry in dump.get("entries", ()):
        entry.setdefault("frames", [])
    return pickle.dumps(dump)


def _members(torch: Any) -> dict[str, tuple[str, Sequence[int]]]:
    """The title and the members of each process group that this process is in, by its name."""
    c10d = torch.distributed.distributed_c10d
    names = dict(getattr(getattr(c10d, "_world", None), "pg_names", {}))
    return {str(name): (_title(group), c10d.get_process_group_ranks(group)) for group, name in names.items()}


def _title(group: Any) -> str:
    title = str(group.group_desc)
    return "" if title == "undefined" else title  # torch's word where the program gives none


def told(trace: Mapping[str, Any], members: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Of each process group: its members, how far this rank is, and its last collectives.

    A collective is [number, operation, sizes, ns since the epoch]. Which one has ended last is taken from the
    collectives: two threads of gloo's write the status, and the slower one leaves an older number there.
    """
    groups: dict[str, dict[str, Any]] = {
        name: {"title": title, "ranks": spans(ranks), "entered": 0, "done": 0, "last": []}
        for name, (title, ranks) in members.items()
    }
    for name, status in (trace.get("pg_status") or {}).items():
        group = groups.get(name)
        if group is not None:
            group["entered"] = max(0, int(status.get("last_enqueued_collective", 0)))
            group["done"] = max(0, int(status.get("last_completed_collective", 0)))
    open_numbers: dict[str, int] = {}
    for entry in trace.get("entries") or ():
        name = entry["process_group"][0]
        group = groups.get(name)
        if group is None or entry.get("is_p2p"):
            continue
        number = int(entry["collective_seq_id"])
        if entry.get("retired", number <= group["done"]):
            group["done"] = max(group["done"], number)
        else:
            open_numbers[name] = min(number, open_numbers.get(name, number))
        group["entered"] = max(group["entered"], number)
        operation = str(entry["profiling_name"]).rpartition(":")[2]
        sizes = f"{entry.get('input_sizes')} {' '.join(entry.get('input_dtypes') or ())}".strip()
        group["last"] = [*group["last"][1 - MOST :], [number, operation, sizes, int(entry["time_created_ns"])]]
    for name, number in open_numbers.items():
        groups[name]["done"] = min(groups[name]["done"], number - 1)
    return {"groups": groups}


def _send(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
