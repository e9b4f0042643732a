"""Reads manifests with the API classes that Kubeflow and Kubernetes publish, and says what these do not know.

Run by the Python of the environment `kubernetes`, with files as arguments; prints a line for each mistake.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import yaml

TRAINER, TRAINING = "trainer.kubeflow.org/v1alpha1", "kubeflow.org/v1"
# mpi-operator publishes no classes: its own words, of which the templates are Kubernetes'.
MPI_JOB = {
    "spec": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "launcherCreationPolicy": str,
        "mpiImplementation": str,
        "sshAuthMountPath": str,
        "runPolicy": {
            "cleanPodPolicy": str,
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
            "managedBy": str,
            "schedulingPolicy": "V1SchedulingPolicy",
        },
        "mpiReplicaSpecs": {
            role: {"replicas": int, "restartPolicy": str, "template": "V1PodTemplateSpec"}
            for role in ("Launcher", "Worker")
        },
    },
    "metadata": "V1ObjectMeta",
    "apiVersion": str,
    "kind": str,
}


def wrong_in(document: dict[str, Any]) -> list[str]:
    """What of a document its API does not know, or would change."""
    kind, version = document["kind"], document["apiVersion"]
    if (kind, version) == ("MPIJob", "kubeflow.org/v2beta1"):
        return described(document, MPI_JOB, kind)
    models = importlib.import_module("kubeflow_trainer_api.models")
    if kind == "JobSet":  # of which that API has the specification
        return lost(document["spec"], models.JobsetV1alpha2JobSetSpec.from_dict(document["spec"]).to_dict(), kind)
    if version == TRAINER:
        model = getattr(models, f"TrainerV1alpha1{kind}").from_dict(document)
        return lost(document, model.to_dict(), kind)
    return by_kubernetes(document, f"KubeflowOrgV1{kind}" if version == TRAINING else f"V1{kind}", kind)


def by_kubernetes(given: Any, name: str, path: str) -> list[str]:
    """Through a class of the Kubernetes client, where Kubeflow's of v1 have their place too."""
    client = importlib.import_module("kubernetes.client")
    known = importlib.import_module("kubernetes.client.models")
    for module in (known, importlib.import_module("kubeflow.training.models")):
        for word in dir(module):
            if word.startswith("KubeflowOrg"):
                setattr(known, word, getattr(module, word))
    # What its classes call required is every field that Go always writes; a server asks for less.
    for whose in (client, importlib.import_module("kubeflow.training.configuration")):
        whose.Configuration.client_side_validation = property(lambda _: False, lambda _, asked: None)
    api = client.ApiClient()
    model = api._ApiClient__deserialize(given, name)
    return lost(given, api.sanitize_for_serialization(model), path)


def described(given: Any, known: Any, path: str) -> list[str]:
    """Against a description: a mapping of names, the name of a class, or a type."""
    if isinstance(known, str):
        return by_kubernetes(given, known, path)
    if isinstance(known, dict):
        wrong = [f"{path}.{name} is not a field" for name in given if name not in known]
        for name in given.keys() & known.keys():
            wrong += described(given[name], known[name], f"{path}.{name}")
        return wrong
    return [] if type(given) is known else [f"{path} is {given!r}; expected {known.__name__}"]


def lost(given: Any, kept: Any, path: str) -> list[str]:
    """What a reader did not keep."""
    if isinstance(given, dict) and isinstance(kept, dict):
        wrong = []
        for name, value in given.items():
            if name in kept:
                wrong += lost(value, kept[name], f"{path}.{name}")
            elif value not in (None, {}, []):
                wrong.append(f"{path}.{name} is not a field")
        return wrong
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [text for place, (one, two) in pairs for text in lost(one, two, f"{path}[{place}]")]
    return [] if given == kept else [f"{path}: {given!r} was read as {kept!r}"]


def main() -> None:
    for path in sys.argv[1:]:
        for document in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            try:
                wrong = wrong_in(document)
            except Exception as problem:  # noqa: BLE001 - pydantic's, urllib3's, its own: all of them are refusals
                wrong = [f"{document.get('kind')} is refused: {problem}"]
            for text in wrong:
                print(f"{path}: {text}")


if __name__ == "__main__":
    main()
