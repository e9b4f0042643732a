"""Every row of the table of causes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from msgspec.structs import replace

from trainer_launch.host import machine
from trainer_launch.model import Death
from trainer_launch.supervisor.failure import (
    Evidence,
    classify,
    with_error_file,
    with_symptom,
    with_torchruns_file,
)
from trainer_launch.supervisor.system import Witness


def death(code=None, number=None):
    return Death(process="main", code=code, signal=number)


OOM = Evidence(oom_kills_before=2, oom_kills_after=3)
NO_OOM = Evidence(oom_kills_before=2, oom_kills_after=2)
FULL = Evidence(shm_free_bytes=4096, shm_size_bytes=64 << 20)
ROOMY = Evidence(shm_free_bytes=60 << 20, shm_size_bytes=64 << 20)


def said(line):
    return Evidence(last_lines=("before", line))


ROWS = [
    (death(0), Evidence(stopped=True), "Stopped", 143),
    (death(number=9), Evidence(stopped=True, oom_kills_before=0, oom_kills_after=1), "Stopped", 143),
    (death(number=9), OOM, "OutOfMemory", 137),
    (death(number=9), NO_OOM, "Killed", 137),
    (death(number=9), Evidence(), "Killed", 137),
    (death(number=15), OOM, "Killed", 143),
    (death(number=7), FULL, "SharedMemoryFull", 135),
    (death(number=7), ROOMY, "Crashed", 135),
    (Death(reason="NotRunnable", message="no", code=127), Evidence(), "NotRunnable", 127),
    (death(126), Evidence(), "Failed", 126),
    (death(127), Evidence(), "Failed", 127),
    (Death(reason="PeerLost", message="nobody came", code=138), Evidence(), "PeerLost", 138),
    (death(138), Evidence(), "Failed", 138),
    (Death(reason="Hung", message="rank 2 hangs", code=138), Evidence(), "Hung", 138),
    (Death(reason="ProgramError", message="rank 1 finished", code=1), Evidence(), "ProgramError", 1),
    (Death(reason="Misconfigured", message="no", code=2), Evidence(), "Misconfigured", 2),
    (Death(reason="Quarantined", message="this node", code=138), Evidence(), "Quarantined", 138),
    (Death(reason="NotStarted", message="no", code=1), Evidence(), "NotStarted", 1),
    (death(number=11), Evidence(), "Crashed", 139),
    (death(number=6), Evidence(), "Crashed", 134),
    (death(number=4), Evidence(), "Crashed", 132),
    (death(42), Evidence(), "Failed", 42),
]


@pytest.mark.parametrize(("end", "evidence", "reason", "code"), ROWS)
def test_each_rule_names_its_cause_and_says_what_to_do(end, evidence, reason, code):
    failure = classify(end, evidence)
    assert (failure.reason, failure.exit_code) == (reason, code)
    assert failure.hint
    assert failure.message


def test_a_kill_for_memory_shows_count_limit_and_peak():
    failure = classify(
        death(number=9),
        Evidence(oom_kills_before=1, oom_kills_after=3, memory_limit_bytes=512 << 20, memory_peak_bytes=512 << 20),
    )
    assert failure.message == "main ended with signal SIGKILL, because the container's memory was used up"
    assert failure.evidence == (
        "the kernel killed 2 processes of this container for memory, limit 512 MiB, peak 512 MiB",
    )


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "RuntimeError: DataLoader worker (pid 40) is killed by signal: Killed. "),
        (1, "RuntimeError: DataLoader worker (pid(s) 40, 41) exited unexpectedly"),
        (1, "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>."),
        (1, "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 137."),
        (1, "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL"),
        (1, "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly"),
        (1, "RuntimeError: tokenizer died with exitcode=-9"),
        (247, "sys.exit(os.waitstatus_to_exitcode(os.system(...)))"),
        (137, "./preprocess.sh: line 4:    88 Killed                  python tokenize.py"),
    ],
)
def test_a_process_of_a_rank_that_was_killed_for_memory_is_the_same_cause_and_without_a_kill_it_is_not(code, line):
    rank = Death(rank=2, code=code)
    failure = classify(rank, replace(OOM, last_lines=(line,)))
    assert (failure.reason, failure.exit_code, failure.rank) == ("OutOfMemory", code, 2)
    assert classify(rank, replace(NO_OOM, last_lines=(line,))).reason == "Failed"


@pytest.mark.parametrize(
    "line", ["ValueError: bad sample", "RuntimeError: exit code 1 of the decoder", "code 9", "code 1370"]
)
def test_an_error_that_tells_of_no_killed_process_is_not_blamed_on_memory_that_another_process_used_up(line):
    failure = classify(Death(rank=0, code=1), replace(OOM, last_lines=(line,)))
    assert failure.reason == "Failed"
    assert "for memory" in failure.evidence[0], "the kernel has killed something, and it may matter"


NUMPY = "MemoryError: Unable to allocate 8.00 {} for an array with shape (33554432, 33554432) and data type float64"
TORCH = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
)
TORCH += "tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NUMPY.format("PiB"), "Failed"),
        (TORCH.format(40_000_000_000_000), "Failed"),
        (NUMPY.format("GiB"), "OutOfMemory"),
        (TORCH.format(400), "OutOfMemory"),
        ("MemoryError", "OutOfMemory"),
    ],
)
def test_an_allocation_that_is_refused_is_no_lack_of_memory_in_the_container(error, reason):
    failure = classify(Death(rank=1, code=1, message=error), Evidence())
    assert (failure.reason, failure.rank) == (reason, 1)
    if reason == "Failed":
        assert "limit" not in (failure.hint or "")


def test_whether_a_restart_helps_is_told_only_where_that_is_known():
    def helps(error="", **how):
        return classify(Death(rank=0, message=error or None, **how), Evidence()).restart_helps

    for error in ("ValueError: loss is nan", "OSError: [Errno 28] No space left on device: '/data'"):
        assert helps(error, code=1) is None
    assert helps("ConnectionResetError: [Errno 104] Connection reset by peer", code=1) is None
    assert helps("RuntimeError: DataLoader worker (pid 4) is killed by signal: Segmentation fault.", code=1) is None
    assert helps(code=3) is None
    assert helps(code=127) is None
    assert helps(signal=11) is True
    assert helps("NameError: name 'x' is not defined", code=1) is False
    assert helps("no torch", code=1, reason="NotStarted") is False
    assert helps("no memory now", code=138, reason="NotStarted") is True


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train.py: error: unrecognized arguments: --lrr", "ProgramError"),
        ("python3: can't open file '/app/trian.py': [Errno 2] No such file or directory", "ProgramError"),
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running", "ProgramError"),
        ("RuntimeError: Unable to find address for: ^lo", "Misconfigured"),
        ("dvc: error: unrecognized arguments: --lrr", None),  # a tool's, not the program's
        ("SyntaxError: invalid syntax (train.py, line 3)", None),  # the retry policy knows whether it came early
        ("ValueError: bad", None),
    ],
)
def test_what_is_refused_each_time_is_known_to_be_in_vain_before_anything_is_restarted(text, reason):
    death = with_symptom(Death(rank=1, code=2), Evidence(last_lines=(text,)))
    assert death.reason == reason
    if reason is not None:
        assert (death.message or "").startswith("rank 1 ended with exit code 2, because ")
        assert (death.message or "").endswith(text)
        failure = classify(death, Evidence())
        assert (failure.message, failure.again, failure.exit_code) == (death.message, False, 2)
        assert failure.hint
        assert failure.evidence == ()


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (
            "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
            "because it could not write a file to its end",
            "df -h",
        ),
        (
            'SafetensorError: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
            "because a volume was full",
            "df -h",
        ),
        ("OSError: Not enough free space to write 16777216 bytes", "because a volume was full", "df -h"),
        ("RuntimeError: received 0 items of ancdata", "because it had too many open files", "ulimit -n"),
        ("AssertionError: Torch not compiled with CUDA enabled", "because it cannot use the GPU", "limits"),
    ],
)
def test_an_error_whose_words_hide_its_cause_is_told_with_it(text: str, what: str, hint: str) -> None:
    failure = classify(Death(rank=1, code=1, message=text), Evidence())
    assert failure.message.startswith(f"rank 1 ended with exit code 1, {what}")
    assert failure.message.endswith(f": {text}")
    assert hint in (failure.hint or "")
    assert (failure.rank, failure.again) == (1, None)


SIZES = "rank 0 and its peers entered different collectives: gloo received 8 bytes where rank 0 expected at most 4"


def test_who_received_another_size_is_not_named_as_its_cause() -> None:
    failure = classify(Death(rank=0, signal=6, reason="ProgramError", message=SIZES), Evidence())
    assert (failure.reason, failure.rank, failure.again) == ("ProgramError", None, False)
    assert "sizes" in (failure.hint or "")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "rank 2 (node 0) never entered barrier #9; ranks 0-1 have waited in it; rank 2 is in x.py:3",
            "has its stack",
        ),
        ("rank 2 (node 0) had not entered barrier #9; ranks 0-1 waited in it; rank 2 was in x.py:3", "only slow"),
        ("rank 2 finished with exit code 0 before it joined a process group; rank 2 had printed KeyError", "error"),
        ("rank 2 (node 0) never entered barrier #9; rank 2 is stopped (SIGSTOP)", "who stopped it"),
        ("all known ranks entered all_reduce #9 of default_pg, and ranks 0-1 have waited in it", "network"),
        (
            "all known ranks entered broadcast #9: no network delivers it, or the ranks name different roots",
            "same root",
        ),
        (
            "all ranks wait for each other outside recorded collectives: ranks 0-1 wait in recv",
            "sends and receives",
        ),
        (
            "ranks 0-1 never entered barrier #9; rank 2 has waited in it; ranks 0-1 wait in recv",
            "sends and receives",
        ),
        (
            "rank 2 never entered barrier #9; rank 0 has waited in it; rank 2 is in x.py:3; rank 1 waits in recv",
            "has its stack",
        ),
        ("ranks 0-2 have been idle: no output, no progress and almost no CPU time for 40 s", "where each rank was"),
    ],
)
def test_what_to_do_about_a_hang_is_what_its_cause_asks_for(text: str, hint: str) -> None:
    failure = classify(Death(reason="Hung", message=text), Evidence())
    assert (failure.message, failure.exit_code, failure.again) == (text, 138, True)
    assert hint in (failure.hint or "")
    assert ("has its stack" in (failure.hint or "")) == (hint in ("has its stack", "only slow"))


UNREACHED = (
    "DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (127.0.0.1, {})."
)
REFUSED = "DistNetworkError: The client socket has failed to connect to any network address of (n0, {}). The client"


@pytest.mark.parametrize("text", [UNREACHED, REFUSED])
def test_who_looks_for_the_others_at_an_address_of_its_own_has_lost_no_peer(text):
    elsewhere = with_symptom(Death(rank=1, code=1, message=text.format(1)), Evidence(), store_port=29500)
    failure = classify(elsewhere, Evidence())
    assert (failure.reason, failure.exit_code, failure.rank) == ("Failed", 1, 1)
    assert "nothing answers at the address" in failure.message
    assert text.format(1)[:30] in failure.message
    at_the_store = with_symptom(Death(rank=1, code=1, message=text.format(29500)), Evidence(), store_port=29500)
    failure = classify(at_the_store, Evidence())
    assert (failure.reason, failure.exit_code, failure.rank) == ("PeerLost", 138, None)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv",
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:21345",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: X, but Rank 2",
        "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 5000 ms",
    ],
)
def test_a_victim_is_not_the_rank_that_is_named(text):
    failure = classify(Death(rank=0, code=1, message=text), Evidence())
    assert failure.rank is None
    assert failure.message.startswith("rank 0 ended with exit code 1, because ")


def test_a_last_line_of_stdout_is_no_reason_and_what_to_do_repeats_no_line():
    quiet = classify(Death(rank=1, code=3), Evidence(last_lines=("rank 1 step 4",)))
    assert quiet.message == "rank 1 ended with exit code 3"
    assert quiet.hint == "it gave no reason: see the last lines of its output"
    loud = classify(Death(rank=1, code=2), Evidence(last_lines=("step 4", "busy"), last_errors=("busy",)))
    assert (loud.message, loud.hint) == ("rank 1 ended with exit code 2: busy", None)
    assert classify(death(1), said("ValueError: bad")).hint is None


def test_secrets_and_escape_sequences_of_an_exception_reach_neither_the_log_nor_the_termination_message():
    words = (
        "RuntimeError: upload failed\n  url: https://user:S3cretPw99@s3.example.com/b\n  Authorization: Bearer hf_"
        + "AbCdEfGhIjKlMnOp\n  aws_secret_access_key=wJalrXUtnFEMI/K7MDENG\n\x1b[31mstatus\x1b[0m 403\x07"
    )
    worker = with_error_file(Death(rank=2, code=1), error_file(words, 1, words), was_ended=False)
    for failure in (
        classify(worker, Evidence()),
        classify(death(1), Evidence(last_lines=tuple(words.split("\n")))),
    ):
        shown = "\n".join((failure.message, *failure.last_lines, *failure.evidence))
        assert not any(secret in shown for secret in ("S3cretPw99", "AbCdEf", "wJalr", "\x1b", "\x07")), shown
        assert "upload failed" in shown
    assert "status 403" in (worker.message or ""), "what the coordinator and other nodes get, too"


def test_of_a_long_message_the_end_is_kept_because_inner_errors_stand_there():
    failure = classify(Death(rank=0, code=1, message="ValueError: " + "x" * 900 + " in shard 3"), Evidence())
    assert failure.message.endswith(" in shard 3")
    assert len(failure.message) < 500


def test_a_full_shm_shows_what_is_free():
    assert classify(death(number=7), FULL).evidence == ("/dev/shm has 4 KiB free of 64 MiB",)
    assert classify(death(number=7), ROOMY).evidence == ()


BUS_ERROR = (
    "RuntimeError: DataLoader worker (pid 40) is killed by signal: Bus error. It is possible that dataloader's"
)


@pytest.mark.parametrize(
    ("size", "free", "reason"),
    [
        (64 << 20, 60 << 20, "SharedMemoryFull"),
        (8 << 30, 4096, "SharedMemoryFull"),
        (8 << 30, 7 << 30, "Failed"),
        (None, None, "SharedMemoryFull"),
    ],
)
def test_a_bus_error_of_a_data_loader_is_blamed_on_shm_only_where_that_is_small_or_full(size, free, reason):
    evidence = Evidence(shm_size_bytes=size, shm_free_bytes=free, last_lines=(BUS_ERROR,))
    failure = classify(Death(rank=1, code=1), evidence)
    assert (failure.reason, failure.rank) == (reason, 1)
    assert ("memory-mapped" in (failure.hint or "")) == (reason == "Failed")


def test_who_is_killed_from_outside_has_not_said_why():
    old = ("RuntimeError: CUDA error: uncorrectable ECC error encountered",)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1):
        assert classify(death(number=int(number)), Evidence(last_lines=old)).reason == "Killed"
    assert classify(death(number=6), Evidence(last_lines=old)).reason == "DeviceError"


def test_the_hint_knows_who_sent_a_signal_as_far_as_it_can_be_known():
    usr1 = int(signal.SIGUSR1)
    ours = classify(death(number=usr1), Evidence(handed_on=frozenset({usr1})))
    assert "add a handler for this signal" in (ours.hint or "")
    assert "--signals" in (ours.hint or "")
    foreign = classify(death(number=int(signal.SIGTERM)), Evidence(handed_on=frozenset({usr1})))
    assert "the launcher did not" in (foreign.hint or "")
    for number, words in ((signal.SIGXCPU, "ulimit -t"), (signal.SIGPIPE, "that nobody reads")):
        assert words in (classify(death(number=int(number)), Evidence()).hint or "")
    killed = classify(death(number=9), NO_OOM)
    assert killed.evidence == ("the kernel's count of memory kills in this container did not rise",)


def test_a_failed_device_is_named_by_its_workers_local_rank():
    worker = Death(rank=11, local_rank=3, code=1, message="RuntimeError: CUDA error: uncorrectable ECC error")
    failure = classify(worker, Evidence())
    assert (failure.reason, failure.exit_code, failure.again) == ("DeviceError", 138, True)
    assert "local rank is 3" in failure.evidence[0]
    assert failure.message.startswith(
        "rank 11 ended with exit code 1, because its GPU or the link to it failed: Run"
    )


def error_file(message: str, code: object = None, callstack: str = "") -> dict[str, Any]:
    """As torch writes it."""
    extra = {"py_callstack": callstack, "timestamp": "1700000000"}
    return {"message": {"message": message, "extraInfo": extra, "errorCode": code}}


def test_torchruns_worker_is_judged_not_torchrun():
    failure = classify(with_torchruns_file(death(1), error_file("<NONE>", -9, "why")), OOM)
    assert (failure.reason, failure.signal, failure.last_lines) == ("OutOfMemory", 9, ("why",))


def test_kills_for_memory_count_from_the_last_start(monkeypatch):
    counts = iter((0, 1, 2, 2, 2))
    monkeypatch.setattr(machine, "oom_kills", lambda _: next(counts))
    witness = Witness()
    for killed in (True, False):
        witness.begin()
        assert witness.look().oom_killed is killed


def test_who_was_killed_because_it_hung_is_told_so_also_after_a_kill_for_memory():
    worker = Death(reason="Hung", message="rank 2 hangs", code=137, signal=int(signal.SIGKILL))
    failure = classify(worker, OOM)
    assert (failure.reason, failure.exit_code) == ("Hung", 138)
    assert "for memory" in failure.evidence[0], "it may be why"


def test_a_torchrun_that_was_killed_itself_left_a_file_about_something_else():
    assert with_torchruns_file(death(number=9), error_file("ValueError: x", 1)) == death(number=9)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, {}),
        (
            error_file("ValueError: no luck", 9, "Traceback\nValueError: no luck\n"),
            {"code": 9, "message": "ValueError: no luck", "lines": ("Traceback", "ValueError: no luck")},
        ),
        (error_file("<NONE>", -9), {"code": None, "signal": 9}),
        ({"message": {"message": "RuntimeError: x"}}, {"message": "RuntimeError: x"}),
        ({"message": "RuntimeError: x"}, {"message": "RuntimeError: x"}),
        *((error_file("x", code), {"message": "x"}) for code in (True, "9", None, 0, 256, 10**9, -(10**9))),
    ],
)
def test_torchruns_error_file_tells_what_the_worker_said_and_how_it_ended(
    content: dict[str, Any], told: dict[str, object]
) -> None:
    assert with_torchruns_file(death(1), content) == replace(death(1), **told)


@pytest.mark.parametrize(
    ("code", "number", "was_ended", "told"),
    [
        (None, 15, True, (3, None)),
        (None, 9, True, (3, None)),
        (None, 15, False, (None, 15)),  # somebody else's doing
        (None, 11, True, (None, 11)),  # it has crashed after that
        (4, None, True, (4, None)),
    ],
)
def test_who_was_leaving_when_it_was_asked_to_end_has_its_own_exit_code(
    code: int | None, number: int | None, was_ended: bool, told: tuple[int | None, int | None]
) -> None:
    said = {"message": {"message": "<NONE>", "errorCode": 3}}
    ended = Death(rank=1, code=code, signal=number)
    death = with_error_file(ended, said, was_ended=was_ended)
    assert (death.code, death.signal) == told
    assert with_error_file(ended, {}, was_ended=was_ended) == ended


# -- what a death proves about a device -------------------------------------------------------------


def shown(evidence=NO_OOM, **record):
    return with_symptom(Death(rank=3, **record), evidence).fault


@pytest.mark.parametrize(
    "record",
    [
        {"code": 1, "message": "RuntimeError: CUDA error: uncorrectable ECC error encountered"},
        {"code": 1, "message": "RuntimeError: NVML: GPU is lost"},
        {"signal": 9, "message": "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off"},
    ],
)
def test_a_death_may_prove_that_a_device_failed(record) -> None:
    assert shown(**record) == record["message"]


@pytest.mark.parametrize(
    ("record", "evidence"),
    [
        ({"code": 1, "message": "RuntimeError: CUDA error: unknown error"}, NO_OOM),
        ({"code": 1, "message": "RuntimeError: NCCL error: unhandled system error"}, NO_OOM),
        ({"code": 1, "message": "RuntimeError: No CUDA GPUs are available"}, NO_OOM),
        ({"signal": 11}, NO_OOM),
        ({"code": 1, "message": "ValueError: bad sample"}, NO_OOM),
        ({"code": 1, "message": "RuntimeError: CUDA out of memory"}, NO_OOM),
        ({"code": 1, "message": "RuntimeError: CUDA error: device-side assert triggered"}, NO_OOM),
        ({"code": 1, "message": "RuntimeError: Xid 31 of this process"}, NO_OOM),  # programs' faults
        ({"signal": 6, "message": "RuntimeError: gloo: Connection reset by peer"}, NO_OOM),
        ({"signal": 9}, OOM),
        ({"signal": 7}, replace(NO_OOM, shm_free_bytes=4096, shm_size_bytes=64 << 20)),
    ],
)
def test_any_other_death_proves_nothing_about_a_device(record, evidence) -> None:
    assert shown(evidence, **record) == ""


def test_who_is_killed_from_outside_proves_nothing_by_what_it_wrote_before() -> None:
    assert shown(replace(NO_OOM, last_lines=("RuntimeError: uncorrectable ECC error",)), signal=9) == ""


def test_a_crash_is_explained_by_what_it_wrote_last() -> None:
    lines = (
        "terminate called after throwing an instance of 'c10::Error'",
        "  what():  CUDA error: uncorrectable ECC",
    )
    assert shown(replace(NO_OOM, last_lines=lines), signal=6) == "what():  CUDA error: uncorrectable ECC"
