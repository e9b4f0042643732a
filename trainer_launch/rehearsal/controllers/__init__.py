"""A job's manifest to the pods that its controller would make: variables, files, containers, rules.

Each kind is a module with `read(request) -> Workload`; KINDS lists them by kind and version.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainer_launch.model import Json, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import REDACTED
from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.documents import (
    CONFIG_KINDS,
    MAX_BYTES,
    Field,
    Request,
    read_configs,
    read_documents,
)
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, Workload, pods
from trainer_launch.rehearsal.controllers.v1 import namespace

# kind and API group with version -> module; of a kind that is in one group only, the version does not matter
KINDS = {
    ("TrainJob", "trainer.kubeflow.org"): "trainer_v2",
    ("PyTorchJob", "kubeflow.org"): "v1_pytorch",
    ("TFJob", "kubeflow.org"): "v1",
    ("XGBoostJob", "kubeflow.org"): "v1",
    ("PaddleJob", "kubeflow.org"): "v1",
    ("JAXJob", "kubeflow.org"): "v1",
    ("MXJob", "kubeflow.org"): "v1",
    ("MPIJob", "kubeflow.org/v1"): "v1",
    ("MPIJob", "kubeflow.org/v2beta1"): "mpi_operator",
    ("JobSet", "jobset.x-k8s.io"): "plain_jobs",
    ("Job", "batch"): "plain_jobs",
}
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


def workload_of(documents: tuple[Field, ...]) -> Workload:
    """The one job among these documents, with the runtimes beside it.

    Raises:
        UsageError: there is no job, or more than one, or something in it does not fit.
    """
    jobs = [found for found in documents if _module(found) is not None]
    jobs = [
        found for found in jobs if _kind(found) != "Job"
    ] or jobs  # beside another job it has to do something else
    runtimes = {found.get("metadata", "name").text(): found for found in documents if _kind(found) in RUNTIMES}
    known = (*RUNTIMES, *CONFIG_KINDS)
    others = [found for found in documents if found not in jobs and _kind(found) not in known]
    if len(jobs) != 1:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in KINDS))
        seen = ", ".join(dict.fromkeys(map(_kind, jobs or documents)))
        count = "no job" if not jobs else f"{len(jobs)} jobs"
        raise UsageError(f"the manifests hold {count} ({seen}); expected one of: {kinds}")
    given = (found for found in documents if _kind(found) in CONFIG_KINDS)
    configs = read_configs(given, namespace(jobs[0]))
    job = replace(jobs[0], configs=configs)
    runtimes = {name: replace(found, configs=configs) for name, found in runtimes.items()}
    module = import_module(f"trainer_launch.rehearsal.controllers.{_module(job)}")
    made: Workload = module.read(Request(job=job, runtimes=runtimes))
    _check_variables(made)
    ignored = dict.fromkeys((*made.ignored, *configs.absent, *_counted(others)))
    return replace(made, ignored=tuple(ignored))


def overridden(
    documents: tuple[Field, ...], nodes: NodeRange | None = None, nproc: str | None = None
) -> tuple[Field, ...]:
    """The same documents, with other numbers in the job among them.

    Raises:
        UsageError: a number does not apply to this job.
    """
    if nproc is not None and workload_of(_with_nproc(documents, "1")) == workload_of(_with_nproc(documents, "2")):
        kind = next((_kind(found) for found in documents if _module(found) is not None), "job")
        raise UsageError(f"--nproc-per-node does not apply to this {kind}: its pods get no number of workers")
    if nodes is not None:
        documents = tuple(with_nodes(one, nodes) if _module(one) else one for one in documents)
    return documents if nproc is None else _with_nproc(documents, nproc)


def _with_nproc(documents: tuple[Field, ...], nproc: str) -> tuple[Field, ...]:
    return tuple(with_nproc(one, nproc) if _module(one) else one for one in documents)


def _check_variables(made: Workload) -> None:
    for draft in made.drafts:
        for container in (*draft.template.init, *draft.template.containers):
            for item in container.items:
                if item.problem:
                    raise UsageError(item.problem)


def _counted(others: list[Field]) -> Iterator[str]:
    counts = Counter(map(_kind, others))
    return (kind if count == 1 else f"{count} {kind} objects" for kind, count in counts.items())


def _kind(found: Field) -> str:
    return found.get("kind").text()


def _module(found: Field) -> str | None:
    """The module that reads this document, None when it is no job."""
    kind, version = _kind(found), found.get("apiVersion").text()
    group = version.partition("/")[0]
    return KINDS.get((kind, version)) or KINDS.get((kind, group))


# -- another size: --nodes, --nproc-per-node, and a node that is added while the job runs ------


_WORKER, _LAUNCHER = "worker", "launcher"
_NODES = ("master", "chief", _WORKER)  # replica types each of whose pods is a node
_NPROC = {
    "TrainJob": ("spec", "trainer", "numProcPerNode"),
    "PyTorchJob": ("spec", "nprocPerNode"),
    "MPIJob": ("spec", "slotsPerWorker"),
}


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


def with_nproc(found: Field, nproc: str) -> Field:
    """The job with that many workers per node. Raises UsageError: its kind has no such number."""
    kind = found.get("kind").text()
    if kind not in _NPROC:
        raise UsageError(f"--nproc-per-node does not apply to a {kind}: it has no number of workers per node")
    value: Any = int(nproc) if nproc.isdigit() and kind != "PyTorchJob" else nproc
    if found.get("spec", "elasticPolicy", "nProcPerNode").given:
        return with_value(
            found, ("spec", "elasticPolicy", "nProcPerNode"), int(nproc) if nproc.isdigit() else nproc
        )
    return with_value(found, _NPROC[kind], value)


def with_nodes(found: Field, nodes: NodeRange) -> Field:
    """The job with that many nodes.

    Raises:
        UsageError: its kind has other pods too, or it is not elastic and a range is given.
    """
    if found.get("spec", "elasticPolicy").given:
        found = _in_range(found, nodes)
    elif nodes.fixed is None:
        raise UsageError(
            f"--nodes {nodes} needs an elastic job; this {found.get('kind').text()} has no elasticPolicy"
        )
    kind = found.get("kind").text()
    if kind in ("JobSet", "Job"):
        raise UsageError(
            f"--nodes does not apply to a {kind}, whose pods are not told how many they are; "
            "change parallelism and completions in the manifest, and the number that its command or variables have"
        )
    if kind == "TrainJob":
        return with_value(found, ("spec", "trainer", "numNodes"), nodes.max)
    return _with_workers(found, nodes.max)


def _in_range(found: Field, nodes: NodeRange) -> Field:
    """An elastic job whose range holds these numbers; a single number only widens it."""
    policy = found.get("spec", "elasticPolicy")
    low, high = nodes.min, nodes.max
    if nodes.fixed is not None:
        low = min(low, policy.get("minReplicas").number(low))
        high = max(high, policy.get("maxReplicas").number(high))
    found = with_value(found, ("spec", "elasticPolicy", "minReplicas"), low)
    return with_value(found, ("spec", "elasticPolicy", "maxReplicas"), high)


def _with_workers(found: Field, nodes: int) -> Field:
    name = next((name for name, _ in found.get("spec").fields() if name.endswith("ReplicaSpecs")), "")
    given = {role: spec for role, spec in found.get("spec", name).fields() if spec.given}
    nodes_too = (*_NODES, *((_LAUNCHER,) if found.get("spec", "runLauncherAsWorker").flag() else ()))
    others = [role for role in given if role.lower() not in (*nodes_too, _LAUNCHER)]
    if others:
        raise UsageError(
            f"--nodes does not apply to a job with {' and '.join(others)}; change replicas in the manifest"
        )
    counts = {role: spec.get("replicas").number(1) for role, spec in given.items() if role.lower() in nodes_too}
    worker = next((role for role in counts if role.lower() == _WORKER), None)
    workers = nodes - sum(count for role, count in counts.items() if role != worker)
    if worker is None:
        if workers:
            raise UsageError(f"--nodes {nodes} needs Worker replicas, which the job does not have")
        return found
    if workers < 0:
        raise UsageError(f"--nodes {nodes} is less than the job's pods without its Worker replicas")
    return with_value(found, ("spec", name, worker, "replicas"), workers)


# -- scaled up while it runs -------------------------------------------------------------------


def scaled(documents: tuple[Field, ...], more: int) -> tuple[Field, ...]:
    """The same documents, the job among them with that many more workers.

    Raises:
        UsageError: it is of a kind whose number of pods is fixed once it runs, or has no workers.
    """
    changed = tuple(_scaled(found, more) for found in documents)
    if not any(new is not old for new, old in zip(changed, documents, strict=True)):
        raise UsageError(
            "this job cannot grow: adding a node needs Worker replicas (an elastic PyTorchJob, an MPIJob, ...); "
            "the number of nodes of a running TrainJob is fixed"
        )
    return changed


def _scaled(found: Field, more: int) -> Field:
    for name, specs in found.get("spec").fields() if isinstance(found.get("spec").value, dict) else []:
        if not name.endswith("ReplicaSpecs"):
            continue
        for role, spec in specs.fields():
            if role.lower() == _WORKER and spec.given:
                count = spec.get("replicas").number(1) + more
                return with_value(found, ("spec", name, role, "replicas"), count)
    return found


def with_value(found: Field, keys: tuple[str, ...], value: Any) -> Field:
    """The document with another value at this place; nothing of the first one changes."""
    whole: dict[str, Any] = dict(found.mapping())
    inner = whole
    for number, key in enumerate(keys[:-1]):
        inner[key] = dict(found.get(*keys[: number + 1]).mapping())
        inner = inner[key]
    inner[keys[-1]] = value
    return replace(found, value=whole)


# -- manifests from files, and --render --------------------------------------------------------


MAX_FILES = 16
_log = logging.getLogger(__name__)


def read(paths: Sequence[str]) -> tuple[Field, ...]:
    """What these files hold: a job, with all that it refers to.

    Raises:
        UsageError: a file cannot be read, or what is in it does not fit.
    """
    if len(paths) > MAX_FILES:
        raise UsageError(f"-f is given {len(paths)} times; expected at most {MAX_FILES} files")
    documents: list[Field] = []
    for path in paths:
        documents += read_documents(text_of(path, "-f"), path)
    return tuple(documents)


def tell_ignored(workload: Workload) -> None:
    """Say once what of the job this machine leaves out, and what is odd about it."""
    for sentence in workload.odd:
        _log.warning("%s", sentence)
    if workload.ignored:
        _log.warning("ignored here: %s", ", ".join(workload.ignored))


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


# -- snapshots ---------------------------------------------------------------------------------


def rendered(pods: tuple[Pod, ...]) -> dict[str, Json]:
    """File name -> content: `<pod>.json` for the container that counts, `<pod>.<container>.json` for others."""
    made: dict[str, Json] = {}
    for pod in pods:
        for container in (*pod.init, *pod.containers):
            is_main = container is pod.main
            made[f"{pod.name}.json" if is_main else f"{pod.name}.{container.name}.json"] = snapshot_of(
                pod, container
            )
    return made


def snapshot_of(pod: Pod, container: Container) -> dict[str, Json]:
    """What one container sees; without keys, Secrets, and what the platform writes itself."""

    def shown(text: str) -> str:
        return REDACTED if text in container.hidden else text

    return {
        "env": {name: shown(value) for name, value in container.env.items()},
        "files": {path: REDACTED if file.is_secret else file.text for path, file in container.files.items()},
        "hostname": pod.name,
        "namespace": pod.namespace,
        "command": [shown(word) for word in container.command],
        "args": [shown(word) for word in container.args],
        "pod": _about(pod, container),
    }


def _about(pod: Pod, container: Container) -> Mapping[str, Json]:
    draft = pod.draft
    return {
        "role": draft.role,
        "container": container.name,
        "init": container in pod.init,
        "restart_policy": draft.restart,
        "labels": {**draft.template.labels, **draft.labels},
        "modes": {path: f"{file.mode:04o}" for path, file in container.files.items()},
    }
