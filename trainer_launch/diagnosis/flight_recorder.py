"""The thread of a forked worker that answers PID 1: what torch's flight recorder knows of its collectives.

It sleeps in a read until PID 1 asks, and knows nothing but what torch has recorded by then. It holds no lock while
it sleeps, and never raises: a program must not notice it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from trainer_launch.diagnosis.collectives import ANSWERS, MAX_GROUPS, MAX_MESSAGES, Stage
from trainer_launch.model.codec import MAX_TEXT
from trainer_launch.model.units import grouped, spans

STACKS_SIGNAL = signal.SIGRTMAX - 1  # asks for the stacks of all threads; torch and we use SIGRTMAX otherwise
MOST = 64  # collectives of each process group that are told
_QUESTION_BYTES = 65536
_LAST_ANSWER_S = 5.0
_REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # on which programs save and leave
_SIZES = 200  # characters of a collective's sizes
_SHAPES = 4  # of a longer one
_REPEATING = 1024  # collectives in which a repetition is looked for
_SAME = 0.05  # a longer repetition has to fit better by so much: the shorter one is a step, that one an evaluation
_ALIKE = 0.02  # the same where all collectives of the shorter one are alike: these may be layers of one step
_DEEPEST = 100  # calls of a thread; faulthandler has as many
_STACKS_CHARS = 200_000  # of all threads; the last is the main thread's
_SHARED = "gloo"  # whose recorder other backends share
_P2P = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")
# Held while a thread of ours is in torch; also while groups are taken down: their last reference must not be ours.
asking = threading.Lock()
_begun_before: dict[str, int] = {}  # operations of each of gloo's groups, when entries were asked for last
_since_ns = 0  # when this process has entered its present generation; 0: it has had no other
Dump: TypeAlias = Callable[..., bytes]  # of one of torch's recorders
Members: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]  # of process groups, by name: titles and ranks


def answer_in_thread(fd: int, rank: Callable[[], int]) -> None:
    """Start the thread, in which no signal of the program's is handled.

    Stacks are written in it: a signal would end a sleep of the main thread in C, whatever the handler's flags.
    """
    import _thread  # threading would show it to the program

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {STACKS_SIGNAL})
    try:
        _thread.start_new_thread(_serve, (fd, rank))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell_of_first_group(fd: int) -> None:
    """Tell PID 1 that it may ask now."""
    with contextlib.suppress(OSError):
        _send(fd, b"\n")


def _serve(fd: int, rank: Callable[[], int]) -> None:
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w", encoding="ascii") as name:
        name.write(ANSWERS)
    while True:
        try:
            data = os.read(fd, _QUESTION_BYTES)
        except OSError:
            return
        if not data:
            return
        for question in _newest(data):
            with asking:
                reply = _reply(question, rank())
            with contextlib.suppress(OSError):
                _send(fd, reply)


def tell_at_end(fd: int, rank: int) -> None:
    """Tell PID 1 unasked, at the program's end, which collectives it entered last: nobody can ask it any more.

    A thread that comes back from torch while the interpreter ends would end the process by SIGABRT.
    """
    if asking.acquire(timeout=_LAST_ANSWER_S):  # and not released; torch may never answer our thread
        with contextlib.suppress(OSError):  # the program may have closed it
            os.set_blocking(fd, False)  # it may not be read for long
            _send(fd, _reply({"number": 0, "at_end": True}, rank))


def _newest(data: bytes) -> list[dict[str, Any]]:
    """Of questions that have waited, the last of each kind: for entries, and for the present state."""
    questions: dict[bool, dict[str, Any]] = {}
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            question = json.loads(line)
            questions[bool(question.get("entries"))] = question
    return [*questions.values()]


def _reply(question: dict[str, Any], rank: int) -> bytes:
    try:
        handlers = [signal.getsignal(number) for number in _REQUESTS]
        handles = any(handler not in (signal.SIG_DFL, signal.SIG_IGN) for handler in handlers)
        reply = {**answer(question, rank), "handles": handles}
    except Exception as problem:  # noqa: BLE001  whatever it is, PID 1 is told, and the program is not
        reply = {"number": question.get("number", 0), "why": f"{type(problem).__name__}: {problem}"[:MAX_TEXT]}
    # A path may have bytes that are no UTF-8, which PID 1 would refuse.
    return json.dumps(reply, ensure_ascii=False).encode(errors="replace") + b"\n"


def answer(question: dict[str, Any], rank: int) -> dict[str, Any]:
    """Save torch's dump in the folder that the question names, if it names one, and tell the last collectives.

    The file has torch's own format and name: `torchfrtrace FOLDER` reads it.
    """
    torch = sys.modules.get("torch")
    recorded = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    number = question["number"]
    if not recorders(recorded, ()):
        return {"number": number, "why": "torch has not been imported, or records nothing"}
    groups, begun = _process_groups(torch), _operations(torch)
    dumps = recorders(recorded, {backend for _, _, backends in groups.values() for backend in backends})
    if question.get("only_far"):
        return {"number": number, "far": far(traces(dumps, ()).values()) + sum(begun.values())}
    if (is_end := question.get("at_end", False)) and not groups:
        return {"number": number, "why": "no process group is left"}
    # Collectives of a device have events, which end with their group, and may do so while a program ends.
    parts = by_backend(_present(traces(dumps, (_SHARED,) if is_end else dumps)), groups)
    if most := question.get("entries"):
        members = {name: about for _, members in parts for name, about in members.items()}
        whole = merged(parts)["entries"]
        rpc = getattr(getattr(torch, "_C", None), "_distributed_rpc", None)  # its waits are not recorded either
        hides = getattr(rpc, "_is_current_rpc_agent_set", bool)() or hides_messages(whole, groups, begun)
        return {
            "number": number,
            "entries": {"rank": rank, "hides_messages": hides, **entered(whole, members, most)},
        }
    saved = 0
    if folder := question.get("folder"):
        dump = pickle.dumps(merged(parts))
        saved = _save(f"{folder}/nccl_trace_rank_{rank}", dump, question.get("until_s") or math.inf)
    groups_of = [progress_of(trace, members, begun) for trace, members in parts]
    stage = Stage.JOINED if groups else Stage.LEFT  # nobody is asked before the first process group
    main_thread = threading.main_thread().ident or 0
    reply = {"number": number, "saved": saved, "stage": stage, "calls": called_by(main_thread)}
    if question.get("stacks"):
        reply["stacks"] = python_stacks(main_thread)
    return {**reply, "groups": {name: group for each in groups_of for name, group in each.items()}}


def python_stacks(main_thread: int) -> str:
    """The calls of all threads but this one, the main thread's last, in faulthandler's words.

    Written in Python: a frame that ends meanwhile stays an object, where faulthandler would read freed memory.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    lines = []
    for thread in sorted(frames, key=lambda each: each == main_thread):
        lines.append(f"Thread 0x{thread:016x} (most recent call first):\n")
        frame: FrameType | None = frames[thread]
        depth = 0
        while frame is not None and depth < _DEEPEST:
            code, depth = frame.f_code, depth + 1
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
            frame = frame.f_back
        lines.append("\n")
    return "".join(lines)[-_STACKS_CHARS:]


def called_by(thread: int | None) -> str:
    """The method that a thread calls on its present line, such as `wait` of torch's work; "": unknown."""
    frame, dis = None if thread is None else sys._current_frames().get(thread), sys.modules.get("dis")
    if frame is None or dis is None:  # to import it may have to wait for the program
        return ""
    code, now = frame.f_code, frame.f_lasti
    start = max((offset for offset, _ in dis.findlinestarts(code) if offset <= now), default=0)
    steps = (step for step in dis.get_instructions(code) if start <= step.offset <= now)
    names = [str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return names[-1][:_SIZES] if names else ""


def _save(path: str, dump: bytes, until_s: float) -> int:
    """Its bytes; 0: it is too late, and the folder may have been cut to its size already."""
    if time.monotonic() > until_s:
        return 0
    with open(f"{path}.new", "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        saved = file.write(dump)
    if time.monotonic() > until_s:
        os.unlink(f"{path}.new")
        return 0
    os.rename(f"{path}.new", path)
    return saved


def recorders(recorded: Any, backends: Iterable[str]) -> dict[str, Dump]:
    """The functions that dump torch's recorders, by backend.

    NCCL has one of its own, all others share gloo's; from torch 2.15 on each of these has its own, and `nccl` is
    another class, with another name. A build for CPUs lacks NCCL's, torch 2.4 lacks gloo's.
    """
    own, shared = (getattr(recorded, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    dumps: dict[str, Dump] = {} if own is None else {"nccl": own}
    if shared is not None:
        dumps[_SHARED] = shared
        if "backend:" in (shared.__doc__ or ""):
            dumps |= {name: partial(shared, backend=name) for name in backends if name not in dumps}
    return dumps


def traces(dumps: Mapping[str, Dump], whole: Collection[str]) -> dict[str, dict[str, Any]]:
    """The content of each of torch's recorders; with collectives only of those of these backends.

    Without stacks, which take seconds; the workers' stacks are collected by themselves.
    """
    asked = {"includeStackTraces": False, "onlyActive": False}
    return {
        backend: pickle.loads(dump(includeCollectives=backend in whole, **asked)) for backend, dump in dumps.items()
    }


def begin_generation() -> None:
    """Ignore from now on what torch has recorded: it is of groups that were left, under the same names."""
    global _since_ns  # noqa: PLW0603
    _since_ns = time.time_ns()


def _present(recorded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without what earlier generations of this process have recorded."""
    if not _since_ns:
        return recorded
    return {
        backend: {
            **trace,
            "entries": [each for each in trace.get("entries") or () if int(each["time_created_ns"]) >= _since_ns],
            "pg_status": {},
        }
        for backend, trace in recorded.items()
    }


def far(recorded: Iterable[Mapping[str, Any]]) -> int:
    """How many collectives all groups have entered and ended, by what the recorders count."""
    statuses = [status for trace in recorded for status in (trace.get("pg_status") or {}).values()]
    counts = ("last_enqueued_collective", "last_completed_collective")
    return sum(max(0, int(status.get(count, 0))) for status in statuses for count in counts)


def by_backend(
    recorded: Mapping[str, dict[str, Any]], groups: Mapping[str, tuple[str, Sequence[int], Sequence[str]]]
) -> list[tuple[dict[str, Any], Members]]:
    """The trace of each recorder, with the process groups that may be in it.

    A group of two backends counts its collectives twice: it becomes two groups.
    """
    parts: list[tuple[dict[str, Any], Members]] = []
    for recorder, trace in recorded.items():
        members, renamed = {}, {}
        for name, (title, ranks, backends) in groups.items():
            by_recorder = grouped((each if each in recorded else _SHARED, each) for each in backends)
            if recorder == next((each for each in by_recorder if each != _SHARED), _SHARED):
                members[name] = title, ranks
            elif recorder in by_recorder:
                others = "/".join(by_recorder[recorder])
                renamed[name] = f"{name}:{others}"
                members[renamed[name]] = f"{title or f'group {name}'} ({others})", ranks
        for entry in trace.get("entries") or ():
            name, title = entry["process_group"]
            entry["process_group"] = renamed.get(name, name), title
        about = {renamed.get(name, name): config for name, config in (trace.get("pg_config") or {}).items()}
        parts.append(({**trace, "pg_config": about}, members))
    return parts


def merged(traces: Sequence[tuple[Mapping[str, Any], Members]]) -> dict[str, Any]:
    """All of it in torch's own format: entries by time, and what each recorder numbers from 0 with other numbers.

    With the groups' members: torch's readers need them, and torch itself may add them for NCCL only.
    """
    whole: dict[str, Any] = {}
    parts, status, config, shift, first = [], {}, dict[str, Any](), 0, 0
    for trace, members in traces:
        entries = trace.get("entries") or ()
        numbers = {int(entry["pg_id"]) for entry in entries} | {int(each) for each in trace.get("pg_status") or ()}
        first += entries[0]["record_id"] if entries else 0
        parts.append([{"frames": [], **entry, "pg_id": entry["pg_id"] + shift} for entry in entries])
        status.update({str(int(n) + shift): value for n, value in (trace.get("pg_status") or {}).items()})
        config.update(trace.get("pg_config") or {})
        for name, (title, ranks) in members.items():
            config.setdefault(name, {"name": name, "desc": title, "ranks": str([*ranks])})
        whole = {**trace, **whole}
        shift += max(numbers, default=-1) + 1
    ordered = heapq.merge(*parts, key=lambda entry: int(entry["time_created_ns"]))
    numbered = [{**entry, "record_id": first + index} for index, entry in enumerate(ordered)]
    return {**whole, "pg_config": config, "pg_status": status, "entries": numbered}


def _process_groups(torch: Any) -> dict[str, tuple[str, Sequence[int], Sequence[str]]]:
    """The title, the members and the backends of each process group that this process is in, by its name."""
    c10d = torch.distributed.distributed_c10d
    world = getattr(c10d, "_world", None)
    configs = getattr(world, "pg_backend_config", {})  # such as `cpu:gloo,cuda:nccl`
    return {
        str(name): (
            _title(group),
            c10d.get_process_group_ranks(group),
            sorted({_backend(torch, group, part) for part in str(configs.get(group, "")).split(",")}),
        )
        for group, name in dict(getattr(world, "pg_names", {})).items()
    }


def _operations(torch: Any) -> dict[str, int]:
    """How many operations this process has begun in each group, messages included; gloo does not record these."""
    begun = {}
    for group, name in dict(getattr(torch.distributed.distributed_c10d._world, "pg_names", {})).items():
        with contextlib.suppress(Exception):  # a backend that does not count them
            begun[str(name)] = int(group._get_sequence_number_for_group())
    return begun


def hides_messages(
    entries: Iterable[Mapping[str, Any]],
    groups: Mapping[str, tuple[str, Sequence[int], Sequence[str]]],
    begun: Mapping[str, int],
) -> bool:
    """Whether this rank sends or receives messages of gloo's, which are not recorded.

    A group without entries may have had some that were dropped: it must have begun more since this was asked last.
    """
    global _begun_before
    latest = {entry["process_group"][0]: int(entry["collective_seq_id"]) for entry in entries}
    now = {name: begun.get(name, 0) for name, (_, _, backends) in groups.items() if [*backends] == [_SHARED]}
    before, _begun_before = _begun_before, now
    return any(count > latest.get(name, before.get(name, 0)) for name, count in now.items())


def _backend(torch: Any, group: Any, part: str) -> str:
    """The name by which a group's backend records, for a part such as `cuda:nccl` of its configuration."""
    device, _, backend = part.rpartition(":")
    with contextlib.suppress(Exception):  # an older torch, or a device that this machine lacks
        return str(group._get_backend(torch.device(device)).name()).replace(":", "_")
    return backend


def _title(group: Any) -> str:
    title = str(group.group_desc)
    return "" if title == "undefined" else title[:_SIZES]  # torch's word where the program gives none


def progress_of(
    trace: Mapping[str, Any], members: Members, begun: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Of each process group: its members, how far this rank is, and its last collectives.

    A collective is [number, operation, sizes, ns since the epoch]. Numbers are the entries': torch's status, and
    what a group has begun, count point-to-point operations as well. That counts only where entries were not asked
    for, or those of other groups have taken the place of its own. With TORCH_DISTRIBUTED_DEBUG=DETAIL gloo's have
    no group's name.
    """
    by_name = grouped((entry["process_group"][0], entry) for entry in trace.get("entries") or ())
    statuses = (trace.get("pg_status") or {}).values()  # which groups have that enter collectives
    n_entered = sum(int(status.get("last_enqueued_collective", 0)) > 0 for status in statuses)
    is_cut = n_entered > len(by_name) and not by_name.keys().isdisjoint(members)
    counts_begun, groups = "entries" not in trace or is_cut, {}
    for name, (title, ranks) in members.items():
        begun_of = (begun or {}).get(name, 0)
        entered = begun_of if counts_begun else 0
        group = {"title": title, "ranks": _spans(ranks), "begun": begun_of, "entered": entered, "done": entered}
        groups[name] = {**group, **_recorded(by_name[name], ranks)} if name in by_name else group
    return groups


def _spans(ranks: Sequence[int]) -> str:
    """Empty, which is unknown, where so many are without any order that an answer would be refused."""
    text = spans(ranks)
    return text if len(text) <= MAX_TEXT else ""


def _recorded(entries: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """How far a group is by its own entries; of operations that were made one, NCCL retires only the last."""
    over: dict[int, bool] = {}
    collectives, messages = list[tuple[int, str, Mapping[str, Any]]](), list[list[Any]]()
    for before, entry in zip(({}, *entries), entries, strict=False):
        operation, number = str(entry["profiling_name"]).rpartition(":")[2], int(entry["collective_seq_id"])
        is_over = bool(entry.get("retired"))
        # NCCL's are retired later than completed; one that is retired but not completed has timed out.
        if str(entry["profiling_name"]).startswith("nccl:") and "state" in entry:
            is_over = entry["state"] == "completed"
        # torch does not always mark the end of sends that were made one as such; it has no new number.
        is_end = operation == "coalesced" and before.get("is_p2p") and before["collective_seq_id"] == number
        if is_end and is_over:
            messages.clear()
        if (message := _P2P.match(operation)) and not is_over and int(message[2]) < len(ranks):
            messages.append([message[1], ranks[int(message[2])], int(entry["time_created_ns"])])
        if entry.get("is_p2p") or is_end or not number:
            continue
        over[number] = is_over
        collectives.append((number, operation[:_SIZES], entry))
    entered = max(int(entry["collective_seq_id"]) for entry in entries)  # a message has the last one's
    return {
        "last": [[*what, _sizes(entry), int(entry["time_created_ns"])] for *what, entry in collectives[-MOST:]],
        "messages": messages[:MAX_MESSAGES],
        "entered": entered,
        "done": min((number - 1 for number, is_over in over.items() if not is_over), default=entered),
    }


def _sizes(entry: Mapping[str, Any]) -> str:
    """The sizes and types of the tensors; of many tensors the first ones, how many, and their elements."""
    shapes, types = entry.get("input_sizes"), entry.get("input_dtypes") or ()
    text = f"{shapes} {' '.join(types)}".strip()
    if shapes and len(text) > _SIZES:
        count = f"{len(shapes)} tensors of {sum(map(math.prod, shapes))} elements"
        text = f"{str([*shapes[:_SHAPES]])[:-1]}, ...] ({count}) {' '.join(dict.fromkeys(types))}"
    return text[:_SIZES]


def entered(recorded: Sequence[Mapping[str, Any]], members: Members, most: int) -> dict[str, Any]:
    """The last entries of all groups, in order, and how long one repetition of them takes.

    In a training loop that is a step: each step enters the same operations with the same sizes.
    """
    own = [entry for entry in recorded if entry["process_group"][0] in members]
    kinds = [(entry["process_group"][0], entry["profiling_name"], str(entry.get("input_sizes"))) for entry in own]
    times = [int(entry["time_created_ns"]) for entry in own]
    step_ns, repeats = _repetition(kinds[-_REPEATING:], times[-_REPEATING:])
    rows, is_cut = _consecutive(own[-most:])
    names = list(dict.fromkeys(name for name, number, _ in rows if number))[:MAX_GROUPS]
    firsts = {name: number for name, number, _ in reversed(rows) if number}
    before = [rows[0][2] if rows else 0, *(at_ns for _, _, at_ns in rows)]
    return {
        "step_us": step_ns // 1000,
        "repeats": repeats,
        "is_cut": is_cut or len(own) > most or any(firsts[name] > 1 for name in names),
        "groups": [[name, _spans(members[name][1]), firsts[name]] for name in names],
        "start_ns": before[0],
        "which": [names.index(name) if number and name in names else MAX_GROUPS for name, number, _ in rows],
        "gaps_us": [
            max(0, (at_ns - before[0]) // 1000 - (earlier - before[0]) // 1000)
            for (_, _, at_ns), earlier in zip(rows, before, strict=False)
        ],
    }


def _consecutive(entries: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, int, int]], bool]:
    """Group, number, 0 for point-to-point, and time; of each group no number is missing or there twice."""
    rows: list[tuple[str, int, int]] = []
    latest: dict[str, int] = {}
    is_cut = False
    for entry in entries:
        name, number = entry["process_group"][0], 0 if entry.get("is_p2p") else int(entry["collective_seq_id"])
        if number and number <= latest.get(name, 0):  # operations that were made one
            continue
        if number and name in latest and number != latest[name] + 1:
            rows, latest, is_cut = [], {}, True
        if number:
            latest[name] = number
        rows.append((name, number, int(entry["time_created_ns"])))
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


def _send(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
