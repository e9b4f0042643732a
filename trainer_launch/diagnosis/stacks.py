"""Stacks of workers: asked for by a signal, as faulthandler writes them; where a main thread is, in one phrase.

A forked worker and what it has forked write to one file. A handler does so, whatever the main thread is in.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, zip_longest

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import ANSWERS, Doing
from trainer_launch.diagnosis.hang_detection import WatchedWorker, label
from trainer_launch.host import files, process_tree
from trainer_launch.host.slow_files import within
from trainer_launch.model.codec import MAX_TEXT

STACKS_SIGNAL = signal.SIGRTMAX - 1  # on which a forked worker writes its threads' stacks
_MAX_BYTES = 1 << 20
_CALLS = 16  # of a main thread that other nodes are told
_ANSWER_S = 0.5  # for one process to write its stacks
ALL_ANSWERS_S = 3.0  # for all of them: PID 1 waits so long at most
_LOOK_S = 0.005  # a file that has not grown for so long is complete
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}) in (?P<function>.*)$')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen |/multiprocessing/|/trainer_launch/|<string>")
# Where a rank waits for the others: in a collective, or in what torch runs one from.
_COLLECTIVE = re.compile(r"torch/(distributed/(?!elastic|launcher|checkpoint)|autograd/|nn/parallel/)")
# FILE:FUNCTION of any call, in this order: a checkpoint may be saved by collectives or sent somewhere, a data
# loader may wait for a debugger's prompt or read from a remote file system, and a compiler may be another program.
_IN = {
    Doing.DEBUGGER: r"/(pdb|bdb|ipdb|pydevd[^/]*)\.py:|/debugpy/",
    Doing.CHECKPOINT: r"torch/(serialization\.py:|distributed/checkpoint/)|/(safetensors|dist_checkpointing)/"
    r"|/deepspeed/(checkpoint|runtime/checkpoint_engine)/|/megatron/.*/checkpointing\.py:"
    r"|/accelerate/checkpointing\.py:|/orbax/checkpoint/|lightning/(fabric|pytorch)/plugins/io/"
    r"|/(pytorch_lightning|lightning/pytorch)/.*(model_checkpoint|checkpoint_connector)\.py:_?(save|dump|restore|resume)"
    r"|:_?(save|load)_(checkpoint|pretrained|optimizer_and_scheduler)$",
    # Every call of a compiled function is in eval_frame.py, output_code.py or runtime_wrappers.py.
    Doing.COMPILING: r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py:|/triton/compiler/"
    r"|torch/_inductor/(compile_fx\w*|codecache|async_compile|cpp_builder|graph|scheduler)\.py:(?!(run|__call__)$)"
    r"|torch/_functorch/_aot_autograd/runtime_wrappers\.py:get_or_compile$",
    Doing.DATA: r"torch/utils/data/",
    Doing.TRANSFER: r"/(shutil|socket|ssl|ftplib|http/client|urllib/request)\.py:"
    r"|/(boto3|botocore|s3transfer|s3fs|fsspec|gcsfs|adlfs|huggingface_hub|urllib3|requests|httpx|aiohttp|paramiko)/"
    r"|/(google/cloud/storage|azure/storage)/",
    # What no call shows, such as a program that a rank waits for, worker_samples.py tells.
}
_OURS = re.compile(r"/trainer_launch/diagnosis/flight_recorder\.py$")  # the thread that answers PID 1
_AT_EXIT = re.compile(r"/threading\.py:_shutdown$|/concurrent/futures/(thread|process)\.py:_python_exit$")
# Torch's, multiprocessing's and concurrent.futures' loops of a process that waits for work.
_POOLS = ("_worker_loop", "worker", "_process_worker")
# FILE:FUNCTION of a main thread that waits for threads, and of the loops that these run.
_AWAITS = (
    (
        r"/concurrent/futures/_base\.py:(result|wait|as_completed)$|/asyncio/base_events\.py:_run_once$",
        r"/concurrent/futures/thread\.py:_worker$",
    ),
    (r"/multiprocessing/pool\.py:(get|wait|next)$", r"/multiprocessing/pool\.py:worker$"),
    (r"/threading\.py:join$", r"/threading\.py:run$"),
)
_DECORATORS = ("wrapper", "decorate_context", "inner", "_fn")


class Frame(Struct, frozen=True):
    """A call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether this is not the user's own code."""
        return _LIBRARY.search(self.file) is not None

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


def ask(workers: Collection[WatchedWorker]) -> dict[WatchedWorker, int]:
    """Let all workers write their stacks at the same time; sizes of their files before, of those that can."""
    asked = {worker: _ask(worker.stacks, worker.pid) for worker in workers if worker.stacks is not None}
    return {worker: before for worker, before in asked.items() if before is not None}


def answers(asked: Mapping[WatchedWorker, int], until_s: float) -> dict[int, str]:
    """The stacks that workers have written by then, by pid; of those that are not done, what is there."""
    sizes, written = dict(asked), dict[int, str]()
    while len(written) < len(asked) and time.monotonic() < until_s:
        for worker in [worker for worker in asked if worker.pid not in written]:
            last, sizes[worker] = sizes[worker], size(worker.stacks)
            if last == sizes[worker] > asked[worker]:
                written[worker.pid] = _tail(worker.stacks or "", asked[worker])
        if len(written) < len(asked):
            time.sleep(_LOOK_S)
    texts = {worker.pid: _tail(worker.stacks or "", asked[worker]) for worker in asked if worker.pid not in written}
    return written | {pid: text for pid, text in texts.items() if text}


def ask_all(children: Mapping[WatchedWorker, Collection[process_tree.ProcessEntry]]) -> dict[int, str]:
    """Let workers and what each has forked write their stacks, side by side but for those that share a file."""
    end_s, texts = time.monotonic() + ALL_ANSWERS_S, dict[int, str]()
    pids = [(worker.pid, *(entry.pid for entry in entries)) for worker, entries in children.items()]
    for column in zip_longest(*pids):
        asked = ask([replace(w, pid=pid) for w, pid in zip(children, column, strict=True) if pid is not None])
        texts |= answers(asked, min(end_s, time.monotonic() + _ANSWER_S))
    return texts


def _ask(path: str | None, pid: int) -> int | None:
    """Send the signal; the size of the file before, None: this process cannot answer."""
    entry = None if path is None else process_tree.read(pid)
    if entry is None or entry.state in "TtDZX" or not process_tree.catches(pid, STACKS_SIGNAL):
        return None
    # The thread that answers PID 1 sleeps in Python, which goes on. A sleep of the program's in C would end.
    before, thread = size(path), process_tree.thread_named(pid, ANSWERS)
    if thread is None and process_tree.is_connecting(pid):  # to a store, perhaps: torch would give up
        return None
    if thread is None or not process_tree.send(thread, STACKS_SIGNAL):
        process_tree.send(pid, STACKS_SIGNAL)
    return before


def size(path: str | None) -> int:
    """Of what has been written there so far."""
    status = status_of(path) if path else None
    return 0 if status is None else status.st_size


def status_of(path: str) -> os.stat_result | None:
    """None where nothing is, or where its file server does not answer."""
    try:
        return within(path, None, os.stat, path)
    except OSError:
        return None


def _tail(path: str, start: int) -> str:
    return (files.read(path, _MAX_BYTES, start) or b"").decode(errors="replace")


def _threads(text: str) -> list[list[Frame]]:
    """The calls of all threads but ours, innermost first; the main thread is the oldest, and comes last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        start, frame = _THREAD.match(line), _FRAME.match(line)
        if start:
            threads.append([])
        elif frame and threads:
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return [frames for frames in threads if not any(_OURS.search(frame.file) for frame in frames)]


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's calls, innermost first, of the last dump in `text`; empty when there is none.

    Of a program that waits in torch's RPC, those of a thread that runs a call of another rank.
    """
    *others, main = _threads(text) or [[]]
    if _is_in(main, "torch/distributed/rpc/"):
        runs = [frames for frames in others if _is_in(frames, r"torch/distributed/rpc/internal\.py:_run_function$")]
        main = min(runs, key=lambda frames: waits_for_others(tuple(frames)) is True, default=main)
    return tuple(main)


def at_exit(text: str) -> str:
    """Where a program that has ended still waits for a thread of its own, in one phrase; "": it has not ended."""
    if not any(_AT_EXIT.search(f"{frame.file}:{frame.function}") for frame in main_thread(text)):
        return ""
    users = [frame for frames in _threads(text)[:-1] for frame in frames if not frame.is_library]
    return "at its exit, waiting for a thread" + (f" in {users[0]}" if users else "")


def doing(frames: tuple[Frame, ...]) -> Doing:
    """The activity of the main thread: by a call around it, or a collective at its innermost."""
    for kind, pattern in _IN.items():
        if _is_in(frames, pattern):
            return kind
    return Doing.COLLECTIVE if waits_for_others(frames) else Doing.UNKNOWN


def awaits_transfer(text: str) -> bool:
    """Whether the main thread waits for a thread, and all threads that this may be are in a transfer of files."""
    *others, main = _threads(text) or [[]]
    for waits, loop in _AWAITS:
        if _is_in(main, waits):
            busy = [frames for frames in others if _is_in(frames, loop) and not _is_in(frames[:1], loop)]
            return bool(busy) and all(doing(tuple(frames)) is Doing.TRANSFER for frames in busy)
    return False


def _is_in(frames: Sequence[Frame], pattern: str) -> bool:
    return any(re.search(pattern, f"{frame.file}:{frame.function}") for frame in frames)


def waits_for_others(frames: tuple[Frame, ...]) -> bool | None:
    """Whether this is a rank that waits for other ranks; None: nothing is known of it."""
    inner = [frame for frame in down_to_user(frames) if frame.is_library]
    return any(_COLLECTIVE.search(frame.file) for frame in inner) if frames else None


def waits_for_work(frames: tuple[Frame, ...]) -> bool:
    """Whether this is a process of a data loader or a pool that nobody has given anything to do."""
    return any(
        inner.function == "get" and inner.file.endswith("/multiprocessing/queues.py") and outer.function in _POOLS
        for inner, outer in pairwise(frames)
    )


def calls(frames: tuple[Frame, ...]) -> str:
    """The innermost calls down from the user's outermost, one on each line."""
    most = max((depth for depth, frame in enumerate(frames, 1) if not frame.is_library), default=len(frames))
    shown = frames[: min(most, _CALLS)]
    return "\n".join(f"{frame.file}:{frame.line} ({frame.function})" for frame in shown)[:MAX_TEXT]


def where(frames: tuple[Frame, ...]) -> str:
    """The user's own innermost line, and the library call that it is in, in a phrase."""
    down = down_to_user(frames)
    user = down[-1] if down and not down[-1].is_library else None
    inner = [frame for frame in down if frame.is_library]
    calls = [frame for frame in reversed(inner) if frame.function not in _DECORATORS]
    if user is None:
        return f"in {frames[0]}" if frames else "unknown"
    if not calls:
        return f"in {user}"
    waits = "waits in" if waits_for_others(frames) else "in"
    return f"{waits} {calls[0].function}, called from {user}"


def stacks_digest(places: Mapping[WatchedWorker, str]) -> tuple[str, ...]:
    """Alike ranks together: `ranks 0-2,4-7: waits in all_reduce, called from train.py:31 (main)`."""
    groups: dict[str, list[WatchedWorker]] = {}
    for worker, place in places.items():
        groups.setdefault(place, []).append(worker)
    few_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return tuple(f"{label(workers)}: {place}" for place, workers in few_first)


def down_to_user(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The calls from the innermost to the user's own innermost; all where none is the user's."""
    for depth, frame in enumerate(frames):
        if not frame.is_library:
            return frames[: depth + 1]
    return frames
