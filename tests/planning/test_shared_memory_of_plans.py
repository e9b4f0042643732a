"""What the engines are told where /dev/shm is too small for them, or ranks may not read each other's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.planning.requests import GPU_MACHINE, MACHINE, request
from trainer_launch.model import Host, Job, NodeRange
from trainer_launch.planning import engines

TORCH = Job(contract="trainer-v2-torch", nodes=NodeRange(1, 1), nproc_per_node=4, engine="torchrun")
MPI = Job(contract="trainer-v2-mpi", engine="mpirun")
OPEN_MPI = {"OMPI_MCA_btl_vader_backing_directory": "/tmp", "OMPI_MCA_btl_sm_backing_directory": "/tmp"}
NCCL = {"NCCL_SHM_DISABLE": "1"}
UCX = {"UCX_POSIX_DIR": "/tmp"}


def env_of(line: str, job: Job, **changes: Any) -> Mapping[str, str]:
    """The environment of what the plan starts."""
    plan = engines.plan(request(line, job, **changes))
    return plan.processes[0].env if plan.workers is None else plan.workers.env


@pytest.mark.parametrize(
    ("line", "job", "host", "told"),
    [
        ("train.py", TORCH, GPU_MACHINE, NCCL),
        ("train.py", TORCH, MACHINE, {}),
        ("mpirun train", MPI, MACHINE, OPEN_MPI | UCX),
        ("mpirun train", MPI, GPU_MACHINE, OPEN_MPI | UCX | NCCL),
    ],
)
def test_who_would_use_it_is_told_to_leave_it(line: str, job: Job, host: Host, told: dict[str, str]) -> None:
    roomy = env_of(line, job, host=host)
    short = env_of(line, job, host=host, shm_is_short=True)
    assert dict(short) == dict(roomy) | told
    assert not set(told) & set(roomy)


@pytest.mark.parametrize(
    "own",
    [{"NCCL_SHM_DISABLE": "0"}, {"OMPI_MCA_btl_vader_backing_directory": "/fast"}, {"UCX_POSIX_DIR": "/fast"}],
)
def test_the_users_own_words_stand(own: dict[str, str]) -> None:
    plan = engines.plan(request("mpirun train", MPI, own, host=GPU_MACHINE, shm_is_short=True))
    env = plan.processes[0].env
    assert {name: env[name] for name in own} == own


TWO_COPIES = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}


def test_open_mpi_copies_through_shared_memory_where_its_ranks_may_not_read_each_others() -> None:
    allowed = engines.plan(request("mpirun train", MPI)).processes[0].env
    refused = engines.plan(request("mpirun train", MPI, copies_are_refused=True)).processes[0].env
    assert dict(refused) == dict(allowed) | TWO_COPIES


@pytest.mark.parametrize("name", TWO_COPIES)
def test_a_way_of_copying_that_the_user_has_chosen_stays(name: str) -> None:
    plan = engines.plan(request("mpirun train", MPI, {name: "xpmem"}, copies_are_refused=True))
    assert {key: value for key, value in plan.processes[0].env.items() if key in TWO_COPIES} == {name: "xpmem"}
