"""The thread of a forked worker that answers PID 1: what torch's flight recorder knows of its collectives.

It sleeps in a read until PID 1 asks, and knows nothing but what torch has recorded by then. It holds no lock while
it sleeps, and never raises: a program must not notice it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_launch.model.collectives import MAX_GROUPS, MAX_LOOKS, spans

MOST = 64  # collectives of each process group that are told
_QUESTION_BYTES = 65536


def answer_in_thread(fd: int, rank: int) -> None:
    """Start the thread; the caller has blocked all signals, so that the program's own threads get them."""
    import _thread  # threading would show it to the program

    _thread.start_new_thread(_serve, (fd, rank, _thread.get_ident()))


def _serve(fd: int, rank: int, main_thread: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    sample: _Sample | None = None
    while True:
        if poll.poll(None if sample is None else sample.pause_ms()):
            try:
                data = os.read(fd, _QUESTION_BYTES)
            except OSError:
                return
            if not data:
                return
            for question in _newest(data):
                if question.get("entries"):
                    sample = _Sample(question, main_thread)
                else:
                    _reply(fd, question, rank)
        elif sample is not None:
            sample.look()
        if sample is not None and sample.is_over:
            _reply(fd, sample.question, rank, sample.seen)
            sample = None


def tell_at_end(fd: int, rank: int) -> None:
    """Tell PID 1 unasked, at the program's end, which collectives it entered last: nobody can ask it any more."""
    with contextlib.suppress(OSError):  # the program may have closed it
        os.set_blocking(fd, False)  # it may not be read for long
        _reply(fd, {"number": 0}, rank)


def _newest(data: bytes) -> list[dict[str, Any]]:
    """Of questions that have waited, the last of each kind: those for entries take their time, the others none."""
    questions: dict[bool, dict[str, Any]] = {}
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            question = json.loads(line)
            questions[bool(question.get("entries"))] = question
    return [*questions.values()]


def _reply(fd: int, question: dict[str, Any], rank: int, looks: Sequence[tuple[int, list[str]]] = ()) -> None:
    try:
        said = {**answer(question, rank), "looks": looks}
    except Exception as problem:  # noqa: BLE001  whatever it is, PID 1 is told, and the program is not
        said = {"number": question.get("number", 0), "why": f"{type(problem).__name__}: {problem}"}
    with contextlib.suppress(OSError):
        _send(fd, json.dumps(said).encode() + b"\n")


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
    if most := question.get("entries"):
        dump = pickle.loads(
            recorded._dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        )
        return {"number": number, "entries": {"rank": rank, **entered(dump.get("entries", ()), members, most)}}
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
    entries = trace.get("entries") or ()
    numbers = {str(entry["pg_id"]): entry["process_group"][0] for entry in entries if "pg_id" in entry}
    for number, status in (trace.get("pg_status") or {}).items():
        group = groups.get(_name_of(number, numbers, [*groups]))
        if group is not None:
            group["entered"] = max(0, int(status.get("last_enqueued_collective", 0)))
            group["done"] = max(0, int(status.get("last_completed_collective", 0)))
    open_numbers: dict[str, int] = {}
    for entry in entries:
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


def _name_of(number: str, numbers: Mapping[str, str], names: Sequence[str]) -> str:
    """Which group a status is of: torch numbers the groups that this rank is in, in the order of their making."""
    if number in numbers or not numbers:
        return numbers.get(number, number)
    return names[int(number)] if number.isdecimal() and int(number) < len(names) else number


# -- when the last collectives were entered ------------------------------------------------------


_REPEATING = 1024  # collectives in which a repetition is looked for
_SAME = 0.05  # a longer repetition has to fit better by so much: the shorter one is a step, that one an evaluation
_ALIKE = 0.02  # the same where all collectives of the shorter one are alike: these may be layers of one step
_LOOKS = 40
_FRAMES = 24  # of a look


def entered(
    recorded: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[str, Sequence[int]]], most: int
) -> dict[str, Any]:
    """The last entries of all groups, in order, and how long one repetition of them takes.

    In a training loop that is a step: each step enters the same operations with the same sizes.
    """
    known = [one for one in recorded if one["process_group"][0] in members]
    kinds = [(one["process_group"][0], one["profiling_name"], str(one.get("input_sizes"))) for one in known]
    times = [int(one["time_created_ns"]) for one in known]
    step_ns, repeats = _repetition(kinds[-_REPEATING:], times[-_REPEATING:])
    rows, is_cut = _consecutive(known[-most:])
    names = list(dict.fromkeys(name for name, number, _ in rows if number))[:MAX_GROUPS]
    firsts = {name: number for name, number, _ in reversed(rows) if number}
    before = [rows[0][2] if rows else 0, *(at_ns for _, _, at_ns in rows)]
    return {
        "step_us": step_ns // 1000,
        "repeats": repeats,
        "is_cut": is_cut or len(known) > most or any(firsts[name] > 1 for name in names),
        "groups": [[name, spans(members[name][1]), firsts[name]] for name in names],
        "start_ns": before[0],
        "which": [names.index(name) if number and name in names else MAX_GROUPS for name, number, _ in rows],
        "gaps_us": [
            max(0, (at_ns - before[0]) // 1000 - (earlier - before[0]) // 1000)
            for (_, _, at_ns), earlier in zip(rows, before, strict=False)
        ],
    }


def _consecutive(known: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, int, int]], bool]:
    """Group, number, 0 for point-to-point, and time; of each group no number is missing or there twice."""
    rows: list[tuple[str, int, int]] = []
    latest: dict[str, int] = {}
    is_cut = False
    for one in known:
        name, number = one["process_group"][0], 0 if one.get("is_p2p") else int(one["collective_seq_id"])
        if number and number <= latest.get(name, 0):  # operations that were made one
            continue
        if number and name in latest and number != latest[name] + 1:
            rows, latest, is_cut = [], {}, True
        if number:
            latest[name] = number
        rows.append((name, number, int(one["time_created_ns"])))
    return rows, is_cut


def _repetition(kinds: Sequence[object], times: Sequence[int]) -> tuple[int, int]:
    """After how long, and how many, the same kinds come again in their order; 0: they do not."""
    numbers: dict[object, int] = {}
    text = bytes(min(255, numbers.setdefault(kind, len(numbers))) for kind in kinds)
    shares = {lag: _share(text, lag) for lag in range(1, len(text) // 2 + 1)}
    best = max(shares.values(), default=0.0)
    if best < 0.5:
        return 0, 0
    lag = next(lag for lag, share in shares.items() if share >= best - (_ALIKE if lag == 1 else _SAME))
    lasted = sorted(later - at_ns for at_ns, later in zip(times, times[lag:], strict=False))
    return max(0, lasted[len(lasted) // 2]), lag


def _share(text: bytes, lag: int) -> float:
    """Of the bytes that are the same as `lag` later; whole numbers compare them all at once."""
    size = len(text) - lag
    differences = int.from_bytes(text[:-lag], "big") ^ int.from_bytes(text[lag:], "big")
    return differences.to_bytes(size, "big").count(0) / size


class _Sample:
    """A question for the last collectives, answered after its time; until then the main thread may be looked at."""

    def __init__(self, question: dict[str, Any], main_thread: int) -> None:
        self.question = question
        self.seen: list[tuple[int, list[str]]] = []
        self._thread = main_thread if question.get("looks") else None
        self._for_s = float(question.get("after_us", 0)) / 1e6
        self._until_s = time.monotonic() + self._for_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s or len(self.seen) >= MAX_LOOKS

    def pause_ms(self) -> float:
        """Until the next look, or the answer."""
        left_s = max(0.0, self._until_s - time.monotonic())
        if self._thread is None:
            return 1000 * left_s
        jitter = 0.5 + time.time_ns() // 1000 % 1000 / 1000  # the program's random numbers are its own
        return 1000 * min(left_s, jitter * self._for_s / _LOOKS)

    def look(self) -> None:
        """Note where the main thread is."""
        stack: list[str] = []
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        while frame is not None and len(stack) < _FRAMES:
            stack.append(f"{frame.f_code.co_filename[-500:]}:{frame.f_lineno}:{frame.f_code.co_name}")
            frame = frame.f_back
        if stack:
            self.seen.append((time.time_ns(), stack))


def _send(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
