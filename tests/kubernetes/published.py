"""The manifests that this project publishes, and the pods that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
KUBERNETES = DOCKER / "kubernetes"
EXAMPLES = DOCKER / "examples"  # scripts, and manifests to begin with


def _manifests(folder: Path) -> tuple[Path, ...]:
    others = ("kustomization.yaml", "train_torchtune.yaml")  # the latter configures a recipe
    return tuple(sorted(path for path in folder.rglob("*.yaml") if path.name not in others))


FOR_PRODUCTION = _manifests(KUBERNETES)
ALL = (*_manifests(EXAMPLES), *FOR_PRODUCTION)
JOBS = tuple(path for path in FOR_PRODUCTION if "job" in path.name)
KUSTOMIZATIONS = tuple(sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml")))

# Where the replica specs of a kind are.
_REPLICAS = {
    "PyTorchJob": "pytorchReplicaSpecs",
    "TFJob": "tfReplicaSpecs",
    "MPIJob": "mpiReplicaSpecs",
    "XGBoostJob": "xgbReplicaSpecs",
    "PaddleJob": "paddleReplicaSpecs",
    "JAXJob": "jaxReplicaSpecs",
}


@dataclass(frozen=True)
class Pod:
    """A pod template, and what stands around it."""

    where: str  # the role or the replicatedJob
    spec: Mapping[str, Any]
    job: Mapping[str, Any]  # the JobSpec around it; empty where there is none
    restart: str  # the operator's own restartPolicy, or the pod's

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def documents(path: Path) -> list[dict[str, Any]]:
    """What a file holds."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def name(path: Path) -> str:
    """For the name of a test."""
    return str(path.relative_to(DOCKER).with_suffix(""))


def pods(document: Mapping[str, Any]) -> Iterator[Pod]:
    """The pods of a job or runtime; of a TrainJob none: they are its runtime's."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind in _REPLICAS:
        for role, one in spec[_REPLICAS[kind]].items():
            yield Pod(where=role, spec=one["template"]["spec"], job={}, restart=one.get("restartPolicy", ""))
    elif kind.endswith("TrainingRuntime"):
        for one in spec["template"]["spec"]["replicatedJobs"]:
            job = one["template"]["spec"]
            pod = job["template"]["spec"]
            yield Pod(where=one["name"], spec=pod, job=job, restart=pod.get("restartPolicy", ""))


def all_pods(path: Path) -> list[Pod]:
    """The pods of all documents of a file."""
    return [pod for document in documents(path) for pod in pods(document)]
