"""A job of two nodes starts in the pods of each platform that says it in flat variables, and loses a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.launching import launch, script, start
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

# Of the first lives one waits to be killed; then all ranks meet in a collective and end.
TRAIN = """
import os, signal, time
import torch, torch.distributed as dist

rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank} of {int(total)}, restart {restarts}, pid {os.getpid()}.", flush=True)
if restarts == "0":
    time.sleep(120)
"""
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
}


def slurm(rank: int) -> dict[str, str]:
    return {**SLURM, "SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}


def indexed_job(rank: int) -> dict[str, str]:
    host = "0.0.0.0"  # this machine, for who connects, and no name that says so
    return {"JOB_COMPLETION_INDEX": str(rank), "MASTER_ADDR": host, "TRAINER_LAUNCH_NODES": "2"}


PLATFORMS = (slurm, indexed_job)
SHOWN_BY_RANK = ("NODE_RANK shows that there are several", "--nodes", "--node-rank")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_job_of_two_nodes_goes_on_in_place_after_a_killed_worker(
    platform: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    port, train = str(free_port()), script(tmp_path, TRAIN)
    envs = [{"MASTER_PORT": port, **platform(rank)} for rank in range(2)]
    with start("run", "--", train, env=envs[0]) as first, start("run", "--", train, env=envs[1]) as second:
        first.read_until(r"rank 0 of 2, restart 0, pid \d+\.")
        [pid] = second.read_until(r"rank 1 of 2, restart 0, pid (\d+)\.")
        os.kill(int(pid), signal.SIGKILL)
        first.read_until(r"rank 0 of 2, restart 1,")
        second.read_until(r"rank 1 of 2, restart 1,")
        assert [first.end()[0], second.end()[0]] == [0, 0]


@pytest.mark.parametrize(
    ("env", "command", "says"),
    [
        (
            {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "w-0-0.w", "MASTER_PORT": "3389"},
            (),
            ("MASTER_ADDR shows that there are several", "--nodes"),
        ),
        (MANIFEST := {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "w-0.w"}, (), SHOWN_BY_RANK),
        (MANIFEST, ("torchrun", "--nproc-per-node", "2"), SHOWN_BY_RANK),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"},
            (),
            ("srun --ntasks-per-node=1",),
        ),
        (
            {"KUBERAY_GEN_RAY_START_CMD": "ray start --head", "RAY_CLUSTER_NAME": "c"},
            (),
            ("Ray starts its training workers itself",),
        ),
    ],
    ids=["a JobSet of unknown size", "a manifest", "torchrun", "a batch script without srun", "Ray"],
)
def test_a_pod_that_lacks_a_part_of_its_job_does_not_train_alone_and_says_in_a_sentence_what_to_set(
    env: dict[str, str], command: tuple[str, ...], says: tuple[str, ...], tmp_path: Path
) -> None:
    ended = launch("run", "--", *command, script(tmp_path, "print('trained alone')"), env=env)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert all(words in ended.stderr for words in says), ended.stderr
