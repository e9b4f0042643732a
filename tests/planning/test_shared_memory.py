"""Shared memory as a budget: need, room and memory limit in; what to do, and what engines are told, out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.planning.requests import GPU_MACHINE, MACHINE, request
from trainer_launch.model import Cpus, Gpus, Host, Job, NodeRange
from trainer_launch.model.units import MIB
from trainer_launch.model.value_parsers import parse_quantity
from trainer_launch.planning import engines
from trainer_launch.planning.shared_memory import (
    LOADERS_BYTES,
    NCCL_SEGMENT_BYTES,
    Decision,
    Need,
    decide,
)

GIB = 1 << 30


def machine(shm: int | None = 64 * MIB, **changes: Any) -> Host:
    fields: dict[str, Any] = {
        "hostname": "here",
        "cpus": Cpus(affinity=2, quota=None),
        "gpus": Gpus(count=0, reason="none"),
        "memory_limit_bytes": None,
        "shm_bytes": shm,
        "shm_free_bytes": shm,
    }
    return Host(**(fields | changes))


def test_it_is_enlarged_by_what_is_missing_where_the_container_may() -> None:
    decision = decide(machine(shm_free_bytes=MIB, may_enlarge_shm=True), Need(workers=2), "auto")
    assert decision.enlarge_to == 64 * MIB + 2 * LOADERS_BYTES - MIB
    assert decision.warning == ""


def test_four_gpus_fill_what_docker_gives_and_nccl_is_told() -> None:
    assert decide(machine(), Need(workers=4, on_gpus=True), "auto").is_short
    assert not decide(machine(), Need(workers=2, on_gpus=True), "auto").is_short
    assert 2 * 4 * NCCL_SEGMENT_BYTES > 64 * MIB > 2 * 2 * NCCL_SEGMENT_BYTES


def test_the_memory_limit_bounds_it_and_what_is_used_counts() -> None:
    tight = machine(may_enlarge_shm=True, memory_limit_bytes=GIB, memory_used_bytes=100 * MIB)
    decision = decide(tight, Need(workers=8), "auto")
    assert decision.enlarge_to == GIB // 2
    assert "it counts against the memory limit of 1024 MiB, of which 100 MiB are in use" in decision.warning
    fuller = machine(may_enlarge_shm=True, memory_limit_bytes=GIB, memory_used_bytes=900 * MIB)
    assert decide(fuller, Need(workers=8), "auto").enlarge_to == 124 * MIB


def test_a_size_that_is_asked_for_is_made() -> None:
    assert decide(machine(may_enlarge_shm=True), Need(), "8Gi").enlarge_to == 8 * GIB
    assert decide(machine(), Need(), "8Gi").warning.endswith(
        "volumeMounts: [{name: shm, mountPath: /dev/shm}] in the container"
    )
    assert "sizeLimit: 8Gi" in decide(machine(), Need(), "8Gi").warning
    assert decide(machine(), Need(), "32Mi").enlarge_to is None  # never made smaller


def test_what_is_to_be_kept_or_is_not_there_is_left_alone() -> None:
    assert decide(machine(may_enlarge_shm=True), Need(workers=8, on_gpus=True), "keep") == Decision(
        text="left as it is"
    )
    assert decide(machine(None), Need(workers=8), "auto") == Decision(text="not there")


QUANTITIES = {"4": 4, "2500m": 3, "0.7": 1, "1k": 1000, "1Ki": 1024, "2e3": 2000, "1n": 1, "3.": 3, ".5": 1} | {
    "8Gi": 8 * GIB,
    "1.5Gi": 3 * GIB // 2,
    "64M": 64_000_000,
    **dict.fromkeys(("", "x", "1 2", "1mm", "--1", "1e999", "8gb", "٣"), None),
}


@pytest.mark.parametrize("text", QUANTITIES)
def test_a_quantity_is_read_as_kubernetes_does(text: str) -> None:
    assert parse_quantity(text) == QUANTITIES[text]


def test_an_mpi_worker_that_knows_no_number_of_ranks_looks_only_at_what_mpi_takes() -> None:
    need = Need(workers=2, is_mpi=True, is_guess=True)
    assert not decide(machine(), need, "auto").warning  # 64 MiB
    decision = decide(machine(shm_bytes=4 * MIB, shm_free_bytes=4 * MIB), need, "auto")
    assert decision.is_short
    assert "2 workers may need 40 MiB (MPI; the number of workers is a guess)" in decision.warning


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
