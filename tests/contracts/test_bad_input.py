"""Garbage in any variable or file ends in exactly one `ContractError` that says which and what was expected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contracts.pods import CASES, V2_TORCH, pod_of
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.contracts.source import PodInput
from trainer_launch.contracts.trainer_v2_runtimes import authorization_header
from trainer_launch.model.errors import ContractError, LaunchError

GARBAGE = ["", " ", "x y", "-1", "1,5", "\n", "a\nb", "\udcff\udc80", "\0", "x" * 10_000_000, "🦆" * 500, "'" * 500]
# One good pod per contract, and its variables in which garbage of any kind must be refused.
CHECKED = {
    "trainer-v2-torch/torch-v2-numnodes-2-rank1": [
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "JOB_COMPLETION_INDEX",
    ],
    "trainer-v2-torchtune/torchtune-2x8": ["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"],
    "trainer-v2-mpi/mpi-v2-2x8": ["OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_set_default_slots"],
    "trainer-v2-jax/four-nodes": ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"],
    "trainer-v2-xgboost/single": ["DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"],
    "trainer-v2-status/rank-0-reports": [
        "KUBEFLOW_TRAINER_SERVER_URL",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT",
        "KUBEFLOW_TRAINER_SERVER_TOKEN",
    ],
    "pytorchjob-v1/ptj-torchrun-cpu-worker": [
        "MASTER_ADDR",
        "MASTER_PORT",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "PET_NODE_RANK",
        "PET_NPROC_PER_NODE",
        "PET_NNODES",
    ],
    "pytorchjob-v1/ptj-v1.6-worker": ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"],
    "pytorchjob-v1-elastic/ptj-elastic-controller": ["PET_NPROC_PER_NODE", "PET_NNODES", "PET_MAX_RESTARTS"],
    "tfjob-v1/tf-dist-mnist-worker1": ["TF_CONFIG"],
    "xgboostjob-v1/hosts-are-master-and-workers": [
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "WORKER_PORT",
    ],
    "paddlejob-v1/paddle-ps-master": ["PADDLE_NNODES", "PADDLE_MASTER", "PADDLE_SERVER_NUM"],
    "jaxjob-v1/jaxj-simple-1": ["COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"],
    "mpijob-v1/mpi-v1-tensorflow-mnist": ["OMPI_MCA_orte_default_hostfile"],
    "mpijob-v2beta1/mpi-v2b1-intel-law-3": ["K_MPI_JOB_ROLE", "I_MPI_HYDRA_HOST_FILE", "I_MPI_PERHOST"],
    "flyte-elastic/long-names": ["PET_NNODES", "PET_NPROC_PER_NODE"],
}
PLACES = [(case, name) for case, names in CHECKED.items() for name in names]


def pod_of_case(name: str, **env: str) -> PodInput:
    data = CASES[name]["pod"]
    return pod_from_snapshot({**data, "env": {**data["env"], **env}})


@pytest.mark.parametrize(("case", "name"), PLACES, ids=lambda part: part.rpartition("/")[2])
def test_garbage_in_a_variable_is_refused_by_its_name(case: str, name: str) -> None:
    for value in GARBAGE:
        with pytest.raises(ContractError) as caught:
            read_job(pod_of_case(case, **{name: value}))
        check_message(caught.value, name, value)


def check_message(problem: LaunchError, name: str, value: str) -> None:
    message = str(problem)
    assert message.startswith(name), f"{value[:20]!r}: {message}"
    assert len(message) <= 600
    assert message.isprintable()
    assert "expected" in message
    assert "(contract " in message or "several contracts" in message


@pytest.mark.parametrize(
    "text",
    [
        "a b c\n",
        "a slots=\n",
        "\udcff\udcfe",
        "a\0b\n",
        "x" * 5_000_000,
        "a slots=1\na slots=2\n",
        "<html>\n" * 1000,
    ],
)
@pytest.mark.parametrize(
    "case",
    ["trainer-v2-mpi/mpi-v2-2x8", "mpijob-v1/mpi-v1-tensorflow-mnist", "mpijob-v2beta1/mpi-v2b1-example-pi"],
)
def test_garbage_in_a_hostfile_is_refused_by_its_path(case: str, text: str) -> None:
    data = CASES[case]["pod"]
    pod = pod_from_snapshot({**data, "files": {**data["files"], "/etc/mpi/hostfile": text}})
    with pytest.raises(ContractError, match=r"^/etc/mpi/hostfile( line \d+)? is .*expected .*\(contract "):
        read_job(pod)


JSON_VALUES: list[Any] = [None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", "a:1", [], [[]], {}, {"a": {}}]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_in(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("tfjob-v1/tf-dist-mnist-worker1", "TF_CONFIG"),
        ("tfjob-v1/tf-sparse-worker0", "TF_CONFIG"),
        ("tfjob-v1/tf-sparse-ps1-index-mismatch", "TF_CONFIG"),
    ],
)
def test_a_wrong_json_type_anywhere_is_read_or_refused_but_never_crashes(case: str, name: str) -> None:
    good = json.loads(pod_of_case(case).env[name])
    refused = 0
    for path in places_in(good):
        for value in JSON_VALUES:
            problem = refusal(pod_of_case(case, **{name: json.dumps(replaced(good, path, value))}))
            if problem is not None:
                refused += 1
                assert name in problem
                assert len(problem) <= 600
                assert problem.isprintable()
    assert refused > 20


def refusal(pod: PodInput) -> str | None:
    try:
        read_job(pod)
    except ContractError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize("text", ["[" * 60_000, '{"cluster":' * 11_000, '{"task":{"index":' + "9" * 100_000 + "}}"])
def test_json_that_is_deep_or_huge_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="TF_CONFIG"):
        read_job(pod_of({"TF_CONFIG": text}))


def test_garbage_in_variables_of_others_does_not_matter() -> None:
    noise = {"UNRELATED": "\udcff", "BIG": "x" * 10_000_000, "A\nB": "c", "": ""}
    assert read_job(pod_of({**V2_TORCH, **noise}, hostname="\udcff\n" * 100)).node_rank == 1


@pytest.mark.parametrize("token", ["", " \n", "a b", "a\r\nX-Evil: 1", "\udcff", "é"])
def test_a_token_that_breaks_the_header_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ContractError) as caught:
        authorization_header(token)
    assert "X-Evil" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_token_becomes_a_bearer_header() -> None:
    assert authorization_header("JWT\n") == "Bearer JWT"
