"""A clustered task of Flyte 2: its nodes train together, whoever makes torchrun's command line."""

from __future__ import annotations

import pytest

from tests.contracts.pods import CASES
from tests.planning.requests import request
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.planning import engines
from trainer_launch.planning.command import parse_command, starts_launchers

POD = CASES["flyte-clustered/third-of-four"]["pod"]
NODE_0 = "f-abc123-workers-0-0.f-abc123.project-development.svc.cluster.local"
TORCHRUN = (
    "torchrun --nnodes=4 --nproc-per-node=8 --node-rank=2 --rdzv-backend=static --rdzv-id=f-abc123-1 "
    f"--rdzv-endpoint={NODE_0}:29500 --no-python -- a0 --inputs x"
)


@pytest.mark.parametrize("command", ["train.py", "torchrun train.py", TORCHRUN])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_all_nodes_of_the_task_meet_at_its_first_pod(command: str, backend: str) -> None:
    env = {**POD["env"], "RDZV_BACKEND": backend}
    job = read_job(pod_from_snapshot({**POD, "env": env}))
    plan = engines.plan(request(command.replace("=static", f"={backend}"), job, env))
    assert plan.engine == "torch"
    assert plan.workers is not None
    assert plan.workers.count == 8
    assert plan.membership is not None
    member = plan.membership
    assert (member.nodes, member.node_rank, str(member.coordinator)) == (4, 2, f"{NODE_0}:29500")
    assert member.job == "f-abc123-1", "another in each attempt, as Flyte has it"


def test_flytes_entry_point_finds_the_shim_of_torchrun() -> None:
    assert starts_launchers(parse_command(["clustered", "--inputs", "x"]))
