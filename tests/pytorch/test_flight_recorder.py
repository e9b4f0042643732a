"""A worker's thread answers what torch's flight recorder knows, in torch's own format, also while it is blocked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.launching import clean_env
from tests.waiting import eventually
from trainer_launch.model.collectives import Group, RankState, Recorded, explain
from trainer_launch.pytorch.flight_recorder import told
from trainer_launch.pytorch.recorder_questions import Recorders

pytestmark = pytest.mark.process
WITHIN_S = 20.0
NAMES = ["rank 0", "rank 1"]

# Two ranks of torch's; rank 1 stays outside the sixth all_reduce. Rank 0 asks for both by their threads.
RANK = """
import json, os, sys, time, torch, torch.distributed as dist
from trainer_launch.pytorch import flight_recorder
rank, fd = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
both = dist.new_group([0, 1], group_desc="both")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(2), group=both)
flight_recorder.answer_in_thread(fd, rank)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(4))
sys.stdin.read()
os._exit(0)
"""


def asked(recorders: Recorders, folder: str | None, within_s: float) -> Mapping[str, Recorded]:
    return recorders.answers(recorders.question(folder), time.monotonic() + within_s)


@contextlib.contextmanager
def ranks_of(recorders: Recorders, store: Path) -> Iterator[None]:
    """Both ranks, ready."""
    started = []
    try:
        for number, fd in enumerate(recorders.open(NAMES)):
            argv = [sys.executable, "-c", RANK, str(fd), str(store)]
            env = clean_env({"RANK": str(number), "TORCH_FR_BUFFER_SIZE": "100"})
            started.append(
                subprocess.Popen(
                    argv, env=env, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            os.close(fd)
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield
    finally:
        recorders.close()
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.torch
def test_blocked_workers_answer_and_torchs_own_reader_takes_their_dumps(tmp_path: Path) -> None:
    recorders, folder = Recorders(), tmp_path / "dumps"
    folder.mkdir()
    said: Mapping[str, Recorded] = {}
    with ranks_of(recorders, tmp_path / "store"):

        def is_blocked() -> bool:
            nonlocal said
            said = asked(recorders, str(folder), WITHIN_S)
            found = explain([RankState(rank=n, groups=said[name].groups) for n, name in enumerate(NAMES)], 0)
            sentence = "rank 1 never entered all_reduce #6 of default_pg, [[4]] Float; rank 0 has waited in it"
            return found is not None and found.text.startswith(sentence)

        eventually(is_blocked, lambda: str(said))
        # What has ended is torch's own status here, and a slower thread of gloo's may have written an older number.
        entered, ended = {"rank 0": 6 + 1, "rank 1": 5 + 1}, 5 + 1
        far = recorders.how_far()
        assert far.keys() == entered.keys()
        assert all(entered[name] <= far[name] <= entered[name] + ended for name in entered), far
        dumps = {name: (folder / f"nccl_trace_rank_{n}").stat().st_size for n, name in enumerate(NAMES)}
        assert all(recorders.answered(name) > size for name, size in dumps.items())
        assert said["rank 1"].groups["1"].title == "both"
        assert said["rank 1"].groups["1"].ranks == "0-1"
        read = subprocess.run(
            [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-v"],
            capture_output=True,
            text=True,
            env=clean_env(),
            check=True,
        )
        assert "missing_ranks={1}" in read.stdout + read.stderr


@pytest.mark.torch
def test_where_a_rank_is_meanwhile_is_looked_at_while_other_questions_are_answered(tmp_path: Path) -> None:
    recorders = Recorders()
    with ranks_of(recorders, tmp_path / "store"):
        recorders.ask_entries(10, after_us=1_000_000, looked_at=["rank 1"])
        assert asked(recorders, None, WITHIN_S).keys() == {*NAMES}
        answered_ns = time.time_ns()
        eventually(lambda: recorders.entries()[1], "the last collectives")
        told, _ = recorders.entries()
        assert not told["rank 0"].looks
        looks = told["rank 1"].looks
        assert looks[-1][0] > answered_ns
        assert all(stack[0].endswith(":<module>") for _, stack in looks), "it reads from standard input"


def test_without_torch_the_answer_says_so() -> None:
    code = "from trainer_launch.pytorch.flight_recorder import answer; print(answer({'number': 3}, 0))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "{'number': 3, 'why': 'torch has not been imported, or records nothing'}\n"


def test_a_trace_becomes_the_last_collectives_of_each_group() -> None:
    entry = {"process_group": ["0", "default_pg"], "input_sizes": [[4]], "input_dtypes": ["Float"]}
    trace = {
        "pg_status": {"0": {"last_enqueued_collective": "5", "last_completed_collective": "4"}, "9": {}},
        "entries": [
            {**entry, "collective_seq_id": 4, "profiling_name": "gloo:all_reduce", "time_created_ns": 1},
            {**entry, "collective_seq_id": 5, "profiling_name": "nccl:broadcast", "time_created_ns": 2},
            {**entry, "collective_seq_id": 9, "profiling_name": "gloo:send", "time_created_ns": 3, "is_p2p": True},
            {
                **entry,
                "process_group": ["7", ""],
                "collective_seq_id": 1,
                "profiling_name": "",
                "time_created_ns": 4,
            },
        ],
    }
    assert told(trace, {"0": ("default_pg", [0, 1, 2])}) == {
        "groups": {
            "0": {
                "title": "default_pg",
                "ranks": "0-2",
                "entered": 5,
                "done": 4,
                "last": [[4, "all_reduce", "[[4]] Float", 1], [5, "broadcast", "[[4]] Float", 2]],
            }
        }
    }


@pytest.mark.parametrize(
    ("status", "retired", "done"),
    [
        (1, {1: True, 2: True, 3: False}, 2),
        (3, {1: True, 2: False, 3: True}, 1),
        (1, {1: True, 2: True, 3: True}, 3),
        (2, {}, 2),
    ],
    ids=["the status is late", "a later one ended first", "all have ended", "no collectives are told"],
)
def test_what_has_ended_is_taken_from_the_collectives(status: int, retired: dict[int, bool], done: int) -> None:
    entry = {"process_group": ["0", ""], "profiling_name": "gloo:all_reduce", "time_created_ns": 1}
    trace = {
        "pg_status": {"0": {"last_enqueued_collective": "3", "last_completed_collective": str(status)}},
        "entries": [{**entry, "collective_seq_id": number, "retired": over} for number, over in retired.items()],
    }
    group = told(trace, {"0": ("", [0])})["groups"]["0"]
    assert (group["entered"], group["done"]) == (3, done)


def test_a_status_is_of_the_group_that_has_its_number_on_this_rank() -> None:
    """torch numbers only the groups that a rank is in: its third group may be the job's fourth."""
    entry = {"profiling_name": "gloo:all_reduce", "time_created_ns": 1, "collective_seq_id": 1, "retired": False}
    status = {"last_enqueued_collective": "1", "last_completed_collective": "0"}
    trace = {
        "pg_status": {"2": status, "1": status},
        "entries": [{**entry, "pg_id": 2, "process_group": ["3", ""]}],
    }
    groups = told(trace, {"0": ("", [0, 1, 2]), "2": ("", [1, 2]), "3": ("", [0, 2])})["groups"]
    assert {name: group["entered"] for name, group in groups.items()} == {"0": 0, "2": 1, "3": 1}


def test_who_does_not_answer_holds_nobody_up() -> None:
    """One has ended and had told what it knew, one writes what is no answer, one says nothing."""
    recorders = Recorders()
    ended, odd, silent = recorders.open(["ended", "odd", "silent"])
    try:
        os.write(odd, b"no answer\n" + b"x" * 10)
        os.write(ended, b'{"number": 0, "groups": {"0": {"entered": 5, "done": 5}}}\n')
        os.close(ended)
        assert asked(recorders, None, 0.2) == {}
        assert recorders.at_end == {"ended": Recorded(groups={"0": Group(entered=5, done=5)})}
        os.write(silent, b'{"number": 1, "why": "late"}\n{"number": 2, "why": "it has nothing"}\n')
        assert recorders.answers(2, time.monotonic() + 1.0) == {"silent": Recorded(number=2, why="it has nothing")}
    finally:
        recorders.close()
        os.close(odd)
        os.close(silent)
