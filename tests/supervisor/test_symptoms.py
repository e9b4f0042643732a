"""The last lines of programs, as Python, torch, NCCL, gloo, CUDA and ROCm write them, and what they mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer_launch.model import Death
from trainer_launch.model.suggestions import is_typo_in_program
from trainer_launch.supervisor.error_lines import (
    essence,
    final_error,
    headline,
    last_words,
    latest,
    message_in,
    printed_last,
    recognise,
)
from trainer_launch.supervisor.failure import Evidence, classify, with_error_file, with_torchruns_file

# Each: `=== exits N` or `=== signal N`, `-> REASON EXIT-CODE`, and the last lines of the program.
_HEAD = re.compile(r"^=== (exits|signal) (\d+) -> (\w+) (\d+)\n", re.MULTILINE)
_PARTS = _HEAD.split(Path(__file__).with_name("last_lines.txt").read_text())[1:]
ROWS = [
    (text, how, int(number), reason, int(code))
    for how, number, reason, code, text in zip(*(_PARTS[n::5] for n in range(5)), strict=True)
]
NCCL = "torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.cpp:94, unhandled cuda error"
TERMINATE = "terminate called after throwing an instance of 'c10::DistBackendError'"
WATCHDOG = "  what():  [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 600020 ms"


def death(how, number):
    return Death(process="main", **{"code" if how == "exits" else "signal": number})


@pytest.mark.parametrize(("text", "how", "number", "reason", "code"), ROWS, ids=range(len(ROWS)))
def test_the_last_error_tells_the_cause(text, how, number, reason, code):
    failure = classify(death(how, number), Evidence(last_lines=tuple(text.splitlines())))
    assert (failure.reason, failure.exit_code) == (reason, code), failure
    assert failure.hint or reason == "Failed"


@pytest.mark.parametrize(("text", "how", "number", "reason", "code"), ROWS, ids=range(len(ROWS)))
def test_torchs_error_file_tells_the_same(text, how, number, reason, code):
    message = "\n".join(final_error(text.splitlines()))
    content = {"message": {"message": message, "errorCode": number if how == "exits" else -number}}
    failure = classify(with_torchruns_file(death("exits", 1), content), Evidence())
    assert (failure.reason, failure.exit_code) == (reason, code), failure


def test_the_evidence_is_the_line_that_shows_it():
    lines = (NCCL, "Last error:", "Cuda failure 2 'out of memory'")
    failure = classify(death("exits", 1), Evidence(last_lines=lines))
    assert failure.evidence == ("Cuda failure 2 'out of memory'",)
    assert failure.restart_helps is None, "the launcher starts it again: another process may have held the memory"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("OSError: [Errno 28] No space left on device: '/ckpt/model.pt'", "because a volume was full"),
        ("OSError: [Errno 122] Disk quota exceeded: '/ckpt/model.pt'", "because a volume was full"),
        ("OSError: 1048576 requested and 131056 written", "because it could not write a file to its end"),
        ("OSError: [Errno 24] Too many open files: '/data/7'", "because it had too many open files"),
    ],
)
def test_a_full_volume_and_too_many_open_files_come_with_advice(error, why):
    failure = classify(Death(rank=1, code=1, message=error), Evidence())
    assert (failure.reason, failure.exit_code, failure.restart_helps) == ("Failed", 1, None)
    assert failure.message == f"rank 1 ended with exit code 1, {why}: {error}"
    assert failure.hint


def test_what_torchs_agent_logs_of_a_workers_end_is_no_word_of_the_workers():
    where = "torch/distributed/elastic/multiprocessing/api.py:836]"
    logged = f"E1122 03:11:59.936000 1461 {where} failed (exitcode: 33) local_rank: 0 (pid: 1527) of fn: program"
    closing = (
        "W1122 03:04:25.099000 341 torch/multiprocessing/spawn.py:174] Terminating process 351 via signal SIGTERM"
    )
    for lines in ((logged,), (closing, logged)):
        failure = classify(death("exits", 33), Evidence(last_lines=lines))
        assert failure.message == "main ended with exit code 33"
        assert last_words(("the last word", *lines)) == "the last word"


OF_TORCHRUN = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 5, in <module>
[rank1]:     raise ValueError("bad record 17")
[rank1]: ValueError: bad record 17
[rank0]: Traceback (most recent call last):
[rank0]:   File "/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30382. GLHF!
E1129 12:23:18.769000 7128 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""


def test_an_error_of_torchrun_is_told_as_that_of_its_worker_which_is_no_victim():
    lines = tuple(OF_TORCHRUN.splitlines())
    assert classify(death("exits", 1), Evidence(last_lines=lines)).message.endswith("1: ValueError: bad record 17")
    victim = classify(death("exits", 1), Evidence(last_lines=lines[5:]))
    assert victim.reason == "PeerLost"
    assert "GLHF" in victim.message
    alone = classify(death("exits", 1), Evidence(last_lines=lines[-6:]))
    assert alone.message == "main ended with exit code 1"
    missing = classify(death("exits", 1), Evidence(last_lines=("python: No module named nosuch", *lines[-7:])))
    assert missing.reason == "ProgramError"
    unheaded = classify(death("exits", 1), Evidence(last_lines=(*lines[:5], *lines[-3:])))
    assert unheaded.message.endswith("1: ValueError: bad record 17")


def test_torchruns_report_of_many_ranks_takes_no_room_from_their_errors():
    own, rank_0 = OF_TORCHRUN.splitlines()[1:5], OF_TORCHRUN.splitlines()[5:9]
    victims = [line.replace("rank0", f"rank{rank}") for rank in range(2, 14) for line in rank_0]
    ranks = [line for n in range(12) for line in (f"[{n}]:", f"  rank      : {n}", "  exitcode  : -15 (pid: 7)")]
    root = ["Root Cause (first observed failure):", "  rank      : 1 (local_rank: 1)"]
    printed = [*own, *victims, *OF_TORCHRUN.splitlines()[9:], "Failures:", *ranks, *root, "uploading logs"]
    lines = latest(printed, 60)
    assert classify(death("exits", 1), Evidence(last_lines=tuple(lines))).message.endswith(
        "1: ValueError: bad record 17"
    )
    assert lines[-3:] == [*root, "uploading logs"]
    assert latest(printed[:40], 2) == printed[38:40]


def test_what_cpp_says_is_told_together_with_its_end():
    frames = tuple(f"frame #{n}: c10::Error::Error() + 0x96" for n in range(20))
    failure = classify(death("signal", 6), Evidence(last_lines=(TERMINATE, WATCHDOG, *frames)))
    assert failure.message.startswith(
        "main ended with signal SIGABRT, because a collective did not complete in time: terminate called"
    )
    assert "Rank 5" in failure.message
    assert headline(("x",)) == ""


def test_of_an_error_that_was_raised_in_another_process_only_what_was_raised_there_is_kept():
    frames = "\n".join(
        f'  File "/torch/{number}.py", line {number}, in call\n    return it()' for number in range(20)
    )
    raised = "unable to allocate shared memory(shm) for file </torch_51_4_0>: No space left on device (28)"
    message = (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        f"Original Traceback (most recent call last):\n{frames}\nRuntimeError: {raised}\n"
    )
    kept = essence(message)
    assert kept == f"RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {raised}"
    found = recognise(kept[:1000])
    assert found is not None
    assert found[0].reason == "SharedMemoryFull"
    assert essence("ValueError: 3") == "ValueError: 3"


def told(name, trace=""):
    """What is told of an exception whose traceback torch's error file has."""
    worker = with_error_file(Death(rank=0, code=1), torchs(name, trace), was_ended=False)
    return classify(worker, Evidence()).message


def ended_with(*lines):
    """What is told of a program whose output ends so."""
    return classify(death("exits", 1), Evidence(last_lines=lines, last_errors=lines))


def torchs(name, trace):
    """The error file of an exception."""
    return {"message": {"message": name, "extraInfo": {"py_callstack": trace}}}


def test_errors_of_other_processes_and_ranks_are_told_with_whose_they_are():
    frames = "\n".join(f'  File "/torch/{number}.py", line {number}, in call\n    it()' for number in range(9))
    spawned = f"\n\n-- Process 0 terminated with the following error:\nTraceback (most recent call last):\n{frames}"
    assert told(f"ProcessRaisedException: {spawned}\nValueError: shard 3 is corrupt\n").endswith(
        ": ProcessRaisedException: -- Process 0 terminated with the following error: ValueError: shard 3 is corrupt"
    )
    saved = (
        "CheckpointException: CheckpointException ranks:dict_keys([1])\nTraceback (most recent call last): (RANK 1)"
    )
    for rank, named in ((0, None), (1, 1)):
        worker = Death(rank=rank, code=1, message=essence(f"{saved}\n{frames}\nOSError: quota exceeded"))
        assert classify(worker, Evidence()).rank == named, "of all ranks that raise it, the one whose error it is"
    assert told(f"{saved}\n{frames}\nOSError: [Errno 122] Disk quota exceeded: '/ckpt'\n").endswith(
        "CheckpointException ranks:dict_keys([1]) rank 1: OSError: [Errno 122] Disk quota exceeded: '/ckpt'"
    )


def test_torchs_own_comparison_of_collectives_is_told_to_its_end():
    text = next(text for text, *_ in ROWS if "CollectiveFingerPrint" in text).strip()
    assert told(text).endswith("Collectives differ in the following aspects: Tensor Tensor shapes: 4vs 8")
    assert "Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=10" in told(text)


CHAIN = """\
Traceback (most recent call last):
  File "/app/data.py", line 3, in read
OSError: [Errno 5] Input/output error
{}
Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
RuntimeError: cannot load shard 3
"""
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(("link", "word"), [(DIRECT, "from"), (HANDLING, "while handling")])
def test_the_error_that_an_exception_was_raised_from_is_told_also_from_the_output_alone(link, word):
    name, chain = "RuntimeError: cannot load shard 3", CHAIN.format(link)
    whole = f"{name} ({word} OSError: [Errno 5] Input/output error)"
    assert told(name, chain).endswith(f": {whole}")
    handled = ("ValueError: a bad record is skipped", "step 7")
    assert ended_with(*handled, *chain.splitlines()).message == f"main ended with exit code 1: {whole}"
    full = chain.replace("[Errno 5] Input/output error", "[Errno 28] No space left on device").splitlines()
    assert "because a volume was full" in ended_with(*full).message


@pytest.mark.parametrize("error", ["struct.error: unpack requires 8 bytes", "_queue.Empty", "StopIteration"])
def test_an_exception_of_any_name_is_told_and_neither_one_that_was_handled_before_nor_a_word_after_it(error):
    handled = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "halving the batch")
    trace = (
        "Traceback (most recent call last):",
        '  File "/app/a.py", line 3, in read',
        "    q.get()",
        "    ^^^^^",
        error,
    )
    for prefix in ("", "[rank1]: "):
        failure = ended_with(*handled, *(prefix + line for line in trace), "uploading logs", "done")
        assert (failure.reason, failure.message) == ("Failed", f"main ended with exit code 1: {error}")
        assert failure.hint is None


@pytest.mark.parametrize("head", ["starting", "Stack (most recent call last):"])
def test_what_a_program_prints_below_a_stack_that_it_shows_is_no_error(head):
    stack = (head, '  File "/app/a.py", line 3, in step', "    traceback.print_stack()")
    assert ended_with(*stack, "step: 1", "loss: 2", "no data").message == "main ended with exit code 1: no data"


LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:21345"


def test_who_fails_while_it_handles_a_lost_peer_is_a_victim_and_who_loses_it_while_it_handles_an_error_is_not():
    chain = "{}\n" + HANDLING + "\n{}\n"
    victim = with_error_file(
        Death(rank=0, code=1),
        torchs("TrainError: step failed", chain.format(LOST, "TrainError: step failed")),
        was_ended=False,
    )
    assert classify(victim, Evidence()).reason == "PeerLost"
    culprit = with_error_file(
        Death(rank=0, code=1), torchs(LOST, chain.format("ValueError: torn batch", LOST)), was_ended=False
    )
    failure = classify(culprit, Evidence())
    assert (failure.reason, failure.rank) == ("Failed", 0)
    assert failure.message == "rank 0 ended with exit code 1: ValueError: torn batch"


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/app/train.py", line 9, in <module>
  |     raise ExceptionGroup("loading", [ValueError("bad shard")])
  | ExceptionGroup: loading (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: bad shard
    +------------------------------------
"""


def test_the_errors_of_a_group_are_told_also_from_the_output_alone():
    assert told("ExceptionGroup: loading (1 sub-exception)", GROUP).endswith(
        ": ExceptionGroup: loading (1 sub-exception) (from ValueError: bad shard)"
    )
    for prefix in ("", "[rank1]: "):  # as torch writes it where a rank has joined its group
        failure = ended_with(*(prefix + line for line in GROUP.splitlines()))
        assert failure.message == "main ended with exit code 1: ValueError: bad shard"


def test_a_crash_below_more_frames_than_are_kept_is_told_with_its_innermost_frame():
    frames = [f'  File "/app/net.py", line {number} in forward' for number in range(90)]
    other = ["Thread 0x7e (most recent call first):", '  File "/b.py", line 2 in serve', *frames]
    stack = ["Current thread 0x7f (most recent call first):", '  File "/a.py", line 27 in decode', *frames]
    printed = [
        "step 3",
        "Fatal Python error: Segmentation fault",
        *other,
        *stack,
        "Extension modules: numpy (total: 1)",
    ]
    failure = classify(death("signal", 11), Evidence(last_lines=tuple(latest(printed, 60))))
    assert failure.message.endswith(': Fatal Python error: Segmentation fault File "/a.py", line 27 in decode')
    assert latest(["a", *frames], 60) == frames[-60:]
    assert latest([], 60) == []


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: can't start new thread",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 4: Resource temporarily unavailable",
    ],
)
def test_a_program_that_could_start_no_thread_is_told_which_limit_to_raise(line):
    failure = ended_with(line)
    assert "because it could start no more threads" in failure.message
    assert "pids limit" in (failure.hint or "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("step 3", "free(): invalid pointer"), "free(): invalid pointer"),
        (("double free or corruption (out)",), "double free or corruption (out)"),
        (("corrupted size vs. prev_size",), "corrupted size vs. prev_size"),
        (("*** stack smashing detected ***: terminated",), "*** stack smashing detected ***: terminated"),
        (
            (
                "Fatal Python error: Segmentation fault",
                "",
                "Thread 0x7e (most recent call first):",
                '  File "/b.py", line 2 in serve',
                "Current thread 0x7f (most recent call first):",
                '  File "/a.py", line 27 in decode',
            ),
            'Fatal Python error: Segmentation fault File "/a.py", line 27 in decode',
        ),
        (
            (
                "Timeout (0:00:02)!",
                "Thread 0x7e (most recent call first):",
                '  File "/b.py", line 2 in serve',
                "Thread 0x7f (most recent call first):",
                '  File "/a.py", line 27 in read_batch',
                '  File "/a.py", line 30 in <module>',
            ),
            'Timeout (0:00:02)! File "/a.py", line 27 in read_batch',
        ),
        (("train: a.c:12: step: Assertion `n > 0' failed.",), "train: a.c:12: step: Assertion `n > 0' failed."),
        (("corrupted shard 3 skipped",), None),
        (("free memory: 3 GiB",), None),
    ],
)
def test_what_glibc_and_python_say_as_they_abort_is_told_and_no_other_line(lines, words):
    failure = classify(death("signal", 6), Evidence(last_lines=lines))
    assert failure.message == "main ended with signal SIGABRT" + (f": {words}" if words else "")
    assert failure.reason == "Crashed"


EVALUATES = """Traceback (most recent call last):
  File "/app/train.py", line 12, in main
    rule = eval(row)
  File "<string>", line 1, in <module>
NameError: name 'scale' is not defined
"""


def test_a_name_that_is_missing_in_a_text_which_a_program_evaluates_is_no_typo_of_the_program():
    content = {"message": {"message": EVALUATES.splitlines()[-1], "extraInfo": {"py_callstack": EVALUATES}}}
    message = message_in(content)
    assert message == "NameError: name 'scale' is not defined (<string>, line 1)"
    assert not is_typo_in_program(message)
    plain = EVALUATES.replace("<string>", "/app/rules.py")
    content = {"message": {"message": plain.splitlines()[-1], "extraInfo": {"py_callstack": plain}}}
    assert is_typo_in_program(message_in(content) or "")


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ((), "NameError: name 'scale' is not defined"),
        (("giving up", "[W1129 08:00:00.1 x.cpp:1] destroy_process_group() was not called"), "NameError: name"),
        (("step 3", "step 4", "done"), ""),
    ],
    ids=["it ends", "it says so, and a library warns", "it goes on"],
)
def test_an_error_that_a_program_printed_last_has_made_it_leave_but_not_one_after_which_it_went_on(after, error):
    words = printed_last(("step 2", *EVALUATES.splitlines(), *after))
    assert words.startswith(error)
    assert bool(words) == bool(error)


def test_an_error_that_is_named_without_a_traceback_is_a_programs_own_words():
    assert printed_last(("ValueError: none of the 3 records had this",)) == ""
