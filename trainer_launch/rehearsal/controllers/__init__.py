"""A job's manifest to the pods that its controller would make, and to files for `explain`.

KINDS lists the function that reads each kind.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.contracts import v1_table
from trainer_launch.model import Json, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.units import counted
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import jobset, mpi_operator, trainer_v2, v1
from trainer_launch.rehearsal.controllers.documents import (
    CONFIG_KINDS,
    MAX_BYTES,
    RUNTIMES,
    Field,
    read_configs,
    read_documents,
)
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, Template, Workload, pods

# By kind: its API version, and the function that reads it. Of an MPIJob older versions are another operator's.
KINDS: Mapping[str, tuple[str, Callable[[Field], Workload]]] = {
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", trainer_v2.read),
    **dict.fromkeys(v1_table.KINDS, ("kubeflow.org/v1", v1.read)),
    "MPIJob": ("kubeflow.org/v2beta1", mpi_operator.read),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", jobset.read),
    "Job": ("batch/v1", jobset.read),
}
_NAME_CHARS = 63  # of a host name, and of a Service's
_WORKER, _LAUNCHER = "worker", "launcher"
_NODES = ("master", "chief", _WORKER)  # replica types each of whose pods is a node
_STARTERS = (_LAUNCHER, *_NODES[:2], jobset.NODE, _WORKER)  # roles of pods that start ranks, node 0 first
NPROC_OPTION = "--nproc-per-node"
_TYPED = r"(?<![\w-])({name}(?:=|\s+))[^\s;&|)]+"  # in a shell's text, or one word
_COUNTS = re.compile(r"(?<![\w-])(-np|--num[-_]processes|--num[-_]gpus)[=\s]+\d+")  # of ranks, as others call it
_SSHD = re.compile(r"(?<![\w.-])sshd(?![\w.-])")  # not .sshd_config, an argument
_NPROC = {
    "TrainJob": ("spec", "trainer", "numProcPerNode"),
    "PyTorchJob": ("spec", "nprocPerNode"),
    "MPIJob": ("spec", "slotsPerWorker"),
}
_log = logging.getLogger(__name__)


def read(paths: Sequence[str]) -> tuple[Field, ...]:
    """The documents of these files: a job, with all that it refers to.

    Raises:
        UsageError: a file cannot be read, or what is in it does not fit.
    """
    return tuple(document for path in paths for document in read_documents(_text_of(path), path))


def _text_of(path: str) -> str:
    """The text of a file, up to a little more than it may have. Raises UsageError: it cannot be read."""
    try:
        with Path("/dev/stdin" if path == "-" else path).open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as problem:
        raise UsageError(f"-f {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"-f {path} is not a UTF-8 text file") from None


def workload_of(documents: tuple[Field, ...], *, shows_secrets: bool = True) -> Workload:
    """The job among these documents, with the runtimes, ConfigMaps and Secrets beside it.

    Raises:
        UsageError: there is no job, or more than one, or something in it does not fit.
    """
    job, kinds = _job(documents), (*RUNTIMES, *CONFIG_KINDS)
    others = [document for document in documents if document is not job and _kind(document) not in kinds]
    given_configs = (document for document in documents if _kind(document) in CONFIG_KINDS)
    configs = read_configs(given_configs, v1.namespace(job), shows_secrets=shows_secrets)
    configs = replace(configs, runtimes=tuple(each for each in documents if _kind(each) in RUNTIMES))
    made = KINDS[_kind(job)][1](replace(job, configs=configs))
    if not made.drafts:
        places = ", ".join(".".join(place) for place in _replicas(job))
        raise UsageError(f"{job.where}: the job has no pods; expected 1 or more in {places}")
    counts = Counter(map(_kind, others))
    objects = (kind if count == 1 else f"{count} {kind} objects" for kind, count in counts.items())
    return replace(
        made,
        ignored=tuple(dict.fromkeys((*configs.ignored, *objects))),
        odd=(*made.odd, *_refused_names(made), *_without_sshd(made)),
    )


def _refused_names(made: Workload) -> Iterator[str]:
    """Sentences about names of pods that a cluster refuses: they are too long, or have capital letters."""
    behind = "-xxxxx" if made.kind in ("JobSet", "TrainJob") else ""  # JobSet counts a Job's random part as well
    longest = max((f"{draft.hostname}{behind}" for draft in made.drafts), key=len)
    if len(longest) > _NAME_CHARS:
        yield (
            f"a cluster refuses the job: {longest} has {len(longest)} characters, "
            f"and a pod's name at most {_NAME_CHARS}; shorten the names that it is made of"
        )
    for name in [draft.hostname for draft in made.drafts if draft.hostname != draft.hostname.lower()][:1]:
        yield f"a cluster refuses the job: {name} has capital letters; write its names without"


def _without_sshd(made: Workload) -> Iterator[str]:
    """Pods of MPI that only serve, and whose command no longer names sshd."""
    for draft in {draft.role: draft for draft in reversed(made.drafts)}.values():
        container = draft.template.container(draft.main)
        words = () if container is None else (*container.command, *container.args)
        if container is None or not container.serves_ssh or not words or _SSHD.search(" ".join(words)):
            continue
        advice = "remove the command of the Worker replicas"
        if made.kind == "TrainJob":
            label = f"the label {trainer_v2.ANCESTOR} of the replicatedJob {draft.role}"
            advice = f"remove spec.trainer.command or {label}, or the patch that sets the command"
        yield (
            f"{draft.hostname} runs {shown(' '.join(words))} in place of sshd. Unless that program starts sshd, "
            f"the launcher cannot reach this pod; {advice}"
        )


def _job(documents: tuple[Field, ...]) -> Field:
    """The job that is rehearsed; a Job beside another job has something else to do."""
    jobs = [document for document in documents if _is_job(document)]
    jobs = [job for job in jobs if _kind(job) != "Job"] or jobs
    if len(jobs) == 1:
        return jobs[0]
    near = next((document for document in documents if _kind(document) in KINDS), None)
    if near is not None and not jobs:
        kind, version = _kind(near), near.get("apiVersion").text()
        raise UsageError(f"{near.where}: {kind} of {version} is not rehearsed; write it as {KINDS[kind][0]}")
    if jobs:
        places = "; ".join(job.where for job in jobs)
        raise UsageError(f"the manifests hold {len(jobs)} jobs, and one is rehearsed at a time: {places}")
    given = ", ".join(dict.fromkeys(map(_kind, documents)))
    raise UsageError(f"the manifests hold no job ({given}); expected one of: {', '.join(KINDS)}")


def _kind(document: Field) -> str:
    return document.get("kind").text()


def _is_job(document: Field) -> bool:
    """Whether the document's kind is read: of an MPIJob this version, of the others every version of the group."""
    kind, version = _kind(document), document.get("apiVersion").text()
    wanted = KINDS[kind][0] if kind in KINDS else ""
    return version == wanted if kind == "MPIJob" else version.partition("/")[0] == wanted.partition("/")[0] != ""


def warn_of_ignored(workload: Workload) -> None:
    """Log once the fields that have no effect on this machine, and what is odd about the job."""
    for sentence in workload.odd:
        _log.warning("%s", sentence)
    if workload.ignored:
        _log.warning("ignored here: %s", ", ".join(workload.ignored))


def overridden(
    documents: tuple[Field, ...], nodes: NodeRange | None = None, nproc: str | None = None
) -> tuple[Field, ...]:
    """The same documents, with other numbers in the job among them.

    Raises:
        UsageError: a number does not apply to this job.
    """
    job = _job(documents)
    if nproc is not None:
        first, second = (workload_of(_with_job(documents, _with_nproc(job, number))) for number in "12")
        if retyped(first, NPROC_OPTION, "1") == retyped(second, NPROC_OPTION, "2"):
            raise UsageError(
                f"--nproc-per-node does not apply to this {_kind(job)}: its pods get no number of workers"
            )
        job = _with_nproc(job, nproc)
    return _with_job(documents, job if nodes is None else _with_nodes(job, nodes))


def _with_job(documents: tuple[Field, ...], job: Field) -> tuple[Field, ...]:
    """The same documents with another version of the job."""
    old = _job(documents)
    return tuple(job if document is old else document for document in documents)


def _with_nproc(job: Field, nproc: str) -> Field:
    """The job with that many workers per node, where its kind has such a number."""
    kind, number = _kind(job), int(nproc) if nproc.isdigit() else nproc
    old = ("spec", "elasticPolicy", "nProcPerNode")
    if kind in _NPROC and job.get(*old).given:
        return job.changed(old, number)
    return job.changed(_NPROC[kind], nproc if kind == "PyTorchJob" else number) if kind in _NPROC else job


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
            f"--nodes does not apply to a {kind}: its pods get no number of nodes; "
            "change parallelism and completions in the manifest, and the number that its command or variables have"
        )
    if kind == "TrainJob":
        return job.changed(("spec", "trainer", "numNodes"), nodes.max)
    replicas = {place[2].lower(): (place, count) for place, count in _replicas(job).items()}
    starts_only = _LAUNCHER in replicas and not job.get("spec", "runLauncherAsWorker").flag()
    place, _ = replicas.pop(_WORKER, (None, 0))
    rest = sum(count for _, count in replicas.values()) - starts_only
    if place is None or nodes.max < rest or not replicas.keys() <= {*_NODES, _LAUNCHER}:
        given = " and ".join(replicas)
        raise UsageError(f"--nodes {nodes} does not apply to a job with {given}; change replicas in the manifest")
    return job.changed(place, nodes.max - rest)


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


def retyped(workload: Workload, option: str, value: str) -> Workload:
    """The same job, whose commands have this value for an option that they have themselves."""
    name = option.replace("-", "[-_]")
    pattern = re.compile(_TYPED.format(name=name))

    def changed(container: Container) -> Container:
        words = [*container.command, *container.args]
        for at, word in enumerate(words):
            is_value = at and re.fullmatch(name, words[at - 1])
            words[at] = value if is_value else pattern.sub(lambda typed: typed[1] + value, word)
        count = len(container.command)
        return replace(container, command=tuple(words[:count]), args=tuple(words[count:]))

    return _with_templates(
        workload, lambda template: replace(template, containers=tuple(map(changed, template.containers)))
    )


def _with_templates(workload: Workload, change: Callable[[Template], Template]) -> Workload:
    drafts = tuple(replace(draft, template=change(draft.template)) for draft in workload.drafts)
    return replace(workload, drafts=drafts)


def other_counts(workload: Workload) -> str:
    """A sentence about a number of ranks in a command that --nproc-per-node does not change; "": there is none."""
    for draft in workload.drafts:
        container = draft.template.container(draft.main)
        count = _COUNTS.search(" ".join((*container.command, *container.args))) if container else None
        if count is not None:
            where = f"{count[0]!r} in the command of container {draft.main}"
            return (
                f"--nproc-per-node does not change {where}; change it there, or run another command with --command"
            )
    return ""


def without_init(workload: Workload, names: Sequence[str]) -> Workload:
    """The same job without these init containers. Raises UsageError: the job has no init container of a name."""
    there = dict.fromkeys(each.name for draft in workload.drafts for each in draft.template.init)
    for name in names:
        if name not in there:
            hint = did_you_mean(name, tuple(there)) or f"the job has {', '.join(there) or 'none'}"
            raise UsageError(f"--skip-init {shown(name)}: there is no such init container; {hint}")

    def skipped(template: Template) -> Template:
        init = tuple(replace(each, platforms=each.platforms or each.name in names) for each in template.init)
        return replace(template, init=init)

    return _with_templates(workload, skipped)


def render(workload: Workload, folder: str) -> str:
    """Write a snapshot of each container of each pod; return what to print.

    Raises:
        UsageError: the folder cannot be written, or holds something already.
    """
    there = pods(workload)
    sizes = Counter(pod.draft.role for pod in there)
    # A launcher's plan is best seen in the pod that starts the ranks, else in node 0.
    plain = min(there, key=lambda pod: ([*_STARTERS, pod.draft.role].index(pod.draft.role), -sizes[pod.draft.role]))
    made, place = rendered(there), Path(folder)
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
        f"Read one with: trainer-launch explain --pod {place / plain.name}.json\n"
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
    """A snapshot of a container, for `explain --pod`; without keys, and what the platform writes itself."""
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
            "stop_signal": container.stop_signal,
            "labels": {**pod.draft.template.labels, **pod.draft.labels},
            "modes": {path: f"{file.mode:04o}" for path, file in container.files.items()},
        },
    }
