"""What a manifest asks for and a rehearsal does not do is listed, each field once."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.manifests import job_of, pytorch, runtime, trainjob

VOLUME = "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]"
RESOURCE = "env: [{name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}]"
TFJOB = "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: job}\nspec: "


def workers(container: str = "", pod: str = "") -> str:
    spec = f"{{containers: [{{name: pytorch, image: i, {container}}}], {pod}}}"
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{replicas: 2, template: {{spec: {spec}}}}}}}}}")


@pytest.mark.parametrize(
    ("texts", "ignored"),
    [
        ((workers(pod=VOLUME),), "sizeLimit of volume shm"),
        ((workers(RESOURCE),), "variable CPUS (from resourceFieldRef)"),
        ((trainjob(more="initializer: {dataset: {storageUri: 'hf://a/b'}}"), runtime()), "initializer"),
        (
            (f"{TFJOB}{{enableDynamicWorker: true, tfReplicaSpecs: {{Worker: {{template: {{spec: "
             "{containers: [{name: tensorflow, image: i}]}}}}}",),
            "enableDynamicWorker",
        ),
    ],
)  # fmt: skip
def test_a_field_without_effect_here_is_listed_once(texts: tuple[str, ...], ignored: str) -> None:
    assert job_of(*texts).ignored == (ignored,)


@pytest.mark.parametrize(
    ("text", "most"),
    [(pytorch("{pytorchReplicaSpecs: {Worker: {template: {spec: {containers: [{name: pytorch, image: i}]}}}}}",
              "NAME"), 54), (trainjob(name="NAME"), 48)],
    ids=["behind the name: -worker-0", "behind the name: -node-0-0-xxxxx"],
)  # fmt: skip
def test_a_job_whose_pods_have_names_that_a_cluster_refuses_is_rehearsed_with_a_warning(
    text: str, most: int
) -> None:
    there = (runtime(),) if "TrainJob" in text else ()
    assert job_of(text.replace("NAME", "a" * most), *there).odd == ()
    (sentence,) = job_of(text.replace("NAME", "a" * (most + 1)), *there).odd
    assert "has 64 characters, and a pod's name at most 63" in sentence
