"""Every published manifest of a job is rendered, or the reason why not is on a list.

`published.jsonl` has a line for each manifest under examples/, manifests/ and config/samples/ of kubeflow/trainer
(v2.3.0, and v1.9.4 for the v1 kinds), kubeflow/training-operator, kubeflow/mpi-operator and kubernetes-sigs/jobset,
all under the Apache License 2.0, as its documents without comments, with the commit it was read at.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launched
from tests.refusals import refusal
from tests.rehearsal.controllers.manifests import trainjob
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.rehearsal.controllers import rendered, trainer_v2, workload_of
from trainer_launch.rehearsal.controllers.documents import Field, read_documents
from trainer_launch.rehearsal.controllers.pod_values import Workload, pods

ROWS = [json.loads(line) for line in (Path(__file__).parent / "published.jsonl").read_text("utf-8").splitlines()]
MANIFESTS = {f"{row['repository']}@{row['commit'][:8]}:{row['path']}": row["documents"] for row in ROWS}
NO_JOB = "a Workload tells the scheduler about a JobSet of another file; it is no job itself"
TAS = "kubernetes-sigs/jobset@08dfbdfd:site/static/examples/workload-aware-scheduling"
FLUX = ("flux-interactive", "flux-runtime", "lammps-train-gpus", "lammps-train-job")
MPI_V1 = ("tensorflow-mnist", "tensorflow-mnist-elastic")
REASONS = {
    "kubeflow/training-operator@078ec30f:manifests/v2/base/runtimes/pre-training/torch-distributed.yaml": (
        "a runtime of kubeflow.org/v2alpha1, a preview which no TrainJob of Trainer 2 can refer to"
    ),
    "kubernetes-sigs/jobset@08dfbdfd:config/samples/batch_v1alpha2_jobset.yaml": "it has no replicatedJobs yet",
    "kubernetes-sigs/jobset@08dfbdfd:site/static/examples/argo-workflow/workflow.yaml": (
        "an Argo Workflow, which makes its JobSet only when it runs"
    ),
    **{f"{TAS}/{name}workload.yaml": NO_JOB for name in ("", "dra/", "tas/")},
    **{f"kubeflow/trainer@658725bd:examples/flux/{name}.yaml": "a Flux job" for name in FLUX},
    **{f"kubeflow/trainer@4445c12a:examples/mpi/{name}.yaml": "an MPIJob v1" for name in MPI_V1},
}
# What the container that counts is told, by kind, and of a TrainJob by the policy of its runtime.
TOLD = {
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    "jax": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TASK_ID", "DMLC_NUM_WORKER"),
    "PyTorchJob": ("PET_NNODES",),
    "TFJob": (),  # TF_CONFIG where there is more than one pod
    "JAXJob": ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"),
    "XGBoostJob": ("MASTER_ADDR", "RANK", "WORLD_SIZE"),
    "PaddleJob": ("PADDLE_MASTER", "PADDLE_NNODES"),
}


def beside(name: str) -> list[Any]:
    """What has to be there first: a job for a runtime, the runtime of Flux for its jobs."""
    (first, *others) = MANIFESTS[name]
    if first["kind"] == "ClusterTrainingRuntime" and not others:
        return [trainjob("{numNodes: 2}").replace("name: rt", f"name: {first['metadata']['name']}")]
    if first["kind"] == "TrainJob" and first["spec"]["runtimeRef"]["name"] == "flux-distributed":
        runtime = next(documents for path, documents in MANIFESTS.items() if path.endswith("flux-runtime.yaml"))
        return [json.dumps(one) for one in runtime]
    return []


def made(name: str) -> Workload:
    texts = [*map(json.dumps, MANIFESTS[name]), *beside(name)]
    return workload_of(tuple(field for text in texts for field in read_documents(text, name)))


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name not in REASONS])
def test_a_published_manifest_is_rendered(name: str) -> None:
    workload = made(name)
    snapshots = rendered(pods(workload))
    assert {draft.hostname for draft in workload.drafts} == {f.split(".json")[0].split(".")[0] for f in snapshots}
    policies = (
        policy for policy in ("torch", "jax", "xgboost") if f'"{policy}": {{' in json.dumps(MANIFESTS[name])
    )
    kind = next(policies, "") if workload.kind == "TrainJob" else workload.kind
    for pod in pods(workload):
        told = {*pod.main.env, *pod.main.files}
        if workload.kind != "TrainJob" or pod.draft.role == "node":
            assert told.issuperset(TOLD.get(kind, ())), pod.name
        if workload.kind.startswith("MPIJob") and pod.draft.role == "launcher":
            assert "/etc/mpi/hostfile" in told


@pytest.mark.parametrize("name", REASONS)
def test_a_manifest_with_a_reason_is_refused_in_one_sentence(name: str) -> None:
    assert "\n" not in refusal(lambda: made(name))
    assert REASONS[name]


def test_the_collection_is_whole() -> None:
    assert len(MANIFESTS) == len(ROWS) >= 85
    assert {*REASONS} <= {*MANIFESTS}
    kinds = {document["kind"] for documents in MANIFESTS.values() for document in documents}
    assert kinds >= {"TrainJob", "PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "JobSet"}


# -- runtimes by name --------------------------------------------------------------------------


RUNTIMES = {
    documents[0]["metadata"]["name"]: documents[0]["spec"]
    for name, documents in MANIFESTS.items()
    if name.startswith("kubeflow/trainer@658725bd:manifests/base/runtimes/")
}


def test_the_runtimes_of_the_package_are_the_published_ones() -> None:
    assert dict(trainer_v2.published()) == RUNTIMES


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_a_published_runtime_needs_no_file(name: str) -> None:
    text = trainjob("{numNodes: 1}").replace("name: rt", f"name: {name}")
    by_name = workload_of(read_documents(text, "job.yaml"))
    runtime = {"kind": "ClusterTrainingRuntime", "metadata": {"name": name}, "spec": RUNTIMES[name]}
    given = (Field({"apiVersion": "trainer.kubeflow.org/v1alpha1", **runtime}, "", "the file"),)
    assert rendered(pods(by_name)) == rendered(pods(workload_of((*read_documents(text, "job.yaml"), *given))))
    contracts = {
        read_job(pod_from_snapshot(json.loads(json.dumps(snapshot))), None).contract
        for file, snapshot in rendered(pods(by_name)).items()
        if "-initializer" not in file
    }
    policy = next(key for key in RUNTIMES[name]["mlPolicy"] if key != "numNodes")
    assert contracts == {f"trainer-v2-{policy}"}


@pytest.mark.process
def test_a_job_of_torchtune_is_rehearsed_by_the_name_of_its_runtime(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(trainjob("{command: [tune, run]}").replace("name: rt", "name: torchtune-qwen2.5-1.5b"))
    ended = launched("rehearse", "-f", str(job), "--command", "sh -c 'echo nproc $PET_NPROC_PER_NODE'")
    assert "[job-node-0-0] nproc auto" in ended.stdout, ended.stdout
    for name in ("job-dataset-initializer-0-0", "job-model-initializer-0-0", "job-node-0-0"):
        assert re.search(rf"^{name} +Succeeded +1 +0 +0", ended.stderr, re.MULTILINE), ended.stderr


def test_an_unknown_runtime_lists_the_known_ones() -> None:
    said = refusal(lambda: workload_of(read_documents(trainjob(), "job.yaml")))
    assert all(name in said for name in RUNTIMES)
