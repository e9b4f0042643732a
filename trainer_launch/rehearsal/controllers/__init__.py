"""A job's manifest to the pods that its controller would make: variables, files, containers, rules.

KINDS lists the function that reads each kind.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.model import Json, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import counted, grouped
from trainer_launch.rehearsal.controllers import jobset, mpi_operator, trainer_v2, v1
from trainer_launch.rehearsal.controllers.documents import (
    CONFIG_KINDS,
    MAX_BYTES,
    Field,
    read_configs,
    read_documents,
)
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, Workload, pods

# Kind and API group with version; of a kind that is in one group only, the version does not matter.
KINDS: Mapping[tuple[str, str], Callable[[Field], Workload]] = {
    ("TrainJob", "trainer.kubeflow.org"): trainer_v2.read,
    ("PyTorchJob", "kubeflow.org"): v1.read,
    ("TFJob", "kubeflow.org"): v1.read,
    ("XGBoostJob", "kubeflow.org"): v1.read,
    ("PaddleJob", "kubeflow.org"): v1.read,
    ("JAXJob", "kubeflow.org"): v1.read,
    ("MXJob", "kubeflow.org"): v1.read,
    ("MPIJob", "kubeflow.org/v2beta1"): mpi_operator.read,
    ("JobSet", "jobset.x-k8s.io"): jobset.read,
    ("Job", "batch"): jobset.read,
}
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
MAX_FILES = 16
_WORKER, _LAUNCHER = "worker", "launcher"
_NODES = ("master", "chief", _WORKER)  # replica types each of whose pods is a node
_NPROC = {
    "TrainJob": ("spec", "trainer", "numProcPerNode"),
    "PyTorchJob": ("spec", "nprocPerNode"),
    "MPIJob": ("spec", "slotsPerWorker"),
}
_log = logging.getLogger(__name__)


# -- manifests ---------------------------------------------------------------------------------


def read(paths: Sequence[str]) -> tuple[Field, ...]:
    """What these files hold: a job, with all that it refers to.

    Raises:
        UsageError: a file cannot be read, or what is in it does not fit.
    """
    if len(paths) > MAX_FILES:
        raise UsageError(f"-f is given {len(paths)} times; expected at most {MAX_FILES} files")
    return tuple(document for path in paths for document in read_documents(text_of(path, "-f"), path))


def text_of(path: str, flag: str) -> str:
    """A file that a flag names, up to a little more than it may have.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as problem:
        raise UsageError(f"{flag} {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path} is not a UTF-8 text file") from None


def workload_of(documents: tuple[Field, ...], *, shows_secrets: bool = True) -> Workload:
    """The one job among these documents, with the runtimes, ConfigMaps and Secrets beside it.

    Raises:
        UsageError: there is no job, or more than one, or something in it does not fit.
    """
    jobs = [document for document in documents if _reader(document)]
    jobs = [job for job in jobs if _kind(job) != "Job"] or jobs  # beside another job it has to do something else
    others = [document for document in documents if document not in jobs]
    others = [document for document in others if _kind(document) not in (*RUNTIMES, *CONFIG_KINDS)]
    if any(_kind(document) == "MPIJob" for document in others):
        raise UsageError(
            "an MPIJob of kubeflow.org/v1 is not rehearsed, because its launcher starts ranks by kubectl exec; "
            "write it as kubeflow.org/v2beta1, which mpi-operator runs, or rehearse the command with --engine mpi"
        )
    if len(jobs) != 1:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in KINDS))
        given = ", ".join(dict.fromkeys(map(_kind, jobs or documents)))
        count = "no job" if not jobs else f"{len(jobs)} jobs"
        raise UsageError(f"the manifests hold {count} ({given}); expected one of: {kinds}")
    (job,) = jobs
    given_configs = (document for document in documents if _kind(document) in CONFIG_KINDS)
    configs = read_configs(given_configs, v1.namespace(job), shows_secrets=shows_secrets)
    runtimes = {each.get("metadata", "name").text(): each for each in documents if _kind(each) in RUNTIMES}
    configs = replace(configs, runtimes=runtimes)
    reader = _reader(job)
    assert reader is not None
    made = reader(replace(job, configs=configs))
    unknown = grouped((where, text) for (where, _), text in configs.unknown.items())
    counts = Counter(map(_kind, others))
    objects = (kind if count == 1 else f"{count} {kind} objects" for kind, count in counts.items())
    return replace(
        made,
        ignored=tuple(dict.fromkeys((*configs.ignored, *objects))),
        odd=(
            *made.odd,
            *(f"{where}: unknown fields are ignored: {', '.join(texts)}" for where, texts in unknown.items()),
        ),
    )


def _kind(document: Field) -> str:
    return document.get("kind").text()


def _reader(document: Field) -> Callable[[Field], Workload] | None:
    """What reads this document, None when it is no job."""
    kind, version = _kind(document), document.get("apiVersion").text()
    return KINDS.get((kind, version)) or KINDS.get((kind, version.partition("/")[0]))


def tell_ignored(workload: Workload) -> None:
    """Say once what of the job this machine leaves out, and what is odd about it."""
    for sentence in workload.odd:
        _log.warning("%s", sentence)
    if workload.ignored:
        _log.warning("ignored here: %s", ", ".join(workload.ignored))


# -- another size: --nodes, --nproc-per-node, and a job that is scaled while it runs -----------


def overridden(
    documents: tuple[Field, ...], nodes: NodeRange | None = None, nproc: str | None = None
) -> tuple[Field, ...]:
    """The same documents, with other numbers in the job among them.

    Raises:
        UsageError: a number does not apply to this job.
    """
    if nproc is not None:
        if workload_of(_with_nproc(documents, "1")) == workload_of(_with_nproc(documents, "2")):
            kind = next((_kind(document) for document in documents if _reader(document)), "job")
            raise UsageError(f"--nproc-per-node does not apply to this {kind}: its pods get no number of workers")
        documents = _with_nproc(documents, nproc)
    if nodes is None:
        return documents
    return tuple(_with_nodes(document, nodes) if _reader(document) else document for document in documents)


def _with_nproc(documents: tuple[Field, ...], nproc: str) -> tuple[Field, ...]:
    return tuple(_of_nproc(document, nproc) if _reader(document) else document for document in documents)


def _of_nproc(job: Field, nproc: str) -> Field:
    """The job with that many workers per node. Raises UsageError: its kind has no such number."""
    kind = _kind(job)
    if kind not in _NPROC:
        raise UsageError(f"--nproc-per-node does not apply to a {kind}: it has no number of workers per node")
    number = int(nproc) if nproc.isdigit() else nproc
    old = ("spec", "elasticPolicy", "nProcPerNode")
    if job.get(*old).given:
        return job.changed(old, number)
    return job.changed(_NPROC[kind], nproc if kind == "PyTorchJob" else number)


def _with_nodes(job: Field, nodes: NodeRange) -> Field:
    """The job with that many nodes; of an elastic job a single number only widens the range.

    Raises:
        UsageError: its kind has other pods too, or it is not elastic and a range is given.
    """
    kind, policy = _kind(job), job.get("spec", "elasticPolicy")
    if policy.given:
        low, high = nodes.min, nodes.max
        if nodes.fixed is not None:
            low = min(low, policy.get("minReplicas").number(low))
            high = max(high, policy.get("maxReplicas").number(high))
        job = job.changed(("spec", "elasticPolicy", "minReplicas"), low)
        job = job.changed(("spec", "elasticPolicy", "maxReplicas"), high)
    elif nodes.fixed is None:
        raise UsageError(f"--nodes {nodes} needs an elastic job; this {kind} has no elasticPolicy")
    if kind in ("JobSet", "Job"):
        raise UsageError(
            f"--nodes does not apply to a {kind}, whose pods are not told how many they are; "
            "change parallelism and completions in the manifest, and the number that its command or variables have"
        )
    if kind == "TrainJob":
        return job.changed(("spec", "trainer", "numNodes"), nodes.max)
    replicas = _replicas(job)
    is_node = (*_NODES, *((_LAUNCHER,) if job.get("spec", "runLauncherAsWorker").flag() else ()))
    others = [place[2] for place in replicas if place[2].lower() not in (*is_node, _LAUNCHER)]
    if others:
        raise UsageError(
            f"--nodes does not apply to a job with {' and '.join(others)}; change replicas in the manifest"
        )
    rest = sum(n for place, n in replicas.items() if place[2].lower() in is_node and place[2].lower() != _WORKER)
    place = _workers(job)
    if place is None and nodes.max != rest:
        raise UsageError(f"--nodes {nodes} needs Worker replicas, which the job does not have")
    if nodes.max < rest:
        raise UsageError(f"--nodes {nodes} is less than the job's pods without its Worker replicas")
    return job if place is None else job.changed(place, nodes.max - rest)


def _replicas(job: Field) -> dict[tuple[str, ...], int]:
    """Where each number of replicas stands, and how many they are; none in kinds without replica specs."""
    spec = job.get("spec") if isinstance(job.get("spec").value, dict) else Field(None, "", job.where)
    return {
        ("spec", name, role, "replicas"): inner.get("replicas").number(1)
        for name, specs in spec.fields()
        if name.endswith("ReplicaSpecs")
        for role, inner in specs.fields()
        if inner.given
    }


def _workers(job: Field) -> tuple[str, ...] | None:
    return next((place for place in _replicas(job) if place[2].lower() == _WORKER), None)


def check_typed(workload: Workload, option: str) -> None:
    """See that no command has the option itself, which would take precedence. Raises UsageError: one has."""
    for draft in workload.drafts:
        container = draft.template.container(draft.main)
        words = (*container.command, *container.args) if container else ()
        text = " ".join(words).replace("_", "-")
        if any(word.partition("=")[0] == option for word in text.split()):
            raise UsageError(
                f"the command of container {draft.main} of {draft.hostname} has its own {option}; "
                "change it there, or run another one with --command"
            )


def scaled(documents: tuple[Field, ...], more: int) -> tuple[Field, ...]:
    """The same documents, the job among them with that many more workers.

    Raises:
        UsageError: it is of a kind whose number of pods is fixed once it runs, or has no workers.
    """
    job = next((document for document in documents if _reader(document) and _workers(document)), None)
    if job is None or (place := _workers(job)) is None:
        raise UsageError(
            "this job cannot grow: adding a node needs Worker replicas (an elastic PyTorchJob, an MPIJob, ...); "
            "the number of nodes of a running TrainJob is fixed"
        )
    changed = job.changed(place, _replicas(job)[place] + more)
    return tuple(changed if document is job else document for document in documents)


# -- --render ----------------------------------------------------------------------------------


def render(workload: Workload, folder: str) -> str:
    """Write a snapshot of each container of each pod; return what to print.

    Raises:
        UsageError: the folder cannot be written, or holds something already.
    """
    made = rendered(pods(workload))
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise UsageError(f"--render {folder} is not empty; expected a new directory")
        for name, snapshot in made.items():
            (place / name).write_text(json.dumps(snapshot, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"--render {folder} cannot be written: {problem.strerror}") from None
    listed = "".join(f"  {place / name}\n" for name in made)
    count = len(workload.drafts)
    return (
        f"{workload.kind} {workload.name}: {counted(count, 'pod')}, written to\n{listed}"
        f"Read one with: trainer-launch explain --pod {place / next(iter(made))}\n"
    )


def rendered(pods: tuple[Pod, ...]) -> dict[str, Json]:
    """File name -> content: `<pod>.json` for the container that counts, `<pod>.<container>.json` for others."""
    return {
        f"{pod.name}.json" if container is pod.main else f"{pod.name}.{container.name}.json": snapshot_of(
            pod, container
        )
        for pod in pods
        for container in (*pod.init, *pod.containers)
    }


def snapshot_of(pod: Pod, container: Container) -> dict[str, Json]:
    """What one container sees; without keys, and what the platform writes itself."""
    return {
        "env": dict(container.env),
        "files": {path: file.text for path, file in container.files.items()},
        "hostname": pod.name,
        "namespace": pod.namespace,
        "command": list(container.command),
        "args": list(container.args),
        "pod": {
            "role": pod.draft.role,
            "container": container.name,
            "init": container in pod.init,
            "restart_policy": pod.draft.restart,
            "labels": {**pod.draft.template.labels, **pod.draft.labels},
            "modes": {path: f"{file.mode:04o}" for path, file in container.files.items()},
        },
    }
