"""Every published manifest is one that its operator's API takes; a mistake is refused, and where it is is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import published, schema
from tests.kubernetes.published import GONE, changed

each = pytest.mark.parametrize
K = published.KUBERNETES / "examples"
PYTORCH, MPI = K / "training-operator/pytorchjob.yaml", K / "mpi-operator/mpijob.yaml"
RUNTIME = published.KUBERNETES / "runtimes/torch-distributed-preflight.yaml"
MASTER = ("spec", "pytorchReplicaSpecs", "Master")
POD = (*MASTER, "template", "spec")


@each("path", published.ALL, ids=published.name)
def test_its_api_takes_a_manifest_with_all_its_fields(path: Path) -> None:
    documents = published.documents(path)
    assert documents
    assert [text for document in documents for text in schema.wrong_in(document)] == []


@each(
    ("manifest", "path", "new", "told"),
    [
        (PYTORCH, ("spec", "runpolicy"), {}, "'runpolicy' was unexpected"),
        (PYTORCH, ("spec", "nprocPerNode"), 1, "is not of type 'string'"),
        (PYTORCH, (*MASTER, "restartPolicy"), "OnError", "is not one of"),
        (PYTORCH, (*POD, "containers", 0, "ports", 0, "containerPort"), 70000, "greater than the maximum of 65535"),
        (PYTORCH, (*POD, "containers", 0, "resources", "limits", "memory"), "32 GB", "does not match"),
        (PYTORCH, (*POD, "containers", 0, "env"), [{"name": "A"}] * 2, "2 items have the same name"),
        (PYTORCH, ("metadata", "name"), "1-charlm", "is not a DNS label that begins with a letter"),
        (PYTORCH, ("apiVersion",), "kubeflow.org/v1beta1", "PyTorchJob of kubeflow.org/v1beta1 is not known"),
        (PYTORCH, ("kind",), GONE, "this is no object of Kubernetes"),
        (MPI, ("apiVersion",), "kubeflow.org/v1", "Additional properties are not allowed"),
        (RUNTIME, ("spec", "mlPolicy", "mpi"), {}, "should not be valid under"),
    ],
)
def test_a_mistake_is_refused(manifest: Path, path: tuple[str | int, ...], new: Any, told: str) -> None:
    found = schema.wrong_in(changed(published.documents(manifest)[0], path, new))
    assert any(told in text for text in found), found


def test_what_is_no_object_is_refused() -> None:
    assert schema.wrong_in([]) == schema.wrong_in(None) == ["this is no object of Kubernetes: it has no kind"]


def test_every_constraint_is_about_a_field_that_there_is() -> None:
    for name in schema.constraints()["fields"]:
        kind, _, field = name.rpartition(".")
        assert {field, f"{field}!"} & schema.types()[kind].keys(), name
    for kind, fields in schema.constraints()["at_most_one"].items():
        assert set(fields) <= schema.types()[kind].keys()
    assert schema.constraints()["not_checked"]
