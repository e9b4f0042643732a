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
        (PYTORCH, ("spec", "runpolicy"), {}, "'runpolicy' was unexpected"),
        (
            PYTORCH,
            ("spec", "nprocPerNode"),
            1,
            "is not of type 'string'",
        ),
        (PYTORCH, ("spec", "nprocPerNode"), "all", "does not match"),
        (PYTORCH, ("spec", "pytorchReplicaSpecs"), GONE, "'pytorchReplicaSpecs' is a required property"),
        (
            PYTORCH,
            ("spec", "pytorchReplicaSpecs", "Chief"),
            {"template": {"spec": {"containers": []}}},
            "is not one of",
        ),
        (PYTORCH, (*MASTER, "restartPolicy"), "OnError", "is not one of"),
        (PYTORCH, (*MASTER, "replicas"), "1", "is not of type 'integer'"),
        (PYTORCH, (*MASTER, "replicas"), True, "is not of type 'integer'"),
        (PYTORCH, (*MASTER, "template"), GONE, "'template' is a required property"),
        (PYTORCH, (*POD, "containers"), GONE, "'containers' is a required property"),
        (PYTORCH, (*POD, "containers"), {"name": "pytorch"}, "is not of type 'array'"),
        (PYTORCH, (*POD, "containers", 0, "name"), GONE, "'name' is a required property"),
        (PYTORCH, (*POD, "containers", 0, "comand"), ["x"], "'comand' was unexpected"),
        (
            PYTORCH,
            (*POD, "containers", 0, "env", 0, "value"),
            50,
            "is not of type 'string'",
        ),
        (
            PYTORCH,
            (*POD, "containers", 0, "ports", 0, "containerPort"),
            70000,
            "greater than the maximum of 65535",
        ),
        (PYTORCH, (*POD, "containers", 0, "resources", "limits", "memory"), "32 GB", "does not match"),
        (PYTORCH, (*POD, "containers", 0, "securityContext", "capabilities"), ["ALL"], "is not of type 'object'"),
        (PYTORCH, (*POD, "volumes", 1, "emptyDir", "medium"), "memory", "is not one of"),
        (PYTORCH, (*POD, "terminationGracePeriod"), 60, "Additional properties are not allowed"),
        (PYTORCH, ("metadata", "name"), "1-charlm", "is not a DNS label that begins with a letter"),
        (PYTORCH, ("metadata", "name"), GONE, "'name' is a required property"),
        (PYTORCH, ("apiVersion",), "kubeflow.org/v1beta1", "PyTorchJob of kubeflow.org/v1beta1 is not known"),
        (PYTORCH, ("kind",), GONE, "this is no object of Kubernetes"),
        (ELASTIC, ("spec", "elasticPolicy", "rdzvBackend"), "static", "is not one of"),
        (ELASTIC, ("spec", "elasticPolicy", "maximumReplicas"), 4, "Additional properties are not allowed"),
        (PYTORCH, (*POD, "containers", 0, "env"), [{"name": "A"}] * 2, "2 items have the same name"),
        (TF, ("spec", "successPolicy"), "All", "is not one of"),
        (TF, ("spec", "tfReplicaSpecs", "Worker", "restartPolicy"), "Exit", "is not one of"),
        (MPI, ("spec", "slots"), 2, "'slots' was unexpected"),
        (MPI, ("spec", "mpiImplementation"), "OpenMpi", "is not one of"),
        (MPI, ("spec", "mpiReplicaSpecs", "Worker", "restartPolicy"), "ExitCode", "is not one of"),
        (MPI, ("apiVersion",), "kubeflow.org/v1", "Additional properties are not allowed"),
        (MPI_V1, ("apiVersion",), "kubeflow.org/v2beta1", None),
        (MPI_V1, ("spec", "sshAuthMountPath"), "/root/.ssh", "Additional properties are not allowed"),
        (TRAINJOB, ("spec", "runtimeRef"), GONE, "'runtimeRef' is a required property"),
        (TRAINJOB, ("spec", "runtimeRef", "kind"), "Runtime", "is not one of"),
        (TRAINJOB, ("spec", "trainer", "numNodes"), 0, "is less than the minimum of 1"),
        (TRAINJOB, ("spec", "trainer", "numProcsPerNode"), 1, "Additional properties are not allowed"),
        (TRAINJOB, ("spec", "trainer", "args"), "train.py", "is not of type 'array'"),
        (TRAINJOB, ("spec", "runtimePatches", 0, "manager"), GONE, "'manager' is a required property"),
        (RUNTIME, ("spec", "mlPolicy", "mpi"), {}, "should not be valid under"),
        (RUNTIME, ("spec", "mlPolicy", "torch", "numProcPerNode"), 2, "Additional properties are not allowed"),
        (
            RUNTIME,
            ("spec", "mlPolicy", "torch", "envInjection", "targets", 0, "jobName"),
            GONE,
            "'jobName' is a required property",
        ),
        (RUNTIME, ("spec", "template", "spec", "replicatedJob"), [], "Additional properties are not allowed"),
        (RUNTIME, (*JOB, "dependsOn"), [{"name": "x", "status": "Done"}], "is not one of"),
        (RUNTIME, (*RULE, "action"), "Fail", "is not one of"),
        (
            RUNTIME,
            (*RULE, "onExitCodes", "values"),
            ["2"],
            "is not of type 'integer'",
        ),
        (RUNTIME, (*RULE, "onExitCodes", "operator"), GONE, "'operator' is a required property"),
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
