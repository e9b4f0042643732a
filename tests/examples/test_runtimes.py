"""The runtimes of docker/kubernetes: restricted pods, graces that fit, and a TrainJob over each is understood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.launching import launch

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
RUNTIMES = sorted((FOLDER / "runtimes").glob("*.yaml"))

each_runtime = pytest.mark.parametrize("path", RUNTIMES, ids=lambda path: path.stem)


def pods_of(path: Path) -> Iterator[dict[str, Any]]:
    runtime = yaml.safe_load(path.read_text())
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        yield job["template"]["spec"]["template"]["spec"]


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_kustomize_applies_every_runtime_and_names_every_image() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == [f"runtimes/{path.name}" for path in RUNTIMES]
    used = {one["image"] for path in RUNTIMES for pod in pods_of(path) for one in containers_of(pod)}
    assert used <= {image["name"] for image in KUSTOMIZATION["images"]}


@each_runtime
def test_every_pod_fits_the_restricted_profile_and_may_write_only_to_volumes(path: Path) -> None:
    for pod in pods_of(path):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@each_runtime
def test_the_launchers_grace_fits_into_the_pods(path: Path) -> None:
    for pod in pods_of(path):
        for container in containers_of(pod):
            env = {variable["name"]: variable["value"] for variable in container["env"]}
            assert 5 <= pod["terminationGracePeriodSeconds"] - int(env["TRAINER_LAUNCH_GRACE"]) <= 30


@each_runtime
def test_a_trainjob_over_it_becomes_pods_that_the_launcher_understands(path: Path, tmp_path: Path) -> None:
    name = yaml.safe_load(path.read_text())["metadata"]["name"]
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "job"},
        "spec": {"runtimeRef": {"name": name}, "trainer": {"numNodes": 2, "args": ["train.py"]}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    made = launch("local", "-f", str(tmp_path / "job.yaml"), "-f", str(path), "--render", str(tmp_path / "pods"))
    assert made.returncode == 0, made.stderr
    snapshots = sorted((tmp_path / "pods").iterdir())
    assert snapshots
    for snapshot in snapshots:
        told = launch("explain", "--pod", str(snapshot), "--", "train.py")
        assert told.returncode == 0, f"{snapshot.name}: {told.stderr}"
