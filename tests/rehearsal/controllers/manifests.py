"""Manifests for tests: from few words, and the cases of `cases/CONTRACT.yaml`, each of which has a name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer_launch.rehearsal.controllers import workload_of
from trainer_launch.rehearsal.controllers.documents import read_documents
from trainer_launch.rehearsal.controllers.pod_values import Workload

POD = "{template: {spec: {containers: [{name: %s, image: i%s}]}}%s}"


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Each case by its name: a `manifest`, and what a container of one of its pods sees, `want`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
    documents = [one for path in files for one in yaml.load_all(path.read_text(encoding="utf-8"), loader)]
    assert len({case["name"] for case in documents}) == len(documents), "two cases have the same name"
    return {case["name"]: case for case in documents}


def replica(container: str, more: str = "", spec: str = "") -> str:
    """One replica spec; `more` goes into the container, `spec` beside the template."""
    return POD % (container, f", {more}" if more else "", f", {spec}" if spec else "")


def job_of(*texts: str) -> Workload:
    """The job of these manifests."""
    return workload_of(documents_of(*texts))


def documents_of(*texts: str) -> tuple[Any, ...]:
    """What these manifests hold."""
    documents: tuple[Any, ...] = ()
    for number, text in enumerate(texts):
        documents += read_documents(text, f"{number}.yaml")
    return documents


def pytorch(spec: str, name: str = "job") -> str:
    """A PyTorchJob."""
    return f"apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {{name: {name}}}\nspec: {spec}\n"


def trainjob(trainer: str = "{}", name: str = "job", more: str = "") -> str:
    """A TrainJob for the runtime `rt`."""
    spec = f"{{runtimeRef: {{name: rt}}, trainer: {trainer}{', ' + more if more else ''}}}"
    return f"apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {{name: {name}}}\nspec: {spec}\n"


def runtime(policy: str = "torch: {}", jobs: str | None = None, more: str = "") -> str:
    """The ClusterTrainingRuntime `rt`; `jobs` are further replicatedJobs or the only ones."""
    node = (
        "{name: node, template: {metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}, "
        "spec: {template: {spec: {containers: [{name: node, image: i}]}}}}}"
    )
    jobset = f"{{replicatedJobs: [{jobs or node}]{', ' + more if more else ''}}}"
    return (
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: ClusterTrainingRuntime\nmetadata: {name: rt}\n"
        f"spec: {{mlPolicy: {{numNodes: 1, {policy}}}, template: {{spec: {jobset}}}}}\n"
    )
