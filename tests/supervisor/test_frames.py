"""Stacks as faulthandler writes them become one line for people."""

from __future__ import annotations

import pytest

from trainer_launch.model.collectives import Doing
from trainer_launch.supervisor import stacks
from trainer_launch.supervisor.hang_detection import Worker

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


@pytest.mark.parametrize(
    ("text", "place", "waits"),
    [
        (REDUCE, "waits in all_reduce, called from train.py:31 (step)", True),
        (BATCH, "in data.py:22 (read_batch)", False),
        (LOADER, "in __next__, called from train.py:28 (main)", False),
        (BACKWARD, "waits in backward, called from train.py:30 (step)", True),
        ("", "unknown", None),
        ("Fatal Python error: nothing\n", "unknown", None),
        (BATCH + REDUCE, "waits in all_reduce, called from train.py:31 (step)", True),
    ],
)
def test_a_main_threads_place(text, place, waits):
    known = stacks.main_thread(text)
    assert stacks.where(known) == place
    assert stacks.waits_for_others(known) is waits


def test_a_program_in_an_installed_package_is_named_by_its_innermost_call():
    text = f'Thread 0x1 (most recent call first):\n  File "{SITE}/recipes/full.py", line 7 in train\n'
    assert stacks.where(stacks.main_thread(text)) == "full.py:7 (train)"


def test_alike_ranks_stand_together_and_the_odd_one_out_comes_first():
    ranks = [Worker(f"rank {rank}", rank, 1, rank, rank) for rank in range(8)]
    places = {rank: "in read_batch" if rank.rank == 3 else "waits in all_reduce" for rank in ranks}
    assert stacks.stacks_digest(places) == (
        "rank 3: in read_batch",
        "ranks 0-2,4-7: waits in all_reduce",
    )
    assert stacks.stacks_digest({Worker("program", 1, 1): "state S"}) == ("program: state S",)


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


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (SAVE, Doing.CHECKPOINT),
        (FETCH, Doing.DATA),
        (LOADER, Doing.DATA),
        (COMPILE, Doing.COMPILING),
        (PROMPT, Doing.DEBUGGER),
        (REDUCE, Doing.COLLECTIVE),
        (BACKWARD, Doing.COLLECTIVE),
        (BATCH, Doing.UNKNOWN),
        ("", Doing.UNKNOWN),
    ],
)
def test_what_a_main_thread_is_in(text, doing):
    assert stacks.doing(stacks.main_thread(text)) is doing
