"""Real workers: found, sampled, asked for their stacks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import eventually
from trainer_launch.diagnosis import stacks, worker_samples
from trainer_launch.diagnosis.collectives import ANSWERS
from trainer_launch.diagnosis.hang_detection import WatchedWorker
from trainer_launch.diagnosis.stacks import STACKS_SIGNAL
from trainer_launch.diagnosis.worker_samples import Recorders, WatchedWorkers, WorkerPlace
from trainer_launch.host import process_tree

pytestmark = pytest.mark.process
DEADLINE_S = 20.0
WORKER = """
import faulthandler, os, sys, time
folder, number, says = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "says"
if says:
    faulthandler.register(number, open(f"{folder}/stacks", "w"), all_threads=True)
def load():
    time.sleep(99)
def train():
    time.sleep(99)
if os.fork() == 0:
    load()
open(f"{folder}/ready", "w").close()
train()
"""


IN_C = """
import ctypes, faulthandler, os, sys, time
from trainer_launch.diagnosis import flight_recorder
faulthandler.register(flight_recorder.STACKS_SIGNAL, open(sys.argv[1], "w"), all_threads=True)
flight_recorder.answer_in_thread(int(sys.argv[2]), lambda: 0)
sys.stdin.readline()
def hold():
    os.write(1, b"sleeps")
    ctypes.PyDLL(None).sleep(60)
    os.write(1, b"goes on")
hold()
"""


def test_to_be_asked_for_stacks_ends_no_sleep_in_c(tmp_path):
    """Such a sleep holds the GIL here, and no flag of a handler would start it again."""
    ours, theirs = socket.socketpair()
    argv = (sys.executable, "-c", IN_C, f"{tmp_path}/stacks", str(theirs.fileno()))
    with (
        ours,
        theirs,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pid = process.pid
            eventually(lambda: process_tree.thread_named(pid, ANSWERS), "its thread answers")
            process.stdin.write(b"go\n")
            process.stdin.flush()
            assert process.stdout.read(6) == b"sleeps"
            eventually(lambda: "nanosleep" in process_tree.sleeps_in(pid), "it sleeps")
            texts = stacks.ask_all({WatchedWorker("rank 0", pid, 1, 0, 0, f"{tmp_path}/stacks"): ()})
            assert [frame.function for frame in stacks.main_thread(texts[pid])] == ["hold", "<module>"]
            assert "nanosleep" in process_tree.sleeps_in(pid)
            assert not select.select([process.stdout], [], [], 0)[0], "it does not go on"
        finally:
            process.kill()


CONNECTS = """
import ctypes, faulthandler, select, socket, sys
from trainer_launch.diagnosis.stacks import STACKS_SIGNAL
faulthandler.register(STACKS_SIGNAL, open(sys.argv[1], "w"), all_threads=True)
asked = socket.socket()
asked.setblocking(False)
asked.connect_ex(("127.0.0.1", int(sys.argv[2])))
class Poll(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]
ctypes.CDLL(None).poll(ctypes.byref(Poll(asked.fileno(), select.POLLOUT, 0)), 1, 60000)
print("gave up", flush=True)
"""


def test_who_still_connects_is_not_asked_as_a_library_in_c_would_give_up(tmp_path):
    """As torch, whose store is somewhere that does not answer yet."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        stack.enter_context(socket.create_connection(full.getsockname()))  # there is no room for another
        argv = (sys.executable, "-c", CONNECTS, f"{tmp_path}/stacks", str(full.getsockname()[1]))
        process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
        try:
            eventually(lambda: process_tree.is_connecting(process.pid), "it connects")
            worker = WatchedWorker("rank 0", process.pid, 1, 0, 0, f"{tmp_path}/stacks")
            assert stacks.ask_all({worker: ()}) == {}
            assert process_tree.is_connecting(process.pid)
            assert process.stdout is not None
            assert not select.select([process.stdout], [], [], 0)[0]
        finally:
            process.kill()


@pytest.fixture(params=["says", "is silent"])
def world(request, tmp_path):
    """One worker with a data loader of its own; one that can write its stacks, and one that cannot."""
    program = tmp_path / "train.py"
    program.write_text(WORKER)
    argv = (sys.executable, "-S", "-E", str(program), str(tmp_path), str(int(STACKS_SIGNAL)), request.param)
    process = subprocess.Popen(argv, start_new_session=True)
    eventually((tmp_path / "ready").exists, "the worker is ready")
    place = WorkerPlace(4, 0, f"{tmp_path}/stacks" if request.param == "says" else None)
    group: Any = SimpleNamespace(places={"rank 4": place}, recorders=Recorders(), store_port=None)
    workers = WatchedWorkers(lambda: {"rank 4": process.pid}, lambda *_: 7, str(tmp_path), group)
    yield workers, tmp_path, request.param == "says"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)


def test_workers_are_found_and_sampled_with_all_below_them(world):
    workers, folder, _ = world
    ((worker, sample),) = workers.look().items()
    assert (worker.name, worker.rank, worker.local_rank) == ("rank 4", 4, 0)
    assert sample.signs[0] == 7
    assert sample.signs[1] == 0, "it has reported nothing"
    (folder / "progress-0.json").write_text("{}")
    assert workers.look()[worker].signs[1] == (folder / "progress-0.json").stat().st_mtime_ns
    (children,) = workers.children([worker]).values()
    assert len(children) == 1
    assert {process.pid for process in sample.processes} == {worker.pid, children[0].pid}


def test_who_is_stopped_is_seen_as_stopped_and_is_not_asked(world):
    workers, _, _ = world
    (worker,) = workers.look()
    os.kill(worker.pid, signal.SIGSTOP)
    eventually(lambda: workers.look()[worker].state == "T", "it is stopped")
    assert workers.present()[worker] == "T"
    assert worker.pid not in stacks.ask_all(workers.children([worker]))


def test_stacks_come_from_those_who_can_write_them_and_nobody_else_is_harmed(world):
    workers, _, says = world
    (worker,) = workers.look()
    below = workers.children([worker])
    (child,) = below[worker]
    eventually(
        lambda: all("nanosleep" in process_tree.sleeps_in(pid) for pid in (worker.pid, child.pid)), "both sleep"
    )
    before = {process.pid: process.written for process in workers.look()[worker].processes}
    texts = workers.ask_all(below)
    after = {process.pid: process.written for process in workers.look()[worker].processes}
    assert all(after[pid] <= before[pid] for pid in before), "to be asked is no progress"
    if says:
        assert stacks.where(stacks.main_thread(texts[worker.pid])) == "in train.py:9 (train)"
        assert stacks.where(stacks.main_thread(texts[child.pid])) == "in train.py:7 (load)"
    else:
        assert texts == {}
    assert worker in workers.look(), "the signal would have ended who has no handler"


def test_a_thread_of_torchs_rpc_that_only_polls_is_no_work() -> None:
    done, leave = threading.Event(), threading.Event()

    def polls() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("TP_SHM_reactor")
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:
            pass
        done.set()
        leave.wait()

    own = process_tree.read(os.getpid())
    assert own is not None
    before, thread = worker_samples.read(own), threading.Thread(target=polls)
    thread.start()
    done.wait(DEADLINE_S)
    after = worker_samples.read(own)
    leave.set()
    thread.join()
    assert before is not None
    assert after is not None
    assert after.beside_cpu_s - before.beside_cpu_s < 0.25
