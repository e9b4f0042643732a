"""Situations as users meet them: for most, what must and must not be told, as several wordings are right."""

from __future__ import annotations

from pathlib import Path

from tests.incidents.catalogue import BOTH, END, ended, hang, healthy
from tests.incidents.running import Situation

JOB = Path(__file__).with_name("field_job.py")
HANG = (*BOTH, *END)
MAYBE = (None, True)  # a restart may help, or nobody knows
_DETAIL = (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)
_NETWORK = "network or a device"
_BEFORE = "before its first collective"


def hung(act: str, text: str, rank: int | tuple[int | None, ...], **more) -> Situation:
    """Ended as hung; one rank is at fault, whatever the words."""
    words = {"reason": "Hung", "exit_code": 138, "retryable": MAYBE, "options": HANG, "job": JOB}
    return Situation(act=act, text=text, rank=rank, **{"sentence": f"…rank {rank}…", **words, **more})


def endless(act: str, text: str) -> Situation:
    """Rank 1 computes for ever: told within a minute, at least as information."""
    words = {
        "sentence": "…rank 1…never entered all_reduce…",
        "reason": ("Hung", "Stopped"),
        "exit_code": (138, 143),
    }
    return hung(act, text, (None, 1), retryable=(), options=BOTH, ends="suspect", **words)


def failed(act: str, text: str, sentence: str, **more) -> Situation:
    """Rank 1 fails, and nothing says that a restart cannot help."""
    words = {"reason": "Failed", "exit_code": 1, "rank": 1, "retryable": MAYBE, "options": END, "job": JOB}
    return Situation(act=act, text=text, sentence=sentence, **{**words, **more})


def left(act: str, text: str, **more) -> Situation:
    """A healthy job of `field_job`, whose wait is twice `--hang-timeout`."""
    return healthy(act, text, **{"job": JOB, "options": HANG, "long_s": 8.0, **more})


_CODE = "rank 1 ended with exit code 1"
_STUCK = "…rank {}…(read_batch)…"

# fmt: off
FIELD: tuple[Situation, ...] = (
    # Point to point.
    hung("exchanges", "batch_isend_irecv with neighbours, then stuck before all_reduce", 1,
        sentence="rank 1 (node 0) never entered all_reduce …ranks 0,2-3 have waited…(read_batch)…", workers=4),
    hung("hands_on", "send and recv along a pipeline, then stuck before all_reduce", 2,
        sentence="rank 2 (node 0) never entered all_reduce …ranks 0-1,3 have waited…(read_batch)…", workers=4),
    hung("skips_a_send", "a rank of a pipeline waits for a message that nobody sends", (None, 1, 2),
        sentence="…rank 2…", reason=("Hung", "ProgramError"), exit_code=(1, 138), retryable=(), never=_NETWORK,
        workers=3),
    hung("pipeline", "a pipeline without collectives, one rank is stuck", 1, sentence=_STUCK.format(1),
        never=_BEFORE, workers=4),
    hung("mesh", "2 nodes: a mesh of two dimensions, one rank is stuck", 3,
        sentence="…rank 3 (node 1) never entered all_reduce …(read_batch)…", never="0,2 wait behind rank 1",
        nodes=2),
    # Hangs.
    hung("impatient", "slower than the group's own timeout", 1, exit_code=(1, 138), retryable=(), never=_NETWORK,
        options=END, workers=3),
    hung("impatient_in_buckets", "slower than the group's own timeout, with several operations at once", 1,
        exit_code=(1, 138), retryable=(), never=_NETWORK, options=END, workers=3),
    hung("comes_too_late", "enters after the others' time-out, before they end", 1, exit_code=(1, 138),
        sentence="rank 1 (node 0) had not entered all_reduce #1 of group 1 (ranks 0-2)…", never=_NETWORK,
        retryable=(), options=END, workers=3),
    hung("beats", "stuck, while a thread of another rank prints", 1, sentence=_STUCK.format(1), workers=3),
    hung("holds_gil", "blocked in C with the GIL held", 1, workers=3),
    hung("never_entered", "TORCH_DISTRIBUTED_DEBUG=DETAIL, stuck", 1, variables=_DETAIL, never=_BEFORE),
    hung("hangs_at_exit", "a thread keeps a rank that has finished", 1, never=f"uneven data|{_BEFORE}", workers=3),
    hung("raises_and_hangs", "an exception, and a thread keeps the rank", 0, workers=3),
    hung("never_entered", "no recorder (--start-method exec), stuck", (None, 1), sentence="…",
        options=(*HANG, "--start-method", "exec")),
    hung("leaves_before_start", "leaves with 0 before init_process_group", (None, 1),
        sentence="…rank 1…finished with exit code 0…", reason=("Hung", "ProgramError"), exit_code=(1, 138),
        retryable=False, workers=3),
    endless("backtracks", "a regular expression that never ends"),
    endless("loops", "an endless loop after a second of progress"),
    # Ends.
    ended("barrier_alone", "a barrier that only one rank calls",
        "rank…finished with exit code 0 while rank 0 still waited…", "ProgramError", 1, rank=(None, 1, 2, 3),
        never=_NETWORK, options=HANG, workers=4, job=JOB),
    failed("asked_to_leave", "SIGTERM from elsewhere, saves and leaves with 0", "…rank 1…", rank=(None, 1),
        never="ProgramError|uneven data|will not help", reason=(), exit_code=(), workers=3),
    failed("cleans_up", "leaves its group, and raises 1.5 s later",
        _CODE + ": ValueError: label 17 is out of range…", workers=3),
    failed("crashes_harder", "3 nodes: a victim crashes harder than the culprit",
        "rank 2 …ValueError: the tokenizer has another vocabulary…", rank=2,
        exit_code=(1, 138, 139), nodes=3, workers=1),
    failed("leaks_files", "no descriptors left", _CODE + ", because it had too many open files: OSError: …"),
    failed("leaves_with_2", "exit code 2 after five steps", "rank 1 ended with exit code 2…", never="argument",
        exit_code=2),
    failed("lacks_a_tool", "exit code 127: a tool is missing", "rank 1 ended with exit code 127…not found…",
        never="program cannot be found", reason=("Failed", "NotRunnable"), exit_code=127, retryable=()),
    failed("reads_bad_record", "bad data for ast.literal_eval", _CODE + "…SyntaxError: …",
        never="cannot be parsed"),
    failed("asks_for_petabytes", "an absurd allocation", _CODE + "…Unable to allocate…",
        never="ran out of memory|memory limit", reason=("Failed", "ProgramError"), retryable=()),
    failed("wrong_address", "a wrong rendezvous address on one rank", _CODE + "…127.0.0.1…",
        never="PeerLost|network is gone", reason=(), exit_code=(), retryable=()),
    failed("bad_gradient", "an exception in a gradient's hook",
        "rank 0 ended with exit code 1: FloatingPointError: the gradient's norm is inf…", rank=0, workers=3),
    failed("store_resets", "the object store resets the connection", _CODE + "…Connection reset by peer…",
        never="PeerLost|network is gone", needs="server", workers=3),
    failed("loader_crashes", "a data loader's process crashes", _CODE + "…DataLoader worker…"),
    failed("loader_fills_memory", "the kernel kills a data loader for memory", _CODE + "…", reason="OutOfMemory",
        exit_code=(), retryable=(), needs="memory"),
    failed("child_fills_memory", "the kernel kills a child for memory", _CODE + "…", reason="OutOfMemory",
        exit_code=(), retryable=(), needs="memory"),
    failed("child_raises", "an exception in a child of mp.spawn", _CODE + "…ValueError: shard 0 is corrupt…"),
    failed("quota_is_full", "a rank cannot write its part of a distributed checkpoint",
        "rank … ended with exit code 1…rank 1: OSError…Disk quota exceeded…", rank=(None, 1), workers=3),
    ended("frees_wrongly", "glibc finds the heap corrupted",
        "rank 1 ended with signal SIGABRT…free(): invalid pointer…", "Crashed", 134, job=JOB),
    ended("python_aborts", "a fatal error of Python", "rank 1 ended with signal SIGABRT…the cache is corrupt…",
        "Crashed", 134, job=JOB),
    ended("segfault", "SIGSEGV at the same step in every generation", "rank 1 ended with signal SIGSEGV…",
        "Crashed", 139, retryable=(), attempt=(), never="Quarantined|machine checked",
        options=("--max-restarts", "3")),
    ended("other_size", "TORCH_DISTRIBUTED_DEBUG=DETAIL, another size", "…Detected mismatch between collectives…",
        "ProgramError", 1, rank=(None, 1), retryable=False, variables=_DETAIL, workers=3),
    failed("shows_secrets", "an exception with secrets", _CODE + ": RuntimeError: upload failed…",
        never="PassOfUser9|hf_AbCd|wJalrXUtn"),
    # Healthy.
    left("evaluates_after_training", "an evaluation after long training", long_s=10.0),
    left("download_stalls", "a download stalls in the middle", needs="server"),
    left("receives", "recv of a socket of its own", needs="server"),
    left("fetches", "curl as a child", needs="curl"),
    left("writes_slowly", "a checkpoint to a slow disk", needs="takes"),
    left("reads_slowly", "3 nodes: an index from a slow disk", needs="gives", nodes=3, workers=1),
    left("asks_a_person", "input()", long_s=14.0),
    left("waits_before_start", "prints, then waits before init_process_group"),
    left("exports", "the others have left, one waits", needs="server", never="uneven data", workers=4),
)
# They take minutes.
SLOW: tuple[Situation, ...] = (
    left("evaluates_for_minutes", "default options: an evaluation of 4 minutes", options=(), long_s=240.0),
    hang("never_entered", "default options: stuck after a second",
        "rank 1 (node 0) never entered all_reduce #6 …; rank 1 is in {L} (read_batch)", options=(), long_s=60.0),
)
# fmt: on
