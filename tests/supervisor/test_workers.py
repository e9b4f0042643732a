"""Real workers below a pretended agent: found, sampled, asked for their stacks, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import eventually
from trainer_launch.host import stacks, tree
from trainer_launch.supervisor import frames
from trainer_launch.supervisor.workers import STACKS_SIGNAL, Sources, Workers

pytestmark = pytest.mark.process
DEADLINE_S = 20.0
AGENT = (
    "import subprocess, sys; subprocess.run([sys.executable, '-S', '-E', *sys.argv[1:]], start_new_session=True)"
)
WORKER = """
import faulthandler, json, os, sys, time
folder, number, says = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "says"
if says:
    faulthandler.register(number, open(f"{folder}/stacks", "w"), all_threads=True)
    with open(f"{folder}/worker.0", "w") as file:
        json.dump({"pid": os.getpid(), "rank": 4, "local_rank": 0, "stacks": f"{folder}/stacks"}, file)
def load():
    time.sleep(99)
def train():
    time.sleep(99)
if os.fork() == 0:
    load()
open(f"{folder}/ready", "w").close()
train()
"""


@pytest.fixture(params=["says", "is silent"])
def world(request, tmp_path):
    """One worker with a data loader of its own; one that says who it is, and one that only torch knows."""
    program = tmp_path / "train.py"
    program.write_text(WORKER)
    argv = (sys.executable, "-S", "-E", "-c", AGENT, str(program), str(tmp_path), str(int(STACKS_SIGNAL)))
    env = {**os.environ, "RANK": "4", "LOCAL_RANK": "0"}
    agent = subprocess.Popen([*argv, request.param], env=env)
    eventually((tmp_path / "ready").exists, "the worker is ready")
    sources = Sources(
        pids=lambda: {"agent": agent.pid},
        heard=lambda *_: 7,
        run_dir=str(tmp_path),
        below_agent=True,
        progress_file=str(tmp_path / "ready"),
    )
    made = Workers(sources)
    yield made, tmp_path, request.param == "says"
    made.kill(made.look())
    agent.wait(DEADLINE_S)


def test_workers_are_found_and_sampled_with_all_below_them(world):
    workers, folder, _ = world
    ((worker, sample),) = workers.look().items()
    assert (worker.name, worker.rank, worker.local_rank) == ("rank 4", 4, 0)
    assert sample.signs[0] == 7
    assert sample.signs[1] == 0, "it has reported nothing"
    (folder / "progress-0.json").write_text("{}")
    os.utime(folder / "ready", ns=(1, 1))
    assert workers.look()[worker].signs[1:3] == ((folder / "progress-0.json").stat().st_mtime_ns, 1)
    assert len(workers.children(worker)) == 1


def test_who_is_stopped_is_seen_as_stopped_and_is_not_asked(world):
    workers, _, _ = world
    (worker,) = workers.look()
    os.kill(worker.pid, signal.SIGSTOP)
    eventually(lambda: workers.look()[worker].state == "T", "it is stopped")
    assert worker.pid not in workers.ask_all([worker])


def test_stacks_come_from_those_who_can_write_them_and_nobody_else_is_harmed(world):
    workers, _, says = world
    (worker,) = workers.look()
    (child,) = workers.children(worker)
    eventually(lambda: all("nanosleep" in stacks.sleeps_in(pid) for pid in (worker.pid, child.pid)), "both sleep")
    texts = workers.ask_all([worker])
    if says:
        assert frames.where(frames.main_thread(texts[worker.pid])) == "in train.py:11 (train)"
        assert frames.where(frames.main_thread(texts[child.pid])) == "in train.py:9 (load)"
    else:
        assert texts == {}
    assert worker in workers.look(), "the signal would have ended who has no handler"


def test_a_note_of_a_worker_that_is_dead_names_nobody(world):
    workers, folder, _ = world
    (worker,) = workers.look()
    (folder / "worker.3").write_text(json.dumps({"pid": 1, "rank": 9, "local_rank": 3, "stacks": None}))
    (folder / "worker.5").write_text("torn")
    assert list(workers.look()) == [worker]


def test_a_killed_worker_takes_its_children_with_it(world):
    workers, _, _ = world
    (worker,) = workers.look()
    pids = [worker.pid, *[entry.pid for entry in workers.children(worker)]]
    workers.kill([worker])
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() and is_alive(pid) for pid in pids), "all are gone")


def is_alive(pid):
    entry = tree.read(pid)
    return entry is not None and entry.state not in "ZX"
