"""Variables from a pod's fields have what a kubelet gives them."""

from __future__ import annotations

import uuid

import pytest

from tests.rehearsal.controllers.manifests import job_of, pytorch
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods


def job(source: str, container: str = "", pod: str = "") -> tuple[Pod, ...]:
    side = "{name: side, image: i, command: [a], resources: {limits: {memory: 3Gi}}}"
    main = f"{{name: pytorch, image: i, env: [{{name: V, valueFrom: {source}}}]{container}}}"
    meta = "metadata: {labels: {team: blue}, annotations: {note: 'a b'}}"
    template = f"{{{meta}, spec: {{containers: [{main}, {side}]{pod}}}}}"
    workers = f"{{replicas: 2, template: {template}}}"
    return pods(job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {workers}}}}}")))


def of_field(path: str, pod: str = "") -> list[str]:
    return [each.main.env["V"] for each in job(f'{{fieldRef: {{fieldPath: "{path}"}}}}', pod=pod)]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("metadata.name", ["job-worker-0", "job-worker-1"]),
        ("metadata.namespace", ["default"] * 2),
        ("metadata.labels['team']", ["blue"] * 2),
        ("metadata.annotations['note']", ["a b"] * 2),
        ("metadata.labels['training.kubeflow.org/replica-index']", ["0", "1"]),
        ("spec.nodeName", ["node-0", "node-1"]),
        ("spec.serviceAccountName", ["default"] * 2),
        ("status.hostIP", ["127.0.0.1"] * 2),
        ("status.hostIPs", ["127.0.0.1"] * 2),
        ("status.podIP", ["10.244.0.2", "10.244.0.3"]),
        ("status.podIPs", ["10.244.0.2", "10.244.0.3"]),
    ],
)
def test_a_field_of_the_pod_has_its_value(path: str, values: list[str]) -> None:
    assert of_field(path) == values


def test_each_pod_has_a_uid_of_its_own() -> None:
    first, second = of_field("metadata.uid")
    assert first != second
    assert str(uuid.UUID(first)) == first


@pytest.mark.parametrize("name", ["serviceAccountName", "serviceAccount"])
def test_a_pods_service_account_is_the_one_that_it_asks_for(name: str) -> None:
    assert of_field("spec.serviceAccountName", f", {name}: robot") == ["robot", "robot"]
