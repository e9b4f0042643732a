"""A worker's thread answers what torch's flight recorder knows, in torch's own format, also while it is blocked."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.launching import clean_env
from tests.waiting import eventually
from trainer_launch.diagnosis import flight_recorder
from trainer_launch.diagnosis.collectives import (
    MAX_BYTES,
    Entries,
    Group,
    Message,
    RankState,
    Recorded,
    Stage,
    explain,
)
from trainer_launch.diagnosis.flight_recorder import answer, called_by, entered, hides_messages, progress_of
from trainer_launch.diagnosis.worker_samples import Recorders
from trainer_launch.model.codec import decode
from trainer_launch.model.units import numbers_in

pytestmark = pytest.mark.process
WITHIN_S = 20.0
NAMES = ["rank 0", "rank 1"]

# Two ranks of torch's; rank 1 stays outside the sixth all_reduce. Rank 0 asks for both by their threads.
RANK = """
import json, os, sys, time, torch, torch.distributed as dist
from trainer_launch.diagnosis import flight_recorder
rank, fd = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
both = dist.new_group([0, 1], group_desc="both")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(2), group=both)
flight_recorder.answer_in_thread(fd, lambda: rank)
flight_recorder.tell_of_first_group(fd)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(4))
sys.stdin.read()
os._exit(0)
"""

# A pipeline of two ranks that also reduce: rank 0 waits in its fourth all_reduce, rank 1 for what nobody sends.
PIPELINE = """
import os, sys, torch, torch.distributed as dist
from trainer_launch.diagnosis import flight_recorder
rank, fd = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for _ in range(3):
    for _ in range(rank + 1):
        dist.recv(torch.ones(4), 0) if rank else dist.send(torch.ones(4), 1)
    if not rank:
        dist.send(torch.ones(4), 1)
    dist.all_reduce(torch.ones(4))
flight_recorder.answer_in_thread(fd, lambda: rank)
flight_recorder.tell_of_first_group(fd)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(4))
else:
    work = dist.irecv(torch.ones(4), 0)
    work.wait()
"""

# A backend that only pretends to communicate, which torch's hook records, as it does NCCL's from torch 2.15 on.
HOOKED = """
import json, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_launch.diagnosis import flight_recorder
hooks = getattr(torch._C._distributed_c10d, "FlightRecorderHook", None)
if hooks is not None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    kept = hooks.attach(dist.group.WORLD)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    print(json.dumps(flight_recorder.answer({"number": 1}, 0)))
"""


def asked(recorders: Recorders, folder: str | None, within_s: float) -> Mapping[str, Recorded]:
    return recorders.answers(recorders.question(folder), time.monotonic() + within_s)


@contextlib.contextmanager
def ranks_of(recorders: Recorders, store: Path, program: str = RANK, **env: str) -> Iterator[None]:
    """Both ranks, ready."""
    started = []
    try:
        for number, fd in enumerate(map(recorders.open, NAMES)):
            argv = [sys.executable, "-c", program, str(fd), str(store)]
            own = clean_env({"RANK": str(number), "TORCH_FR_BUFFER_SIZE": "100", **env})
            started.append(
                subprocess.Popen(
                    argv, env=own, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        # What each has begun counts twice: the backend counts it as well, with what is not recorded.
        entered, ended = {"rank 0": 2 * (6 + 1), "rank 1": 2 * (5 + 1)}, 5 + 1
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
@pytest.mark.parametrize(
    "debug",
    ["OFF", pytest.param("DETAIL", marks=pytest.mark.long("tests/diagnosis/test_flight_recorder.py"))],
)
def test_of_a_pipeline_that_also_reduces_the_collectives_are_counted(tmp_path: Path, debug: str) -> None:
    recorders = Recorders()
    answers: Mapping[str, Recorded] = {}
    with ranks_of(recorders, tmp_path / "store", PIPELINE, TORCH_DISTRIBUTED_DEBUG=debug):

        def is_blocked() -> bool:
            nonlocal answers
            answers = asked(recorders, None, WITHIN_S)
            groups = [answers[name].groups["0"] for name in NAMES]
            # With DETAIL torch first checks that all have come, and records under no name.
            is_there = [(group.entered, group.done) for group in groups] == (
                [(4, 3), (3, 3)] if debug == "OFF" else [(0, 0)] * 2
            )
            return is_there and answers["rank 1"].calls == "wait" and groups[1].begun == 10

        eventually(is_blocked, lambda: str(answers))
        states = [RankState(rank=n, groups=answers[name].groups) for n, name in enumerate(NAMES)]
        assert not any(state.is_starting for state in states)


def test_without_torch_the_answer_says_so() -> None:
    code = "from trainer_launch.diagnosis.flight_recorder import answer; print(answer({'number': 3}, 0))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "{'number': 3, 'why': 'torch has not been imported, or records nothing'}\n"


def test_messages_are_no_collectives_though_torchs_status_counts_both() -> None:
    """Gloo records no messages; its status has numbered them with the collectives."""
    entry = {"process_group": ["0", ""], "profiling_name": "gloo:all_reduce", "time_created_ns": 1}
    trace = {
        "pg_status": {"0": {"last_enqueued_collective": "33", "last_completed_collective": "30"}},
        "entries": [
            {**entry, "collective_seq_id": 10, "op_id": 30, "retired": True},
            {**entry, "collective_seq_id": 11, "op_id": 33, "retired": False},
        ],
    }
    group = progress_of(trace, {"0": ("", [0, 1])})["0"]
    assert (group["entered"], group["done"]) == (11, 10)


def test_a_group_of_which_only_messages_are_left_has_entered_as_many_collectives_as_these_say() -> None:
    trace = dump_of([recorded("1", 7, "nccl:send 0->1", 2, True, is_p2p=True)], {"1": (90, 90)}, first=0)
    group = progress_of(trace, {"1": ("data", [0, 1])})["1"]
    assert (group["entered"], group["done"], group["messages"]) == (7, 7, [])


def test_messages_that_have_not_ended_are_told_with_their_peers() -> None:
    """A peer's number is that in the group; the one that were made one end together."""
    trace = dump_of(
        [
            recorded("1", 7, "nccl:recv 1<-0", 10, False, is_p2p=True),
            recorded("1", 7, "nccl:coalesced", 11, True),
            recorded("1", 7, "nccl:recv 1<-0", 20, True, is_p2p=True),
            recorded("1", 7, "nccl:recv 1<-0", 30, False, is_p2p=True),
            recorded("1", 7, "nccl:send 1->2", 40, False, is_p2p=True),
            recorded("1", 7, "nccl:recv 1<-?", 50, False, is_p2p=True),
        ],
        {},
        first=0,
    )
    said = decode(Recorded, json.dumps({"number": 1, "groups": progress_of(trace, {"1": ("pipe", [3, 5, 7])})}))
    assert said.groups["1"].messages == (Message("recv", 3, 30), Message("send", 7, 40))


def test_a_group_without_entries_has_entered_as_much_as_it_has_begun() -> None:
    """Torch keeps the last entries of all groups together: those of a group that is seldom used go."""
    members, entries = {"1": ("", [0, 1]), "3": ("", [0, 2])}, [recorded("1", 4, "gloo:all_reduce", 1, True)]
    for statuses, of_3 in ({"0": 4, "1": 7}, (7, 7)), ({"0": 4}, (0, 0)):  # (0, 0): it has but sent messages
        status = {number: {"last_enqueued_collective": count} for number, count in statuses.items()}
        groups = progress_of({"entries": entries, "pg_status": status}, members, {"1": 9, "3": 7})
        assert {name: (group["entered"], group["done"]) for name, group in groups.items()} == {
            "1": (4, 4),
            "3": of_3,
        }


def test_who_does_not_answer_holds_nobody_up() -> None:
    """One has ended and had told what it knew, one writes what is no answer, one says nothing, one has no group."""
    recorders = Recorders()
    ended, odd, silent, alone = map(recorders.open, ("ended", "odd", "silent", "alone"))
    try:
        os.write(silent, b"\n")
        os.write(odd, b"no answer\n" + b"x" * 10)
        os.write(ended, b'{"number": 0, "groups": {"0": {"entered": 5, "done": 5}}}\n')
        os.close(ended)
        outside = Recorded(number=1, stage=Stage.OUTSIDE)
        assert asked(recorders, None, 0.2) == {"alone": outside}
        assert recorders.at_end == {"ended": Recorded(groups={"0": Group(entered=5, done=5)})}
        os.write(silent, b'{"number": 1, "why": "late"}\n{"number": 2, "why": "it has nothing"}\n')
        late = Recorded(number=2, why="it has nothing")
        assert recorders.answers(2, time.monotonic() + 1.0) == {"silent": late, "alone": replace(outside, number=2)}
    finally:
        recorders.close()
        for fd in (odd, silent, alone):
            os.close(fd)


# -- NCCL ----------------------------------------------------------------------------------------

# What torch has of each process group of rank 0: its title, its members, its backends.
GROUPS = {
    "0": ("default_pg", [0, 1], "cpu:gloo,cuda:nccl"),
    "1": ("data", [0, 1], "cuda:nccl"),
    "2": ("control", [0, 1], "cpu:gloo,cuda:gloo"),
}


def recorded(group: str, number: int, name: str, at_ns: int, is_over: bool, **more: object) -> dict[str, Any]:
    """An entry as torch writes it, in C++'s order of its keys."""
    is_nccl = name.startswith("nccl:")
    entry = {
        "record_id": 0,
        "pg_id": {"0": 0, "1": 1, "2": 1}[group],
        "process_group": (group, GROUPS[group][0]),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": at_ns,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed" if is_over and is_nccl else "scheduled",
        "time_discovered_started_ns": at_ns if is_over and is_nccl else None,
        "time_discovered_completed_ns": at_ns + 1 if is_over and is_nccl else None,
        "retired": is_over,
        "timeout_ms": 600000,
        "is_p2p": False,
    }
    return {**entry, **more}


def dump_of(entries: list[dict[str, Any]], statuses: Mapping[str, tuple[int, int]], first: int) -> dict[str, Any]:
    status = {
        number: {"last_enqueued_collective": a, "last_started_collective": -1, "last_completed_collective": b}
        for number, (a, b) in statuses.items()
    }
    numbered = [{**one, "record_id": first + index} for index, one in enumerate(entries)]
    config = {name: {"name": name, "desc": GROUPS[name][0], "ranks": "[0, 1]"} for name in ("0",)}
    return {"version": "2.10", "pg_config": config, "pg_status": status, "entries": numbered}


NCCL = dump_of(
    [
        recorded("0", 1, "nccl:all_reduce", 10, True),
        recorded("1", 1, "nccl:_reduce_scatter_base", 20, False),  # of operations that were made one
        recorded("1", 1, "nccl:coalesced", 21, True),
        recorded("1", 2, "nccl:all_gather", 40, False, state="started", time_discovered_started_ns=41),
        recorded("0", 1, "nccl:send 0->1", 50, True, is_p2p=True, p2p_seq_id=9),
    ],
    {"0": (9, 8), "1": (2, 1)},
    first=100,
)
GLOO = dump_of(
    [recorded("0", 1, "gloo:barrier", 15, True), recorded("2", 1, "gloo:all_gather", 30, False)],
    {"0": (1, 1), "1": (1, 0)},
    first=0,
)


def dumping(kept: Mapping[str, Any]) -> Any:
    """torch's function: bytes, the collectives only if they are asked for."""

    def dump(*, includeCollectives: bool, includeStackTraces: bool, onlyActive: bool) -> bytes:  # noqa: N803
        assert not includeStackTraces
        assert not onlyActive
        told = {key: value for key, value in kept.items() if includeCollectives or key != "entries"}
        return pickle.dumps(told, protocol=2)

    return dump


def torch_with(**dumps: Mapping[str, Any]) -> SimpleNamespace:
    """A torch whose recorders have this."""
    made = {name: _Group(name, title, ranks) for name, (title, ranks, _) in GROUPS.items()}
    world = SimpleNamespace(
        pg_names={group: name for name, group in made.items()},
        pg_backend_config={group: GROUPS[name][2] for name, group in made.items()},
    )
    c10d = SimpleNamespace(_world=world, get_process_group_ranks=lambda group: group.ranks)
    functions = {f"_dump_{kind}_trace": dumping(kept) for kind, kept in dumps.items()}
    return SimpleNamespace(
        _C=SimpleNamespace(_distributed_c10d=SimpleNamespace(**functions)),
        distributed=SimpleNamespace(distributed_c10d=c10d),
    )


class _Group:
    def __init__(self, name: str, title: str, ranks: list[int]) -> None:
        self.name, self.group_desc, self.ranks = name, title, ranks


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with NCCL and gloo."""
    monkeypatch.setitem(sys.modules, "torch", torch_with(nccl=NCCL, fr=GLOO))


def said_to(question: dict[str, Any], rank: int = 0) -> Recorded:
    return decode(Recorded, json.dumps(answer({"number": 1, **question}, rank)))


@pytest.mark.usefixtures("both")
def test_what_nccl_and_gloo_have_recorded_is_told_of_each_group() -> None:
    groups = said_to({}).groups
    far = {name: (group.title, group.entered, group.done) for name, group in groups.items()}
    assert far == {
        "0": ("default_pg", 1, 1),  # NCCL's status has the number of the send
        "1": ("data", 2, 1),
        "0:gloo": ("default_pg (gloo)", 1, 1),
        "2": ("control", 1, 0),
    }
    assert {group.ranks for group in groups.values()} == {"0-1"}
    last = {name: [(one.number, one.operation) for one in group.last] for name, group in groups.items()}
    assert last["1"] == [(1, "_reduce_scatter_base"), (1, "coalesced"), (2, "all_gather")]
    assert last["0:gloo"] == [(1, "barrier")]


def test_the_events_of_nccls_collectives_are_not_looked_at_when_its_groups_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = torch_with(nccl=NCCL, fr=GLOO)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(flight_recorder, "_operations", lambda torch: {"1": 2})
    at_end = said_to({"at_end": True}).groups
    assert [one.operation for one in at_end["0:gloo"].last] == ["barrier"]
    assert (at_end["1"].entered, at_end["1"].last) == (2, ()), "of NCCL only the numbers are known"
    torch.distributed.distributed_c10d._world.pg_names.clear()
    torch._C._distributed_c10d._dump_nccl_trace = dumping({"pg_status": {}})
    assert said_to({"at_end": True}).why == "no process group is left"
    assert said_to({}).groups == {}


def test_each_backend_of_a_group_is_asked_for_what_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15: `nccl` is a class that calls itself nccl2, and records where only its name leads."""
    torch = torch_with(nccl=dump_of([], {}, first=0))
    nccl2 = dump_of(
        [
            recorded("1", 1, "nccl2:all_reduce", 20, True, pg_id=5),
            recorded("1", 2, "nccl2:all_reduce", 21, False, pg_id=5),
            recorded("1", 2, "nccl2:recv 0<-1", 22, False, pg_id=5, is_p2p=True),
        ],
        {"5": (3, 1)},
        first=0,
    )

    def dump(*, backend: str = "gloo", **asked: bool) -> bytes:
        told: bytes = dumping({"gloo": GLOO, "nccl2": nccl2}[backend])(**asked)
        return told

    dump.__doc__ = "_dump_fr_trace(includeCollectives: bool, backend: str = 'gloo') -> bytes"
    torch._C._distributed_c10d._dump_fr_trace = dump
    torch.device = str
    for group in torch.distributed.distributed_c10d._world.pg_names:
        names = {"cuda": "nccl2" if "nccl" in GROUPS[group.name][2] else "gloo", "cpu": "gloo"}
        group._get_backend = lambda device, names=names: SimpleNamespace(name=lambda: names[device])
    monkeypatch.setitem(sys.modules, "torch", torch)
    groups = said_to({}).groups
    assert {name: (group.entered, group.done) for name, group in groups.items()} == {
        "0": (0, 0),
        "0:gloo": (1, 1),
        "1": (2, 1),
        "2": (1, 0),
    }
    assert groups["1"].messages == (Message("recv", 1, 22),)
    assert said_to({"only_far": True}).far == (3 + 1) + (1 + 1) + (1 + 0)
    assert said_to({"at_end": True}).groups["1"].last == ()


@pytest.mark.torch
@pytest.mark.long("tests/diagnosis/test_flight_recorder.py")
def test_what_torchs_hook_records_of_another_backend_is_told() -> None:
    env = clean_env({"TORCH_FR_BUFFER_SIZE": "100"})
    run = subprocess.run([sys.executable, "-c", HOOKED], env=env, capture_output=True, text=True, check=True)
    if not run.stdout:
        pytest.skip("this torch has no hook that records other backends")
    group = decode(Recorded, run.stdout).groups["0"]
    assert (group.entered, group.done, group.last[-1].sizes) == (3, 3, "[[4]] Float")


def test_who_has_left_all_its_process_groups_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_with(fr=GLOO)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert said_to({}).stage is Stage.JOINED
    torch.distributed.distributed_c10d._world.pg_names.clear()
    assert said_to({}).stage is Stage.LEFT


class _Work:
    """torch's waits in C++: no call of Python's is seen inside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wait = self.other = self.lock.acquire


def _waits(work: _Work) -> None:
    work.wait()
    work.wait()


def _does_something_else(work: _Work) -> None:
    work.wait()
    work.other()


@pytest.mark.parametrize(("target", "calls"), [(_waits, "wait"), (_does_something_else, "other")])
def test_the_method_that_a_thread_is_in_is_read_from_its_line(target: Callable[[_Work], None], calls: str) -> None:
    work = _Work()
    thread = threading.Thread(target=target, args=(work,), daemon=True)
    thread.start()
    try:
        eventually(lambda: called_by(thread.ident) == calls, lambda: str(called_by(thread.ident)))
    finally:
        work.lock.release()
        thread.join(WITHIN_S)
    assert called_by(thread.ident) == ""


@pytest.mark.usefixtures("both")
def test_how_far_a_rank_is_counts_nccl_and_gloo_though_both_number_their_groups_from_0() -> None:
    assert said_to({"only_far": True}).far == (9 + 8) + (2 + 1) + (1 + 1) + (1 + 0)


@pytest.mark.usefixtures("both")
def test_when_collectives_were_entered_is_told_in_the_order_of_both_recorders() -> None:
    told = said_to({"entries": 10}).entries
    assert told is not None
    each = [(group and group.name, number) for group, number, _ in told.each()]
    assert each == [("0", 1), ("0:gloo", 1), ("1", 1), ("2", 1), ("1", 2), (None, 0)]


def test_a_rank_that_sends_messages_over_gloo_says_so_also_where_its_group_has_no_entries() -> None:
    entries = [recorded("2", 4, "gloo:barrier", 15, True)]
    groups: dict[str, Any] = {"2": ("control", [0, 1], ["gloo"]), "1": ("data", [0, 1], ["nccl"])}
    begun = [{"2": 4, "1": 9}, {"2": 5, "1": 99}, {"2": 4, "1": 9}]
    assert [hides_messages(entries, groups, counts) for counts in begun] == [False, True, False]
    without = [hides_messages((), groups, {"2": count}) for count in (4, 4, 5)]
    assert without == [False, False, True], "entries of earlier use are dropped"


@pytest.mark.parametrize("is_used", [True, False])
def test_a_rank_that_calls_others_by_rpc_hides_its_waits(monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
    torch = torch_with(nccl=NCCL, fr=GLOO)
    torch._C._distributed_rpc = SimpleNamespace(_is_current_rpc_agent_set=lambda: is_used)
    monkeypatch.setitem(sys.modules, "torch", torch)
    told = said_to({"entries": 10}).entries
    assert told is not None
    assert told.hides_messages == is_used


@pytest.mark.torch
@pytest.mark.usefixtures("both")
def test_torchs_own_reader_takes_the_dumps_of_both_recorders(tmp_path: Path) -> None:
    for rank in range(2):
        assert said_to({"folder": str(tmp_path)}, rank).saved > 0
    reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path), "-v"]
    read = subprocess.run(reader, capture_output=True, text=True, env=clean_env(), check=False)
    told = read.stdout + read.stderr
    assert read.returncode == 0, told
    assert all(f"collective_type='{name}'" in told for name in ("nccl:all_reduce", "gloo:barrier")), told


@pytest.mark.parametrize("kind", ["nccl", "fr"])
def test_one_recorder_alone_is_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4 has NCCL's only, a build for CPUs has no other one than gloo's."""
    monkeypatch.setitem(sys.modules, "torch", torch_with(**{kind: NCCL if kind == "nccl" else GLOO}))
    entered = {name: group.entered for name, group in said_to({}).groups.items()}
    assert entered == ({"0": 1, "1": 2} if kind == "nccl" else {"0": 1, "1": 0, "2": 1})


def test_the_end_of_sends_that_were_made_one_is_no_collective() -> None:
    """torch does not always mark it as point-to-point; it has the number of the collective before."""
    trace = dump_of(
        [
            recorded("1", 7, "nccl:all_reduce", 1, True),
            recorded("1", 7, "nccl:send 0->1", 2, False, is_p2p=True),
            recorded("1", 7, "nccl:coalesced", 3, False),
            recorded("1", 8, "nccl:coalesced", 4, True),
        ],
        {"1": (7, 6)},
        first=0,
    )
    group = progress_of(trace, {"1": ("data", [0, 1])})["1"]
    assert (group["entered"], group["done"]) == (8, 8)
    assert [one[0] for one in group["last"]] == [7, 8]
    before_any = dump_of([recorded("1", 0, "nccl:coalesced", 3, False)], {}, first=0)
    group = progress_of(before_any, {"1": ("data", [0, 1])})["1"]
    assert (group["entered"], group["done"], group["last"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("state", "retired", "done"),
    [("completed", False, 3), ("scheduled", True, 2), ("scheduled", False, 2)],
    ids=["the watchdog is behind", "timed out", "waits"],
)
def test_what_nccl_has_ended_is_what_the_device_has_completed(state: str, retired: bool, done: int) -> None:
    entry = recorded("1", 3, "nccl:all_reduce", 1, True, state=state, retired=retired)
    groups = progress_of(dump_of([entry], {"1": (3, 3)}, first=0), {"1": ("data", [0, 1])})
    assert (groups["1"]["entered"], groups["1"]["done"]) == (3, done)


# -- large jobs ----------------------------------------------------------------------------------

IRREGULAR = sorted(random.Random(7).sample(range(4096), 1024))


@pytest.mark.parametrize("step", [2, 8, None])
def test_a_rank_of_4096_is_told_with_its_groups(step: int | None) -> None:
    ranks = IRREGULAR if step is None else [*range(0, 4096, step)]
    entry = recorded("1", 3, "nccl:all_reduce", 5000, False)
    members = {"0": ("default_pg", range(4096)), "1": ("data", ranks)}
    groups = progress_of(dump_of([entry], {}, first=0), members)
    said = decode(Recorded, json.dumps({"number": 1, "groups": groups}))
    assert said.groups["0"].ranks == "0-4095"
    assert said.groups["1"].entered == 3
    assert numbers_in(said.groups["1"].ranks) == ([] if step is None else ranks)
    told_entries = decode(Entries, json.dumps({"rank": 0, **entered([entry], members, 10)}))
    assert numbers_in(told_entries.groups[0].ranks) == ([] if step is None else ranks)


# -- limits --------------------------------------------------------------------------------------


def test_an_answer_that_is_too_long_is_dropped_and_not_kept() -> None:
    recorders = Recorders()
    worker = recorders.open("rank 0")
    try:
        said = dict[str, Recorded]()
        for _ in range(3 * MAX_BYTES // 65536):
            os.write(worker, b"x" * 65536)
            said |= asked(recorders, None, 0.01)
        assert said["rank 0"].why == "its answer is too long"
        assert sum(map(len, recorders._unread.values())) <= MAX_BYTES + 1
        number = recorders.question()
        os.write(worker, b"x" * 100)
        assert recorders.answers(number, time.monotonic() + 0.1) == {}, "it is no answer to this question"
        os.write(worker, b'x\n{"number": %d, "why": "short"}\n' % number)
        assert recorders.answers(number, time.monotonic() + 1.0) == {"rank 0": Recorded(number=number, why="short")}
        assert recorders._unread == {"rank 0": b""}
    finally:
        recorders.close()
        os.close(worker)


@pytest.mark.usefixtures("both")
def test_a_dump_that_comes_too_late_is_not_saved(tmp_path: Path) -> None:
    question = {"folder": str(tmp_path), "until_s": time.monotonic() - 0.01}
    assert said_to(question).saved == 0
    assert [*tmp_path.iterdir()] == []
    assert said_to({**question, "until_s": time.monotonic() + WITHIN_S}).saved > 0
    assert [path.name for path in tmp_path.iterdir()] == ["nccl_trace_rank_0"]


@pytest.mark.parametrize("is_stuck", [True, False], ids=["never comes back from torch", "comes back"])
def test_a_program_ends_though_the_thread_that_answers_for_it(
    is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_LAST_ANSWER_S", 0.01)
    monkeypatch.setattr(flight_recorder, "asking", asking := threading.Lock())
    is_stuck and asking.acquire()
    recorders = Recorders()
    worker = recorders.open("rank 0")
    ending = threading.Thread(target=flight_recorder.tell_at_end, args=(worker, 0), daemon=True)
    ending.start()
    ending.join(WITHIN_S)
    assert not ending.is_alive()
    os.close(worker)
    recorders.answers(0, time.monotonic() + 0.01)
    assert [*recorders.at_end] == ([] if is_stuck else ["rank 0"])
    recorders.close()
