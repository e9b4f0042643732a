"""Every published manifest is one that its operator's API takes; a mistake is refused, and where it is is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import published, schema

each = pytest.mark.parametrize
K, E = published.KUBERNETES / "examples", published.EXAMPLES
PYTORCH, ELASTIC = K / "training-operator/pytorchjob.yaml", K / "training-operator/pytorchjob-elastic.yaml"
TF, MPI, MPI_V1 = (
    K / "training-operator/tfjob.yaml",
    K / "mpi-operator/mpijob.yaml",
    K / "training-operator/mpijob.yaml",
)
TRAINJOB, RUNTIME = (
    K / "trainer/trainjob-torch.yaml",
    published.KUBERNETES / "runtimes/torch-distributed-preflight.yaml",
)
MASTER = ("spec", "pytorchReplicaSpecs", "Master")
POD = (*MASTER, "template", "spec")
JOB = ("spec", "template", "spec", "replicatedJobs", 0)
RULE = (*JOB, "template", "spec", "podFailurePolicy", "rules", 1)
GONE = object()


@each("path", published.ALL, ids=published.name)
def test_its_api_takes_a_manifest_with_all_its_fields(path: Path) -> None:
    documents = published.documents(path)
    assert documents
    assert [text for document in documents for text in schema.wrong_in(document)] == []


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    copied = copy.deepcopy(value)
    place = copied
    for step in path[:-1]:
        place = place[step]
    if new is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return copied


@each(
    ("manifest", "path", "new", "told"),
    [
        (PYTORCH, ("spec", "runpolicy"), {}, "PyTorchJob.spec.runpolicy is not a field of PyTorchJobSpec"),
        (
            PYTORCH,
            ("spec", "nprocPerNode"),
            1,
            "PyTorchJob.spec.nprocPerNode is 1; expected a value of the type string",
        ),
        (PYTORCH, ("spec", "nprocPerNode"), "all", "breaks pattern"),
        (PYTORCH, ("spec", "pytorchReplicaSpecs"), GONE, "PyTorchJob.spec.pytorchReplicaSpecs is missing"),
        (
            PYTORCH,
            ("spec", "pytorchReplicaSpecs", "Chief"),
            {"template": {"spec": {"containers": []}}},
            "breaks keys",
        ),
        (PYTORCH, (*MASTER, "restartPolicy"), "OnError", "breaks one_of"),
        (PYTORCH, (*MASTER, "replicas"), "1", "expected a value of the type integer"),
        (PYTORCH, (*MASTER, "replicas"), True, "expected a value of the type integer"),
        (PYTORCH, (*MASTER, "template"), GONE, "Master.template is missing"),
        (PYTORCH, (*POD, "containers"), GONE, "spec.containers is missing"),
        (PYTORCH, (*POD, "containers"), {"name": "pytorch"}, "expected a list"),
        (PYTORCH, (*POD, "containers", 0, "name"), GONE, "containers[0].name is missing"),
        (PYTORCH, (*POD, "containers", 0, "comand"), ["x"], "containers[0].comand is not a field of Container"),
        (
            PYTORCH,
            (*POD, "containers", 0, "env", 0, "value"),
            50,
            "env[0].value is 50; expected a value of the type str",
        ),
        (PYTORCH, (*POD, "containers", 0, "ports", 0, "containerPort"), 70000, "breaks most 65535"),
        (PYTORCH, (*POD, "containers", 0, "resources", "limits", "memory"), "32 GB", "expected a quantity"),
        (PYTORCH, (*POD, "containers", 0, "securityContext", "capabilities"), ["ALL"], "expected a mapping"),
        (PYTORCH, (*POD, "volumes", 1, "emptyDir", "medium"), "memory", "breaks one_of"),
        (PYTORCH, (*POD, "terminationGracePeriod"), 60, "is not a field of PodSpec"),
        (PYTORCH, ("metadata", "name"), "1-charlm", "is not a DNS label that begins with a letter"),
        (PYTORCH, ("metadata", "name"), GONE, "PyTorchJob.metadata.name is missing"),
        (PYTORCH, ("apiVersion",), "kubeflow.org/v1beta1", "PyTorchJob of kubeflow.org/v1beta1 is not known"),
        (PYTORCH, ("kind",), GONE, "this is no object of Kubernetes"),
        (ELASTIC, ("spec", "elasticPolicy", "rdzvBackend"), "static", "breaks one_of"),
        (ELASTIC, ("spec", "elasticPolicy", "maximumReplicas"), 4, "is not a field of ElasticPolicy"),
        (TF, ("spec", "successPolicy"), "All", "breaks one_of"),
        (TF, ("spec", "tfReplicaSpecs", "Worker", "restartPolicy"), "Exit", "breaks one_of"),
        (MPI, ("spec", "slots"), 2, "MPIJob.spec.slots is not a field of v2beta1.MPIJobSpec"),
        (MPI, ("spec", "mpiImplementation"), "OpenMpi", "breaks one_of"),
        (MPI, ("spec", "mpiReplicaSpecs", "Worker", "restartPolicy"), "ExitCode", "breaks one_of"),
        (MPI, ("apiVersion",), "kubeflow.org/v1", "is not a field of MPIJobSpec"),
        (MPI_V1, ("apiVersion",), "kubeflow.org/v2beta1", None),
        (MPI_V1, ("spec", "sshAuthMountPath"), "/root/.ssh", "is not a field of MPIJobSpec"),
        (TRAINJOB, ("spec", "runtimeRef"), GONE, "TrainJob.spec.runtimeRef is missing"),
        (TRAINJOB, ("spec", "runtimeRef", "kind"), "Runtime", "breaks one_of"),
        (TRAINJOB, ("spec", "trainer", "numNodes"), 0, "breaks least 1"),
        (TRAINJOB, ("spec", "trainer", "numProcsPerNode"), 1, "is not a field of Trainer"),
        (TRAINJOB, ("spec", "trainer", "args"), "train.py", "expected a list"),
        (TRAINJOB, ("spec", "runtimePatches", 0, "manager"), GONE, "runtimePatches[0].manager is missing"),
        (RUNTIME, ("spec", "mlPolicy", "mpi"), {}, "has torch and mpi; at most one of them may be there"),
        (RUNTIME, ("spec", "mlPolicy", "torch", "numProcPerNode"), 2, "is not a field of TorchMLPolicySource"),
        (
            RUNTIME,
            ("spec", "mlPolicy", "torch", "envInjection", "targets", 0, "jobName"),
            GONE,
            "jobName is missing",
        ),
        (RUNTIME, ("spec", "template", "spec", "replicatedJob"), [], "is not a field of jobset.JobSetSpec"),
        (RUNTIME, (*JOB, "dependsOn"), [{"name": "x", "status": "Done"}], "breaks one_of"),
        (RUNTIME, (*RULE, "action"), "Fail", "breaks one_of"),
        (
            RUNTIME,
            (*RULE, "onExitCodes", "values"),
            ["2"],
            "values[0] is '2'; expected a value of the type integer",
        ),
        (RUNTIME, (*RULE, "onExitCodes", "operator"), GONE, "operator is missing"),
    ],
)
def test_a_mistake_is_refused(manifest: Path, path: tuple[str | int, ...], new: Any, told: str | None) -> None:
    document = published.documents(manifest)[0]
    found = schema.wrong_in(changed(document, path, new))
    assert any(told in text for text in found) if told else found == [], found


def test_what_is_no_object_is_refused() -> None:
    assert schema.wrong_in([]) == schema.wrong_in(None) == ["this is no object of Kubernetes: it has no kind"]


def test_every_constraint_is_about_a_field_that_there_is() -> None:
    for name in schema.constraints()["fields"]:
        kind, _, field = name.rpartition(".")
        assert {field, f"{field}!"} & schema.types()[kind].keys(), name
    for kind, fields in schema.constraints()["at_most_one"].items():
        assert set(fields) <= schema.types()[kind].keys()
    assert schema.constraints()["not_checked"]
