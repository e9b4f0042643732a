"""The incident catalogue: real jobs that fail, hang or only look like it, and what the launcher tells of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tests.incidents.running import REPORT, TIMEOUT_S, Situation, Told, run
from trainer_launch.model.units import numbers_in

SIDE_BY_SIDE = 6  # they mostly wait
END = ("--max-restarts", "0")
KILL = ("--hang-timeout", TIMEOUT_S, *END)
BOTH = (*REPORT, "--hang-timeout", TIMEOUT_S)
# What varies by nature: seconds, lines of the program, pids, gloo's own words and sizes of its chunks.
VARIES = {
    "S": r"\d+ s",
    "L": r"incident_job\.py:\d+",
    "CRASHED": r'File "[^"]*incident_job\.py", line \d+ in kill',
    "LOADER": r"DataLoader worker \(pid(?:\(s\))? \d+\) (?:exited unexpectedly|is killed by signal: Killed\. ?)"
    r"(?: \(from RuntimeError: .*\))?",
    "R": r"[012]",
    "GLOO": r".*",
    "ALIVE": r"rank 1 is (?:[^;]+, still )?making progress",  # a busy machine may not let it answer in time
}


# A sentence that begins so names who is at fault; others tell of all ranks, or of victims.
_NAMES = re.compile(r"ranks? ([\d,:/-]+) (?!and its peers|ha(?:s|ve) been (?:idle|busy))")


def names(sentence: str) -> frozenset[int]:
    """The ranks that a sentence says are at fault."""
    match = _NAMES.match(sentence)
    return frozenset(numbers_in(match[1])) if match else frozenset()


def at_fault(situation: Situation) -> frozenset[int]:
    """Any of these ranks may be named; empty: nobody."""
    if situation.is_healthy:
        return frozenset()
    ranks = situation.rank if isinstance(situation.rank, tuple) else (situation.rank,)
    return frozenset(rank for rank in ranks if rank is not None) or names(situation.sentence)


def named(told: Told) -> frozenset[int]:
    """The ranks that are named as the cause: `rank=` of the termination message, else the sentence."""
    if told.rank is not None:
        return frozenset((told.rank,))
    return names(told.sentence) if told.accused or told.reason not in ("Succeeded", "Stopped") else frozenset()


_W = "has waited in it for {S}; "
_SIX = "all_reduce #6 of default_pg, [[4]] Float; rank 0 " + _W
_NEVER = "rank 1 (node 0) never entered " + _SIX
_NEVER_0 = "rank 0 (node 0) never entered all_reduce #6 of default_pg, [[4]] Float; "
_READ = "rank 1 is in {L} (read_batch)"
_NO = "; a restart will not help"
_ENTERED = "; last entered: rank 0 all_reduce #6 of default_pg"
_ENTERED_5 = "; last entered: rank 0 all_reduce #5 of default_pg"
_ENTERED_3 = "; last entered: ranks 0,2 all_reduce #6 of default_pg"
_UNEVEN = ": uneven data, a restart will not help"


def hang(act: str, text: str, sentence: str, **more) -> Situation:
    """Reported only; the job goes on once somebody was named."""
    return Situation(act=act, text=text, sentence=sentence, **{"ends": "goes on", **more})


def stuck(act: str, text: str, sentence: str, **more) -> Situation:
    """Reported only; the job cannot go on and is asked to stop."""
    return hang(act, text, sentence, **{"ends": "stop", "reason": "Stopped", "exit_code": 143, **more})


def ended(act: str, text: str, sentence: str, reason: str, exit_code: int, **more) -> Situation:
    """Ends by itself, or is ended as hung; a restart would help unless the program is the cause."""
    again = True if exit_code >= 128 else False if reason == "ProgramError" else None
    words = {"options": END, "retryable": again, "rank": 1, **more}
    return Situation(act=act, text=text, sentence=sentence, reason=reason, exit_code=exit_code, **words)


_DISAGREE = "the ranks disagree about collective #6 of default_pg: rank 0 entered all_reduce with [[4]] Float, "
_DISAGREE += "rank 1 entered barrier" + _NO
_THREE = (
    "rank 1 (node 1) never entered all_reduce #6 of default_pg, [[4]] Float; ranks 0,2 have waited in it for {S}; "
)
_DISAGREE_3 = "the ranks disagree about collective #6 of default_pg: rank 1 entered barrier, ranks 0,2 entered "
_DISAGREE_3 += "all_reduce with [[4]] Float" + _NO
_CIRCLE = "the ranks wait for each other in different collectives: rank 0 in all_reduce #1 of group 1 (ranks 0-1), "
_CIRCLE += "[[4]] Float; rank 1 in all_reduce #1 of group 2 (ranks 0-1), [[4]] Float" + _NO
_CIRCLE_3 = (
    "the ranks wait for each other in different collectives: rank 0 in all_reduce #1 of group 1 (ranks 0-1), "
)
_CIRCLE_3 += "[[4]] Float; rank 1 in all_reduce #1 of group 2 (ranks 1-2), [[4]] Float; rank 2 in all_reduce #1 of "
_CIRCLE_3 += "group 3 (ranks 0,2), [[4]] Float" + _NO
_OTHER_GROUP = "the ranks wait for each other in different collectives: rank 0 in all_reduce #6 of default_pg, "
_OTHER_GROUP += "[[4]] Float; rank 1 in all_reduce #1 of group 1 (ranks 0-1), [[4]] Float" + _NO
_SIZE = (
    "rank {R} and its peers entered different collectives: gloo received 8 bytes where rank {R} expected at most 4"
)
_SIZE += _NO
_ROOT = (
    "all known ranks entered broadcast #6 of default_pg, [[4]] Float, and ranks 0-1 have waited in it for {S}: the "
)
_ROOT += "network or a device does not deliver it, or the ranks name different roots"
_CODE = "rank 1 ended with exit code 1"
_UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.{GLOO}"
)
_THREE_NODES: Mapping[str, int] = {"nodes": 3, "workers": 1}

TO_TELL: tuple[Situation, ...] = (
    # Somebody never enters.
    hang("never_entered", "reads a batch and never enters", _NEVER + _READ),
    hang(
        "never_entered",
        "the same, 4 ranks",
        _NEVER.replace("rank 0 has", "ranks 0,2-3 have") + _READ,
        workers=4,
    ),
    hang(
        "two_never_entered",
        "two ranks are missing at two places",
        "ranks 1-2 never entered all_reduce #6 of default_pg, [[4]] Float; ranks 0,3 have waited in it for {S}; "
        + _READ
        + "; rank 2 is in {L} (gate)",
        workers=4,
    ),
    hang("in_data_loader", "in the data loader", _NEVER + "rank 1 is in the data loader: in {L} (read_batch)"),
    hang(
        "in_data_loader_process",
        "in a data loader's process",
        _NEVER + "rank 1 is in the data loader: in __next__, called from {L} (in_data_loader_process)",
    ),
    hang("in_subprocess", "waits for a subprocess", _NEVER + "rank 1 is in run, called from {L} (in_subprocess)"),
    hang("stopped", "stopped (SIGSTOP)", _NEVER + "rank 1 is stopped (SIGSTOP)", retryable=True),
    hang(
        "barrier",
        "missing in barrier",
        "rank 1 (node 0) never entered barrier #6 of default_pg; rank 0 " + _W + _READ,
    ),
    hang(
        "broadcast_object",
        "missing in broadcast_object_list",
        "rank 1 (node 0) never entered broadcast #6 of default_pg, [[1]] Long; rank 0 " + _W + _READ,
    ),
    hang("gather_weights", "missing in FSDP's all_gather", _NEVER.replace("all_reduce", "all_gather") + _READ),
    hang("scatter_gradients", "missing in FSDP's reduce_scatter", _NEVER.replace("[[4]]", "[[8]]") + _READ),
    hang("in_backward", "missing in DDP's backward", _NEVER.replace("#6", "#9").replace("[[4]]", "[[6]]") + _READ),
    hang("asynchronous", "one rank is 5 asynchronous collectives ahead", _NEVER + _READ),
    hang(
        "chain",
        "rank 2 waits for 1, which waits for 0, which loads data",
        "rank 0 (node 0) never entered all_reduce #1 of group 1 (ranks 0-1), [[4]] Float; rank 1 "
        + _W
        + "rank 0 is in the data loader: in {L} (read_batch); rank 2 waits behind rank 1",
        workers=3,
    ),
    hang(
        "in_subgroup",
        "missing in a subgroup while others wait for both",
        "rank 1 (node 0) never entered broadcast #1 of group 1 (ranks 0-1), [[4]] Float; rank 0 "
        + _W
        + _READ
        + "; rank 2 waits behind ranks 0-1",
        workers=3,
    ),
    stuck(
        "receives_from_nobody",
        "recv without a send",
        _NEVER + "rank 1 waits in recv, called from {L} (receives_from_nobody)",
    ),
    stuck(
        "sends_to_nobody", "send without a recv", _NEVER + "rank 1 waits in send, called from {L} (sends_to_nobody)"
    ),
    stuck(
        "both_receive",
        "both ranks receive",
        "all ranks wait for each other outside recorded collectives: ranks 0-1 wait in recv, called from {L} "
        "(both_receive)",
    ),
    # The ranks disagree.
    stuck("other_operation", "barrier against all_reduce", _DISAGREE, retryable=False),
    stuck("other_group", "another group", _OTHER_GROUP, retryable=False),
    stuck("other_root", "another root of a broadcast", _ROOT),
    stuck("circle", "two groups in another order", _CIRCLE, retryable=False),
    stuck("circle_of_three", "three ranks wait in a circle", _CIRCLE_3, retryable=False, workers=3),
    ended("other_size", "another size, which gloo aborts", _SIZE, "ProgramError", 1, options=(), rank=None),
    ended("other_type", "another type, which gloo aborts", _SIZE, "ProgramError", 1, options=(), rank=None),
    hang(
        "all_blocked",
        "all ranks read from a storage that hangs: nobody is named",
        "no progress, but none of 2 known ranks waits in a recorded collective: ranks 0-1 are in {L} (read_batch)",
        ends="nobody",
    ),
    # The same with --hang-timeout.
    ended("never_entered", "never enters: ended", _NEVER + _READ, "Hung", 138, options=KILL),
    hang(
        "never_entered_once",
        "never enters once: restarted",
        _NEVER + _READ,
        options=("--hang-timeout", TIMEOUT_S),
        attempt=2,
        ends="",
    ),
    ended(
        "in_data_loader",
        "in the data loader: ended",
        _NEVER + "rank 1 is in the data loader: in {L} (read_batch)",
        "Hung",
        138,
        options=KILL,
    ),
    ended(
        "in_data_loader_process",
        "in a data loader's process: ended",
        _NEVER + "rank 1 is in the data loader: in __next__, called from {L} (in_data_loader_process)",
        "Hung",
        138,
        options=KILL,
    ),
    ended(
        "stopped",
        "stopped (SIGSTOP): ended",
        "rank 1 has been stopped (SIGSTOP) for {S}",
        "Hung",
        138,
        options=KILL,
    ),
    ended(
        "other_operation",
        "barrier against all_reduce: ended",
        _DISAGREE,
        "ProgramError",
        1,
        rank=None,
        options=KILL,
    ),
    ended("circle", "two groups in another order: ended", _CIRCLE, "ProgramError", 1, rank=None, options=KILL),
    # Ends.
    ended(
        "finishes_early",
        "finishes early (uneven data)",
        "rank 1 finished with exit code 0 while rank 0 still waited for it" + _ENTERED + _UNEVEN,
        "ProgramError",
        1,
        rank=None,
        options=(),
    ),
    ended(
        "one_more_step",
        "one rank has one step more",
        "rank 0 finished with exit code 0 while rank 1 still waited for it; last entered: rank 1 all_reduce #7 of "
        "default_pg" + _UNEVEN,
        "ProgramError",
        1,
        rank=None,
        options=(),
    ),
    ended(
        "finishes_unseen",
        "finishes early, and its connections stay open",
        "rank 1 finished with exit code 0 while rank 0 still waited for it" + _ENTERED + _UNEVEN,
        "ProgramError",
        1,
        rank=None,
        options=KILL,
    ),
    ended(
        "other_model",
        "another model on one rank",
        _CODE
        + ": RuntimeError: [1]: params[0] in this process with sizes [3, 2] appears not to match sizes of the "
        "same param in process 0.",
        "Failed",
        1,
    ),
    ended("raises", "an exception on one rank", _CODE + ": ValueError: no luck", "Failed", 1),
    ended(
        "all_raise",
        "an exception on all ranks",
        "rank {R} ended with exit code 1: ValueError: no luck",
        "Failed",
        1,
        any_rank=True,
    ),
    ended(
        "misspelt",
        "NameError: one restart, as it may have been the start",
        _CODE + ", because it uses a name, an attribute or a parameter that does not exist: NameError: name 'totl' "
        "is not defined",
        "ProgramError",
        1,
        options=(),
        attempt=2,
    ),
    ended(
        "not_installed",
        "a module that is not there",
        _CODE
        + ", because a module that it imports is missing: ModuleNotFoundError: No module named 'no_such_module'",
        "ProgramError",
        1,
        options=(),
        attempt=2,
    ),
    ended(
        "killed",
        "SIGKILL, as of the node's OOM killer",
        "rank 1 ended with signal SIGKILL" + _ENTERED,
        "Killed",
        137,
    ),
    ended(
        "killed_in_collective",
        "SIGKILL in a collective",
        "rank 1 ended with signal SIGKILL" + _ENTERED_5,
        "Killed",
        137,
    ),
    ended(
        "killed_in_checkpoint",
        "SIGKILL in a checkpoint",
        "rank 1 ended with signal SIGKILL" + _ENTERED,
        "Killed",
        137,
    ),
    ended(
        "segfault",
        "SIGSEGV",
        "rank 1 ended with signal SIGSEGV: Fatal Python error: Segmentation fault {CRASHED}" + _ENTERED,
        "Crashed",
        139,
    ),
    ended(
        "abort",
        "SIGABRT",
        "rank 1 ended with signal SIGABRT: Fatal Python error: Aborted {CRASHED}" + _ENTERED,
        "Crashed",
        134,
    ),
    ended(
        "unhandled_signal",
        "SIGUSR2 without a handler",
        "rank 1 ended with signal SIGUSR2" + _ENTERED,
        "Killed",
        140,
    ),
    ended("leaves_with_7", "os._exit(7)", "rank 1 ended with exit code 7", "Failed", 7),
    ended(
        "memory",
        "MemoryError",
        _CODE + ", because an allocation failed: MemoryError: incident_job.py, line …",
        "OutOfMemory",
        1,
    ),
    ended("loader_killed", "a data loader's process is killed", _CODE + ": RuntimeError: {LOADER}", "Failed", 1),
    ended(
        "device_error",
        "an ECC error of the GPU",
        _CODE + ", because its GPU or the link to it failed: RuntimeError: CUDA error: uncorrectable ECC error "
        "encountered",
        "DeviceError",
        138,
    ),
    ended(
        "device_memory",
        "the GPU's memory is full",
        _CODE
        + ", because its GPU ran out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "DeviceOutOfMemory",
        1,
    ),
    ended(
        "monitored",
        "monitored_barrier names the rank",
        "rank 0 ended with exit code 1, because a collective did not complete in time: RuntimeError: [Rank 0]: "
        "Rank 1 failed to pass monitoredBarrier in 1000 ms{GLOO}",
        "Hung",
        1,
        rank=None,
    ),
    ended(
        "times_out",
        "the group's own timeout",
        "rank 1 (node 0) had not entered all_reduce #1 of group 1 (ranks 0-1), [[4]] Float; rank 0 waited in it; "
        "rank 1 was in {L} (read_batch), and --max-restarts 0 allows no restart",
        "Hung",
        138,
    ),
    ended(
        "unused_parameters",
        "DDP with unused parameters",
        "rank {R} ended with exit code 1: " + _UNUSED,
        "Failed",
        1,
        any_rank=True,
    ),
    # Three nodes.
    hang("never_entered", "3 nodes: never enters", _THREE + _READ, **_THREE_NODES),
    hang(
        "in_data_loader",
        "3 nodes: in the data loader",
        _THREE + "rank 1 is in the data loader: in {L} (read_batch)",
        **_THREE_NODES,
    ),
    hang("stopped", "3 nodes: stopped", _THREE + "rank 1 is stopped (SIGSTOP)", retryable=True, **_THREE_NODES),
    stuck("other_operation", "3 nodes: another operation", _DISAGREE_3, retryable=False, **_THREE_NODES),
    ended(
        "other_operation",
        "3 nodes: another operation: ended",
        _DISAGREE_3,
        "ProgramError",
        1,
        options=KILL,
        **_THREE_NODES,
        any_rank=True,
    ),
    ended("raises", "3 nodes: an exception", _CODE + ": ValueError: no luck", "Failed", 1, **_THREE_NODES),
    ended(
        "killed", "3 nodes: SIGKILL", "rank 1 ended with signal SIGKILL" + _ENTERED_3, "Killed", 137, **_THREE_NODES
    ),
    ended(
        "finishes_early",
        "3 nodes: finishes early",
        "rank 1 finished with exit code 0 while rank {R} still waited for it" + _ENTERED_3 + _UNEVEN,
        "ProgramError",
        1,
        options=(),
        **_THREE_NODES,
        rank=None,
    ),
    ended(
        "all_blocked",
        "3 nodes: all ranks read from a storage that hangs: ended, and nobody is named",
        "no progress, but none of 3 known ranks waits in a recorded collective: ranks 0-2 are in {L} (read_batch)",
        "Hung",
        138,
        rank=None,
        options=KILL,
        **_THREE_NODES,
    ),
    hang(
        "never_entered_after_output",
        "3 nodes: prints for a while, then never enters",
        _THREE + _READ,
        **_THREE_NODES,
    ),
)


def healthy(act: str, text: str, **more) -> Situation:
    """Nobody is accused or restarted."""
    return Situation(act=act, text=text, is_healthy=True, **{"options": BOTH, **more})


TO_LEAVE: tuple[Situation, ...] = (
    healthy(
        "saves",
        "a long checkpoint by rank 0",
        sentence=_NEVER_0 + "rank 1 has waited in it for {S}; rank 0 is in a checkpoint: in {L} (write)",
    ),
    healthy("compiles", "torch.compile on one rank"),
    healthy("debugged", "paused in pdb"),
    healthy("downloads", "a long download before the first collective"),
    healthy("first_batch", "a slow first batch"),
    healthy("imports", "a slow import on one rank", long_s=8.0),  # the hang is reported after 6, while it lasts
    healthy("evaluates", "an evaluation on rank 0 only"),
    healthy("accumulates", "gradient accumulation without collectives"),
    healthy("prints", "a rank that only prints"),
    healthy("reports", "a rank that only reports progress"),
    healthy("alone", "a rank in collectives of its own"),
    healthy("equally_slow", "all ranks equally slow"),
    healthy("pauses", "stopped and continued in time"),
    healthy("joins", "uneven data with torch's Join"),
    healthy("saves", "a checkpoint of 3 minutes by rank 0", options=REPORT, long_s=180.0),
    healthy("saves", "3 nodes: a long checkpoint by rank 0", **_THREE_NODES),
    healthy("evaluates", "3 nodes: an evaluation on rank 0 only", **_THREE_NODES),
    healthy("prints", "3 nodes: a rank that only prints", sentence=_THREE + "{ALIVE}", **_THREE_NODES),
    healthy("reports", "3 nodes: a rank that only reports progress", **_THREE_NODES),
    healthy(
        "drains",
        "a long save after SIGTERM",
        ends="drain",
        reason="Stopped",
        exit_code=143,
        retryable=True,
        options=(*BOTH, "--grace", "30"),
    ),
)


def pattern(sentence: str) -> str:
    """What the sentence may be, as a regular expression for all of it."""
    parts = re.split(r"\{([A-Z]+)\}", sentence)
    return "".join(VARIES[part] if n % 2 else re.escape(part).replace("…", ".*") for n, part in enumerate(parts))


def differences(situation: Situation, told: Told) -> list[str]:
    """What was not told as it has to be."""
    wrong = ["somebody was accused"] if situation.is_healthy and told.accused else []
    is_told = re.fullmatch(pattern(situation.sentence), told.sentence)
    if not is_told and not wrong and (situation.sentence or not situation.is_healthy):
        wrong.append(f"sentence: {told.sentence}")
    if situation.never and (bad := re.search(situation.never, told.launchers_lines)):
        wrong.append(f"never: {bad[0]}")
    checked = () if situation.is_healthy else ("retryable",) if situation.any_rank else ("rank", "retryable")
    for name in (*checked, "reason", "exit_code", "attempt"):
        right, value = getattr(situation, name), getattr(told, name)
        if (right and value not in right) if isinstance(right, tuple) else value != right:
            wrong.append(f"{name}={value}")
    return wrong


def tries(situation: Situation) -> list[Told]:
    """Run it, and once more if something was wrong, as the machine may be busy."""
    first = run(situation)
    return [first, run(situation)] if differences(situation, first) else [first]


def check(situation: Situation) -> list[str]:
    """What is still wrong after the last try."""
    return differences(situation, tries(situation)[-1])


def longest_first(situations: Iterable[Situation] = (*TO_TELL, *TO_LEAVE)) -> list[Situation]:
    """So that those side by side end together."""
    return sorted(situations, key=lambda situation: -situation.long_s)
