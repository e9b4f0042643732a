"""Torch jobs of every contract on hosts with their own networks and names, the launcher as process 1 of each."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import LAUNCHER, ended, script
from tests.pods import Host, hosts
from tests.survival import jobs

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/hosts/test_torch_jobs.py")

REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum %s rank %s\\n" % (int(total), os.environ["RANK"]), end="", flush=True)
dist.barrier()
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""
SAVE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved\\n"), sys.exit(0)))
os.write(1, b"ready\\n")
while True:  # a signal that comes just before a sleep is heard after it
    time.sleep(0.1)
"""
DEADLINE_S = 120
trainer_v2 = partial(jobs.trainer_v2, nodes=2, workers=2)
elastic = partial(jobs.pytorchjob_elastic, nodes="2:2", workers=2)


def pytorchjob(node: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "job-master-0",
        "PET_MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "WORLD_SIZE": "4",
        "RANK": str(node),
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "2",
        "PYTHONUNBUFFERED": "1",
    }


def workers_only(_node: int) -> dict[str, str]:
    return {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PYTHONUNBUFFERED": "1"}


def run_all(pods: Sequence[Host], envs: Sequence[Mapping[str, str]], train: str) -> list[tuple[int, str]]:
    """Start the launcher on every host; each one's exit code and output."""
    started = [
        pod.start((*LAUNCHER, "run", "--prefix", "--", train), env) for pod, env in zip(pods, envs, strict=True)
    ]
    return [ended(process, DEADLINE_S) for process in started]


def launcher_in(process: subprocess.Popen[str]) -> psutil.Process:
    """Process 1 of the host that `process` leads into."""
    below = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in below if "trainer_launch" in child.cmdline())


def test_the_same_command_on_every_host_makes_the_named_one_node_0(tmp_path: Path) -> None:
    """torchrun's documentation has it; no platform tells a rank."""
    meeting = ("--rdzv-id=j", "--rdzv-backend=c10d", "--rdzv-endpoint=gpu-3:29400")
    words = ("torchrun", "--nnodes=2", "--nproc-per-node=1", *meeting, script(tmp_path, REDUCE))
    with hosts("gpu-7", "gpu-3") as pods:
        started = [pod.start((*LAUNCHER, "run", "--no-prefix", "--", *words), {}) for pod in pods]
        other, head = (ended(process, DEADLINE_S) for process in started)
    assert (other[0], head[0]) == (0, 0), (other, head)
    assert "sum 2 rank 1" in other[1]
    assert "sum 2 rank 0" in head[1]


@pytest.mark.parametrize(
    ("names", "contract", "world"),
    [
        (("job-master-0", "job-worker-0"), pytorchjob, 4),
        pytest.param(("job-worker-0", "job-worker-1"), workers_only, 4, marks=LONG),
    ],
    ids=["pytorchjob", "pytorchjob-workers-only"],
)
def test_the_nodes_of_a_job_meet_and_reduce(names, contract, world, tmp_path: Path) -> None:
    train = script(tmp_path, REDUCE)
    with hosts(*names) as pods:
        ended = run_all(pods, [contract(node) for node in range(2)], train)
    assert [code for code, _ in ended] == [0, 0], ended
    ranks = {
        line.rpartition("rank ")[2]
        for _, output in ended
        for line in output.splitlines()
        if f"sum {world} " in line
    }
    assert ranks == {str(rank) for rank in range(world)}


@LONG
@pytest.mark.parametrize(
    ("names", "contract"),
    [(("job-node-0-0", "job-node-0-1"), trainer_v2), (("job-worker-0", "job-worker-1"), elastic)],
    ids=["static", "c10d"],
)
def test_the_nodes_meet_by_torchs_own_means_when_told_so(names, contract, tmp_path: Path) -> None:
    envs = [contract(node) | {"TRAINER_LAUNCH_ENGINE": "torchrun"} for node in range(2)]
    with hosts(*names) as pods:
        ended = run_all(pods, envs, script(tmp_path, REDUCE))
    assert [code for code, _ in ended] == [0, 0], ended


def test_one_node_asked_to_stop_leaves_at_once_though_the_others_go_on(tmp_path: Path) -> None:
    """torch would restart its workers, or wait minutes for the other nodes."""
    env = [trainer_v2(node) | {"PET_MAX_RESTARTS": "3"} for node in range(2)]
    with hosts("job-node-0-0", "job-node-0-1") as pods:
        train = script(tmp_path, SAVE)
        zero, one = (pod.start((*LAUNCHER, "run", "--", train), e) for pod, e in zip(pods, env, strict=True))
        assert one.stdout is not None
        ready = 0
        while ready < 2:
            line = one.stdout.readline()
            assert line, "it ended before its workers were ready"
            ready += "ready" in line
        launcher_in(one).terminate()
        code, output = ended(one, DEADLINE_S)
        assert code == 143, output
        assert output.count("saved") == 2
        assert zero.poll() is None
        zero.kill()
        ended(zero, DEADLINE_S)
