"""A job's manifest to the pods that its controller would make: variables, files, containers, rules. Pure.

Each kind is a module with `read(request) -> Workload`; KINDS lists them by kind and version.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import config_maps, size_overrides
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Workload
from trainer_launch.rehearsal.controllers.request import Request

# kind and API group with version -> module; of a kind that is in one group only, the version does not matter
KINDS = {
    ("TrainJob", "trainer.kubeflow.org"): "trainer_v2",
    ("PyTorchJob", "kubeflow.org"): "v1_pytorch",
    ("TFJob", "kubeflow.org"): "v1_tensorflow",
    ("XGBoostJob", "kubeflow.org"): "v1_xgboost",
    ("PaddleJob", "kubeflow.org"): "v1_paddle",
    ("JAXJob", "kubeflow.org"): "v1_jax",
    ("MPIJob", "kubeflow.org/v1"): "v1_mpi",
    ("MPIJob", "kubeflow.org/v2beta1"): "mpi_operator",
}
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


def workload_of(documents: tuple[Field, ...], domain: str = "") -> Workload:
    """The one job among these documents, with the runtimes beside it.

    Raises:
        UsageError: there is no job, or more than one, or something in it does not fit.
    """
    jobs = [found for found in documents if _module(found) is not None]
    runtimes = {found.get("metadata", "name").text(): found for found in documents if _kind(found) in RUNTIMES}
    known = (*RUNTIMES, *config_maps.KINDS)
    others = [found for found in documents if _module(found) is None and _kind(found) not in known]
    if len(jobs) != 1:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in KINDS))
        seen = ", ".join(dict.fromkeys(map(_kind, jobs or documents)))
        count = "no job" if not jobs else f"{len(jobs)} jobs"
        raise UsageError(f"the manifests hold {count} ({seen}); expected one of: {kinds}")
    module = import_module(f"trainer_launch.rehearsal.controllers.{_module(jobs[0])}")
    made: Workload = module.read(Request(job=jobs[0], runtimes=runtimes, domain=domain))
    given = config_maps.read((found for found in documents if _kind(found) in config_maps.KINDS), made.namespace)
    return _with_ignored(config_maps.filled(made, given), others)


def overridden(
    documents: tuple[Field, ...], nodes: NodeRange | None = None, nproc: str | None = None
) -> tuple[Field, ...]:
    """The same documents, with other numbers in the job among them.

    Raises:
        UsageError: a number does not apply to this job.
    """
    if nproc is not None and _with_nproc(documents, "1") == _with_nproc(documents, "2"):
        kind = next((_kind(found) for found in documents if _module(found) is not None), "job")
        raise UsageError(f"--nproc-per-node does not apply to this {kind}: its pods are told no number of workers")
    changed = documents
    if nodes is not None:
        changed = tuple(size_overrides.with_nodes(one, nodes) if _module(one) else one for one in changed)
    if nproc is not None:
        changed = tuple(size_overrides.with_nproc(one, nproc) if _module(one) else one for one in changed)
    return changed


def _with_nproc(documents: tuple[Field, ...], nproc: str) -> Workload:
    return workload_of(tuple(size_overrides.with_nproc(one, nproc) if _module(one) else one for one in documents))


def _with_ignored(made: Workload, others: list[Field]) -> Workload:
    counts: dict[str, int] = {}
    for found in others:
        counts[_kind(found)] = counts.get(_kind(found), 0) + 1
    objects = (kind if count == 1 else f"{count} {kind} objects" for kind, count in counts.items())
    return replace(made, ignored=tuple(dict.fromkeys((*made.ignored, *objects))))


def _kind(found: Field) -> str:
    return found.get("kind").text()


def _module(found: Field) -> str | None:
    """The module that reads this document, None when it is no job."""
    kind, version = _kind(found), found.get("apiVersion").text()
    group = version.partition("/")[0]
    return KINDS.get((kind, version)) or KINDS.get((kind, group))
