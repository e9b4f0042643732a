"""Stacks as faulthandler writes them become one line for people."""

from __future__ import annotations

import os
import threading

import pytest

from trainer_launch.diagnosis import flight_recorder, stacks
from trainer_launch.diagnosis.collectives import Doing, Recorded
from trainer_launch.diagnosis.hang_detection import WatchedWorker
from trainer_launch.diagnosis.worker_samples import WatchedWorkers
from trainer_launch.model.codec import decode

SITE = "/opt/venv/lib/python3.11/site-packages"
REDUCE = f'''Thread 0x00007f5b2a9fe6c0 (most recent call first):
  File "{SITE}/torch/utils/data/_utils/pin_memory.py", line 52 in do_one_step
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007fb927297b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/workspace/train.py", line 31 in step
  File "/workspace/train.py", line 90 in <module>
'''
BATCH = """Current thread 0x00007fb927297b80 (most recent call first):
  File "/workspace/data.py", line 22 in read_batch
  File "/workspace/train.py", line 29 in <module>
"""
LOADER = f"""Thread 0x00007fb927297b80 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "{SITE}/torch/utils/data/dataloader.py", line 1243 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 726 in __next__
  File "/workspace/train.py", line 28 in main
  File "{SITE}/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 362 in wrapper
  File "/workspace/train.py", line 99 in <module>
"""
BACKWARD = f"""Current thread 0x00007fb927297b80 (most recent call first):
  File "{SITE}/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "{SITE}/torch/_tensor.py", line 581 in backward
  File "/workspace/train.py", line 30 in step
"""
LIBRARY = f"""Current thread 0x00007fb927297b80 (most recent call first):
  File "{SITE}/trl/scripts/sft.py", line 145 in <module>
"""


SERVES = f"""Thread 0x00007f5b2a9fe6c0 (most recent call first):
  File "/workspace/env.py", line 40 in simulate
  File "{SITE}/torch/distributed/rpc/internal.py", line 226 in _run_function

Current thread 0x00007fb927297b80 (most recent call first):
  File "{SITE}/torch/distributed/rpc/api.py", line 325 in shutdown
  File "/workspace/train.py", line 90 in <module>
"""


@pytest.mark.parametrize(
    ("text", "place", "waits"),
    [
        (REDUCE, "waits in all_reduce, called from train.py:31 (step)", True),
        (BATCH, "in data.py:22 (read_batch)", False),
        (LOADER, "in __next__, called from train.py:28 (main)", False),
        (BACKWARD, "waits in backward, called from train.py:30 (step)", True),
        (LIBRARY, "in sft.py:145 (<module>)", False),
        ("", "unknown", None),
        ("Fatal Python error: nothing\n", "unknown", None),
        (BATCH + REDUCE, "waits in all_reduce, called from train.py:31 (step)", True),
        (SERVES, "in env.py:40 (simulate)", False),  # for another rank
        (SERVES.replace("_run_function", "run"), "waits in shutdown, called from train.py:90 (<module>)", True),
    ],
)
def test_a_main_threads_place(text, place, waits):
    known = stacks.main_thread(text)
    assert stacks.where(known) == place
    assert stacks.waits_for_others(known) is waits


POOL = f"""Current thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "{SITE}/torch/utils/data/_utils/worker.py", line 333 in _worker_loop
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
  File "{SITE}/torch/utils/data/dataloader.py", line 1176 in __init__
  File "/workspace/train.py", line 8 in <module>
"""
READS = POOL.replace(
    "/usr/lib/python3.11/multiprocessing/queues.py", "/workspace/data.py", 1
).replace("in get", "in read_batch")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_idle"), [(POOL, True), (READS, False), (LOADER, False), (BATCH, False), (REDUCE, False)]
)
def test_a_loaders_process_without_work_is_told_from_one_that_reads_or_waits_for_its_own(text, is_idle):
    assert stacks.waits_for_work(stacks.main_thread(text)) is is_idle


def test_stacks_that_the_launchers_own_thread_has_written_are_the_programs():
    ours = f'  File "{SITE}/trainer_launch/diagnosis/flight_recorder.py", line 64 in _serve'
    text = f"Current thread 0x2 (most recent call first):\n{ours}\n\n{BATCH.replace('Current t', 'T')}"
    assert stacks.where(stacks.main_thread(text)) == "in data.py:22 (read_batch)"


UPLOAD = """Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/workspace/train.py", line 22 in upload
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""
SHUTDOWN = """
Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown
"""


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (UPLOAD + SHUTDOWN, "at its exit, waiting for a thread in train.py:22 (upload)"),
        (SHUTDOWN, "at its exit, waiting for a thread"),
        (UPLOAD + BATCH, ""),
        ("", ""),
    ],
)
def test_a_program_that_has_ended_and_waits_for_a_thread_is_at_its_exit(text, where):
    assert stacks.at_exit(text) == where


def test_stacks_that_a_thread_of_the_process_writes_are_read_as_those_of_faulthandler() -> None:
    main, texts = threading.get_ident(), list[str]()
    writer = threading.Thread(target=lambda: texts.append(flight_recorder.python_stacks(main)))
    writer.start()
    writer.join()
    (text,) = texts
    own = next(frame for frame in stacks.main_thread(text) if not frame.is_library)
    assert own.function == "test_stacks_that_a_thread_of_the_process_writes_are_read_as_those_of_faulthandler"
    assert "python_stacks" not in text, "the writer itself is no thread of the program's"


def test_a_path_that_is_no_utf_8_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = os.fsdecode(b'  File "/d\xe9p\xf4t/train.py", line 3 in step\n')
    monkeypatch.setattr(flight_recorder, "answer", lambda question, rank: {"number": 7, "stacks": stacks})
    answer = decode(Recorded, flight_recorder._reply({"number": 7, "stacks": True}, 0), 1 << 20)
    assert (answer.number, answer.stacks) == (7, '  File "/d?p?t/train.py", line 3 in step\n')


def test_alike_ranks_stand_together_and_the_odd_one_out_comes_first():
    ranks = [WatchedWorker(f"rank {rank}", rank, 1, rank, rank) for rank in range(8)]
    places = {rank: "in read_batch" if rank.rank == 3 else "waits in all_reduce" for rank in ranks}
    assert stacks.stacks_digest(places) == (
        "rank 3: in read_batch",
        "ranks 0-2,4-7: waits in all_reduce",
    )
    assert stacks.stacks_digest({WatchedWorker("program", 1, 1): "state S"}) == ("program: state S",)


READS = """  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/usr/lib/python3.11/http/client.py", line 459 in read
  File "/workspace/data.py", line 4 in get
"""
IN_POOL = '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 83 in _worker\n'
IN_THREAD = '  File "/usr/lib/python3.11/threading.py", line 982 in run\n'
LOCKED = '  File "/workspace/data.py", line 9 in lock\n'
RESULT = '  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result\n'
JOIN = '  File "/usr/lib/python3.11/threading.py", line 1119 in join\n'


@pytest.mark.parametrize(
    ("main", "others", "is_transfer"),
    [
        (RESULT, [READS + IN_POOL + IN_THREAD], True),
        (RESULT, [READS + IN_POOL + IN_THREAD, IN_POOL + IN_THREAD], True),
        (RESULT, [READS + IN_POOL + IN_THREAD, LOCKED + IN_POOL + IN_THREAD], False),
        (RESULT, [READS + IN_THREAD], False),
        (RESULT, [], False),
        (JOIN, [READS + IN_THREAD], True),
        (JOIN, [READS + IN_THREAD, LOCKED + IN_THREAD], False),
        (LOCKED, [READS + IN_THREAD], False),
    ],
    ids=["pool", "pool with an idle thread", "a thread of it is locked", "another's", "a process's", "joined",
         "perhaps another is joined", "a lock beside a connection that is kept"],
)  # fmt: skip
def test_a_main_thread_that_awaits_threads_is_in_a_transfer_only_if_each_that_it_may_await_is(
    main: str, others: list[str], is_transfer: bool
) -> None:
    head = "Thread 0x{} (most recent call first):\n"
    text = "".join(f"{head.format(n + 2)}{each}\n" for n, each in enumerate(others)) + head.format(1) + main
    workers = WatchedWorkers(dict, lambda _: 0, "/nowhere")
    doing = workers.doing(WatchedWorker("rank 1", 2**22 + 1, 1), text + LOCKED)  # a process that is gone
    assert doing is (Doing.TRANSFER if is_transfer else Doing.UNKNOWN)


SAVE = f"""Current thread 0x1 (most recent call first):
  File "/workspace/slow.py", line 5 in write
  File "{SITE}/torch/serialization.py", line 970 in save
  File "/workspace/train.py", line 31 in main
"""
FETCH = f"""Current thread 0x1 (most recent call first):
  File "/workspace/data.py", line 22 in __getitem__
  File "{SITE}/torch/utils/data/_utils/fetch.py", line 54 in fetch
  File "/workspace/train.py", line 31 in main
"""
COMPILE = f"""Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/subprocess.py", line 1264 in wait
  File "{SITE}/torch/_inductor/codecache.py", line 54 in compile
  File "/workspace/train.py", line 31 in main
"""
PROMPT = """Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/cmd.py", line 126 in cmdloop
  File "/usr/lib/python3.11/pdb.py", line 356 in _cmdloop
  File "/workspace/train.py", line 31 in main
"""


EVAL = f'''  File "{SITE}/torch/_dynamo/eval_frame.py", line 1446 in _fn
  File "/workspace/train.py", line 11 in step
  File "{SITE}/torch/_dynamo/eval_frame.py", line 1166 in compile_wrapper
  File "/workspace/train.py", line 13 in <module>
'''
# As torch 2.13 and 2.5 have them.
COMPILED = f"""Current thread 0x1 (most recent call first):
  File "/workspace/train.py", line 7 in read_batch
{EVAL}"""
COMPILED_REDUCE = f"""Current thread 0x1 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
{EVAL}"""
GENERATED = f"""Current thread 0x1 (most recent call first):
  File "/tmp/torchinductor_me/ab/cab.py", line 99 in call
  File "{SITE}/torch/_inductor/codecache.py", line 1478 in __call__
  File "{SITE}/torch/_inductor/compile_fx.py", line 432 in run
  File "{SITE}/torch/_inductor/output_code.py", line 700 in __call__
  File "{SITE}/torch/_functorch/_aot_autograd/runtime_wrappers.py", line 308 in runtime_wrapper
  File "{SITE}/torch/_functorch/aot_autograd.py", line 987 in forward
{EVAL}"""
TRACED = f"""Current thread 0x1 (most recent call first):
  File "/workspace/backend.py", line 3 in backend
  File "{SITE}/torch/__init__.py", line 2568 in __call__
  File "{SITE}/torch/_dynamo/output_graph.py", line 3119 in _call_user_compiler
  File "{SITE}/torch/_dynamo/symbolic_convert.py", line 1950 in run
  File "{SITE}/torch/_dynamo/convert_frame.py", line 935 in run_tracer
  File "{SITE}/torch/_dynamo/convert_frame.py", line 2628 in __call__
{EVAL}"""
BACKWARD_COMPILED = f"""Current thread 0x1 (most recent call first):
  File "{SITE}/torch/_inductor/compile_fx.py", line 1600 in bw_compiler
  File "{SITE}/torch/_dynamo/eval_frame.py", line 1446 in _fn
  File "{SITE}/torch/_dynamo/backends/common.py", line 83 in _wrapped_bw_compiler
  File "{SITE}/torch/_functorch/_aot_autograd/runtime_wrappers.py", line 2853 in get_or_compile
  File "{SITE}/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/workspace/train.py", line 20 in <module>
"""


def called(*inner: str) -> str:
    """A stack whose innermost calls these are, each `FILE:FUNCTION`."""
    calls = [call.rpartition(":") for call in inner]
    lines = [f'  File "{file}", line 7 in {function}\n' for file, _, function in calls]
    rest = '  File "/workspace/train.py", line 31 in main\n'
    return "Current thread 0x1 (most recent call first):\n" + "".join(lines) + rest


@pytest.mark.parametrize(
    ("calls", "doing"),
    [
        ([f"{SITE}/deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py:save"], Doing.CHECKPOINT),
        ([f"{SITE}/deepspeed/runtime/engine.py:save_checkpoint"], Doing.CHECKPOINT),
        (["/workspace/megatron/training/checkpointing.py:save"], Doing.CHECKPOINT),
        (["/workspace/megatron/core/dist_checkpointing/serialization.py:save"], Doing.CHECKPOINT),
        ([f"{SITE}/transformers/trainer.py:_save_checkpoint"], Doing.CHECKPOINT),
        ([f"{SITE}/transformers/modeling_utils.py:save_pretrained"], Doing.CHECKPOINT),
        ([f"{SITE}/accelerate/checkpointing.py:save_accelerator_state"], Doing.CHECKPOINT),
        ([f"{SITE}/lightning/pytorch/plugins/io/torch_io.py:save_checkpoint"], Doing.CHECKPOINT),
        ([f"{SITE}/pytorch_lightning/callbacks/model_checkpoint.py:_save_topk_checkpoint"], Doing.CHECKPOINT),
        ([f"{SITE}/pytorch_lightning/callbacks/model_checkpoint.py:on_train_batch_end"], Doing.UNKNOWN),
        (["/workspace/train.py:save_checkpoint"], Doing.CHECKPOINT),
        (["/usr/lib/python3.11/shutil.py:copyfileobj"], Doing.TRANSFER),
        (["/usr/lib/python3.11/ssl.py:read", f"{SITE}/botocore/httpsession.py:send"], Doing.TRANSFER),
        ([f"{SITE}/s3fs/core.py:_put_file"], Doing.TRANSFER),
        (["/usr/lib/python3.11/socket.py:readinto", f"{SITE}/urllib3/response.py:read"], Doing.TRANSFER),
        (["/usr/lib/python3.11/multiprocessing/connection.py:_recv"], Doing.UNKNOWN),
        ([f"{SITE}/fsspec/asyn.py:sync"], Doing.TRANSFER),
        ([f"{SITE}/huggingface_hub/file_download.py:http_get"], Doing.TRANSFER),
        ([f"{SITE}/fsspec/asyn.py:sync", "/workspace/train.py:save_checkpoint"], Doing.CHECKPOINT),
        ([f"{SITE}/fsspec/asyn.py:sync", f"{SITE}/torch/utils/data/_utils/fetch.py:fetch"], Doing.DATA),
        (["/usr/lib/python3.11/subprocess.py:_communicate"], Doing.UNKNOWN),
    ],
)
def test_what_frameworks_and_libraries_do_for_long_is_known_by_their_files(calls, doing):
    assert stacks.doing(stacks.main_thread(called(*calls))) is doing
    assert doing is Doing.UNKNOWN or doing is Doing.DATA or doing.takes_long


def test_a_checkpoint_waits_only_where_its_innermost_call_is_a_collective():
    save = f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py:save"
    gather = f"{SITE}/torch/distributed/distributed_c10d.py:all_gather_object"
    assert stacks.where(stacks.main_thread(called(save))) == "in save, called from train.py:31 (main)"
    assert stacks.where(stacks.main_thread(called(gather, save))).startswith("waits in save, called from ")


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (SAVE, Doing.CHECKPOINT),
        (FETCH, Doing.DATA),
        (LOADER, Doing.DATA),
        (COMPILE, Doing.COMPILING),
        (TRACED, Doing.COMPILING),
        (BACKWARD_COMPILED, Doing.COMPILING),
        (COMPILED, Doing.UNKNOWN),
        (COMPILED_REDUCE, Doing.COLLECTIVE),
        (GENERATED, Doing.UNKNOWN),
        (PROMPT, Doing.DEBUGGER),
        (REDUCE, Doing.COLLECTIVE),
        (BACKWARD, Doing.COLLECTIVE),
        (BATCH, Doing.UNKNOWN),
        ("", Doing.UNKNOWN),
    ],
)
def test_what_a_main_thread_is_in(text, doing):
    assert stacks.doing(stacks.main_thread(text)) is doing
