"""The variables of a generation, compared with what torchrun sets in test_parity; here the cases by themselves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from trainer_launch.membership import protocol as say
from trainer_launch.model import Endpoint, Membership, Workers
from trainer_launch.pytorch.worker_processes import arguments, worker_processes

WORKERS = Workers(count=2, argv=("python", "-u", "train.py"), env={"PATH": "/bin"}, role="trainer")
MEMBERSHIP = Membership(
    job="my-job",
    coordinator=Endpoint("node-0", 29500),
    node_rank=1,
    host="node-1",
    address=None,
    patience_s=600.0,
    max_restarts=3,
)
FORMED = say.Formed(
    generation=4,
    group_rank=1,
    size=3,
    restarts=2,
    is_store_host=False,
    first_rank=4,
    world_size=9,
    first_role_rank=3,
    role_world_size=6,
)
GO = say.Go(4, "node-0.svc", 41234)


def environments(workers: Workers, folder: str = "/run") -> list[dict[str, str]]:
    return [dict(process.env) for process in worker_processes(workers, MEMBERSHIP, FORMED, GO, folder)]


def test_each_worker_gets_what_torchrun_would_set() -> None:
    both = environments(WORKERS, "/run/attempt_2")
    assert both[1] == {
        "PATH": "/bin",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "4",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "9",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "node-0.svc",
        "MASTER_PORT": "41234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TRAINER_LAUNCH_GENERATION": "4",
        "TRAINER_LAUNCH_KEPT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "my-job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": "/run/attempt_2/1/error.json",
    }
    different = {name for name in both[0] if both[0][name] != both[1][name]}
    assert different == {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"}


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "6, 7,8"}, ["6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, ["GPU-a", "GPU-b"]),
    ],
)
def test_with_a_virtual_local_rank_each_worker_sees_one_device(env: dict[str, str], devices: list[str]) -> None:
    workers = replace(WORKERS, env=env, virtual_local_rank=True)
    both = environments(workers)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in both] == devices
    assert [one["LOCAL_RANK"] for one in both] == ["0", "0"]
    assert [one["RANK"] for one in both] == ["4", "5"]


def test_arguments_are_substituted_as_torchruns_are() -> None:
    argv = ("$HOME/python", "--device=${local_rank}", "$local_rank", "$$x", "${HOME}", "5$", "plain")
    assert arguments(argv, 3) == ("$HOME/python", "--device=3", "3", "$x", "${HOME}", "5$", "plain")


def test_lines_of_a_node_that_came_without_a_rank_begin_with_the_one_that_it_got() -> None:
    workers = replace(WORKERS, node_label="?")
    processes = worker_processes(workers, MEMBERSHIP, replace(FORMED, node_rank=3), GO, "/run")
    assert processes[0].label == f"3:{FORMED.first_rank}"


def test_where_rank_0_serves_the_store_workers_are_told_so() -> None:
    workers = replace(WORKERS, serve_store=True)
    assert environments(workers, "")[0]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
