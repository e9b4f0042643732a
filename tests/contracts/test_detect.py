"""Which contract a pod is of: exactly one fits, or an error says what settles it."""

from __future__ import annotations

import json

import pytest

from tests.contracts.pods import V1_GENERAL, V2_TORCH, pod_of
from tests.refusals import refusal
from trainer_launch.contracts import CONTRACTS, detect, find, read_job
from trainer_launch.contracts.source import Source
from trainer_launch.model import Origin
from trainer_launch.model.errors import ContractError

TF = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})}


def detected(env: dict[str, str], files: dict[str, str] | None = None, hostname: str = "") -> str:
    return detect(Source(pod_of(env, files, hostname))).name


def test_an_empty_pod_is_unknown() -> None:
    assert detected({}) == "unknown"


def test_every_name_is_unique_and_can_be_asked_for() -> None:
    names = [contract.name for contract in CONTRACTS]
    assert len(set(names)) == len(names)
    assert [find(name).name for name in names] == names


def test_of_two_contracts_for_one_kind_of_job_the_first_in_the_list_wins() -> None:
    flyte = {"FLYTE_INTERNAL_EXECUTION_ID": "f"}
    assert detected({"K_MPI_JOB_ROLE": "worker"}) == "mpijob-v2beta1"
    assert detected({"K_MPI_JOB_ROLE": "worker", **flyte}) == "mpijob-v2beta1"
    assert detected({"PET_RDZV_ENDPOINT": "a:1", **flyte}) == "flyte-elastic"


def test_names_of_a_jaxjob_that_a_user_sets_for_a_script_do_not_hide_a_trainjob() -> None:
    by_hand = {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}
    assert detected(by_hand) == "jaxjob-v1"
    assert detected({**by_hand, "JAX_COORDINATOR_ADDRESS": "a:1"}) == "trainer-v2-jax"


def test_two_platforms_in_one_pod_are_refused_with_both_names() -> None:
    with pytest.raises(ContractError) as caught:
        detected({**V2_TORCH, **TF})
    message = str(caught.value)
    assert all(part in message for part in ("tfjob-v1", "trainer-v2-torch"))
    assert "--contract" in message
    assert "TRAINER_LAUNCH_CONTRACT" in message
    assert len(message) <= 600


def test_naming_a_contract_beats_detection() -> None:
    assert read_job(pod_of({**V2_TORCH, **TF}), "tfjob-v1").contract == "tfjob-v1"
    assert read_job(pod_of({**V2_TORCH, **TF}), "trainer-v2-torch").nodes is not None


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names() -> None:
    message = refusal(lambda: read_job(pod_of({}), "trainer-v2-toch"))
    assert "did you mean trainer-v2-torch?" in message
    assert all(contract.name in message for contract in CONTRACTS)
    assert len(message) <= 600


def test_a_huge_name_is_refused_in_one_short_line() -> None:
    said = refusal(lambda: find("x\n" * 1_000_000))
    assert len(said) <= 600
    assert "\n" not in said


def test_asking_for_a_contract_whose_variables_are_not_there_says_which() -> None:
    with pytest.raises(ContractError, match="JAX_NUM_PROCESSES is not set; contract trainer-v2-jax"):
        read_job(pod_of({}), "trainer-v2-jax")


@pytest.mark.parametrize(
    ("port", "unbuffered", "kind"),
    [
        ("9999", None, "xgboostjob-v1"),
        ("9999", "0", "xgboostjob-v1"),
        ("8080", "1", "xgboostjob-v1"),
        ("23456", "1", "xgboostjob-v1"),
        ("23456", None, "pytorchjob-v1"),
        ("23456", "0", "pytorchjob-v1"),
        ("8080", "0", "pytorchjob-v1"),
    ],
)
def test_an_old_job_of_one_replica_is_told_by_its_hints(port: str, unbuffered: str | None, kind: str) -> None:
    env = {**V1_GENERAL, "MASTER_PORT": port}
    if unbuffered is not None:
        env["PYTHONUNBUFFERED"] = unbuffered
    assert detected(env) == kind


@pytest.mark.parametrize("unbuffered", [None, "", "2"])
def test_an_old_job_of_one_replica_without_a_hint_is_ambiguous(unbuffered: str | None) -> None:
    env = V1_GENERAL if unbuffered is None else {**V1_GENERAL, "PYTHONUNBUFFERED": unbuffered}
    with pytest.raises(ContractError, match="pytorchjob-v1 and xgboostjob-v1"):
        detected(env)


def test_an_old_job_of_more_replicas_without_worker_addrs_is_a_pytorch_job() -> None:
    assert detected({**V1_GENERAL, "WORLD_SIZE": "2", "MASTER_PORT": "9999"}) == "pytorchjob-v1"


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"TF_CONFIG": "{}"}, "tfjob-v1"),
        ({"PADDLE_MASTER": "a:1", "PADDLE_JOB_ID": "j"}, "paddlejob-v1"),
        ({"COORDINATOR_ADDRESS": "a", "NUM_PROCESSES": "1", "PROCESS_ID": "0"}, "jaxjob-v1"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "trainer-v2-jax"),
        ({"DMLC_TRACKER_URI": "a"}, "trainer-v2-xgboost"),
        ({"K_MPI_JOB_ROLE": "worker"}, "mpijob-v2beta1"),
        ({"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}, "mpijob-v1"),
        ({"JOB_COMPLETION_INDEX": "0"}, "trainer-v2-plainml"),
    ],
)
def test_general_names_set_by_hand_do_not_hide_who_made_the_pod(more: dict[str, str], kind: str) -> None:
    assert detected({**V1_GENERAL, **more}) == kind


def test_flux_beats_everything_but_the_inside_of_an_engine() -> None:
    flux = {"/etc/flux-config/entrypoint.sh": ""}
    assert detected({**V2_TORCH, **TF}, flux) == "trainer-v2-flux"
    assert (
        detected({"OMPI_MCA_orte_default_hostfile": "/x", "JOB_COMPLETION_INDEX": "0"}, flux) == "trainer-v2-flux"
    )
    assert detected({"PMI_RANK": "0"}, flux) == "mpi-rank"


def test_keys_in_an_image_do_not_make_a_torch_pod_an_mpi_node() -> None:
    keys = {"/root/.ssh/id_rsa": "", "/root/.ssh/authorized_keys": ""}
    assert detected(V2_TORCH, keys) == "trainer-v2-torch"
    assert detected({"JOB_COMPLETION_INDEX": "0"}, keys) == "trainer-v2-mpi"
    assert detected({}, keys) == "unknown"


@pytest.mark.parametrize(
    ("hostname", "kind"),
    [
        ("train-1", "trainer-v2-plainml"),
        ("train-0-1", "trainer-v2-plainml"),  # of a Job called train-0
        ("set-workers-0-1", "trainer-v2-plainml"),
        ("train-node-0-1", "trainer-v2-mpi"),
        ("machine7", "trainer-v2-mpi"),  # with hostNetwork nothing tells
    ],
)
def test_ssh_keys_in_an_indexed_job_for_git_or_anything_make_it_no_mpi_job(hostname: str, kind: str) -> None:
    keys = {"/root/.ssh/id_rsa": "", "/root/.ssh/authorized_keys": ""}
    assert detected({"JOB_COMPLETION_INDEX": "1"}, keys, hostname) == kind


def test_an_mpi_variable_of_the_user_makes_no_launcher() -> None:
    assert detected({"OMPI_MCA_btl": "tcp,self", "JOB_COMPLETION_INDEX": "0"}) == "trainer-v2-plainml"


def test_a_job_knows_what_it_was_read_from() -> None:
    facts = read_job(pod_of(V2_TORCH)).facts
    by_name = {fact.name: fact for fact in facts}
    assert by_name["PET_NNODES"].value == "2"
    assert by_name["PET_NNODES"].field == "nodes"
    assert {fact.origin for fact in facts} == {Origin.ENV}
    assert len(facts) == len(set(facts))


@pytest.mark.parametrize("drop", ["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_PORT"])
def test_a_torch_pod_that_lacks_one_variable_is_told_which(drop: str) -> None:
    env = {name: value for name, value in V2_TORCH.items() if name != drop}
    with pytest.raises(ContractError, match=f"{drop} is not set; contract trainer-v2-torch"):
        read_job(pod_of(env))
