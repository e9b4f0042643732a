"""A TrainJob over its runtime: replicatedJobs, their numbers of pods and templates, the JobSet's rules.

kubeflow/trainer pkg/runtime/core/trainingruntime.go and pkg/runtime/framework/plugins/jobset/builder.go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import (
    ChildRules,
    Container,
    Draft,
    EnvItem,
    ExitRule,
    Rules,
    SetRule,
    Success,
    Template,
    env_items,
    upserted,
)
from trainer_launch.rehearsal.controllers.podspec import (
    left_out,
    of_env_from,
    quantities,
    read_env,
    read_template,
)
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS, job_name, namespace

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
NODE = "node"
LAUNCHER = "launcher"
TRAINER = "trainer"
INITIALIZERS = ("dataset-initializer", "model-initializer")
POLICIES = ("torch", "mpi", "jax", "xgboost", "flux")
_TRAINJOB = (
    "runtimeRef", "initializer", "trainer", "labels", "annotations", "podTemplateOverrides", "podSpecOverrides",
    "runtimePatches", "suspend", "managedBy", "activeDeadlineSeconds", "ttlSecondsAfterFinished",
)  # fmt: skip
_TRAINER = ("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode")
_RUNTIME = ("mlPolicy", "podGroupPolicy", "template")
JOBSET = (
    "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
    "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies",
)  # fmt: skip
REPLICATED = ("name", "replicas", "template", "dependsOn", "groupName")
PUBLISHED = Path(__file__).with_name("runtimes.json")  # the manifests that Trainer is released with, by name


class ReplicatedJob(Struct, frozen=True, kw_only=True):
    """One replicatedJob: its template with the TrainJob's own wishes in it, and its number of pods."""

    name: str
    ancestor: str | None
    count: int  # pods of each of its Jobs
    replicas: int  # Jobs
    template: Template
    field: Field

    @property
    def is_trainer(self) -> bool:
        """Whether its pods are the TrainJob's nodes."""
        return self.ancestor == TRAINER


class TrainJob(Struct, frozen=True, kw_only=True):
    """A TrainJob and its runtime, read."""

    name: str
    space: str
    subdomain: str
    policy: str  # torch, mpi, jax, xgboost, flux, or "" for PlainML
    policy_field: Field
    trainer: Field  # spec.trainer
    jobset: Field
    jobs: tuple[ReplicatedJob, ...]
    has_pod_group: bool = False  # gang scheduling is asked for
    job: Field

    @property
    def main(self) -> ReplicatedJob | None:
        """The replicatedJob that is the trainer."""
        return next((job for job in self.jobs if job.is_trainer), None)

    @property
    def node_0(self) -> str:
        """The address that controllers write for the first node, whatever the subdomain is."""
        return f"{self.name}-{NODE}-0-0.{self.name}"


def read_trainjob(request: Request) -> TrainJob:
    """The TrainJob, merged with its runtime."""
    found = request.job
    spec = found.get("spec")
    spec.only(_TRAINJOB)
    spec.get("trainer").only(_TRAINER)
    runtime = _runtime(found, request)
    runtime.get("spec").only(_RUNTIME)
    policies = runtime.get("spec", "mlPolicy")
    policies.only(("numNodes", *POLICIES))
    policy = next((name for name in POLICIES if policies.get(name).given), "")
    jobset = runtime.get("spec", "template", "spec")
    jobset.only(JOBSET)
    default = policies.get("numNodes").number(1, least=1, most=MAX_REPLICAS)
    # The MPI plugin gives the TrainJob's own number to the replicatedJob called node, and to no other.
    nodes = default if policy == "mpi" else _nodes(spec.get("trainer"), default)
    jobs = tuple(
        _replicated(with_volumes(_patched(job, spec), jobset, job_name(found)), nodes)
        for job in jobset.get("replicatedJobs").items()
    )
    if not jobs:
        raise jobset.get("replicatedJobs").bad("at least one replicatedJob")
    made = TrainJob(
        name=job_name(found),
        space=namespace(found),
        subdomain=jobset.get("network", "subdomain").name("") or job_name(found),
        policy=policy,
        policy_field=policies.get(policy) if policy else Field(None, policies.path, policies.where),
        trainer=spec.get("trainer"),
        jobset=jobset,
        jobs=jobs,
        has_pod_group=runtime.get("spec", "podGroupPolicy").given,
        job=found,
    )
    return replace(made, jobs=tuple(_wished(job, made) for job in jobs))


def _runtime(found: Field, request: Request) -> Field:
    reference = found.get("spec", "runtimeRef", "name")
    name = reference.text()
    if name in request.runtimes:
        version = request.runtimes[name].get("apiVersion")
        if not version.text().startswith("trainer.kubeflow.org/"):
            raise version.bad("trainer.kubeflow.org/v1alpha1, as the TrainJob has it")
        return request.runtimes[name]
    known = published()
    if name in known:
        return Field({"spec": known[name]}, "", f"the published runtime {name}", found.configs)
    has = ", ".join(request.runtimes) or "none"
    raise reference.bad(
        f"a runtime from one of the files (found: {has}), or one that Trainer is released with "
        f"({', '.join(known)}); add its file with another -f"
    )


@cache
def published() -> Mapping[str, Any]:
    """The specs of the runtimes that Trainer is released with, by name."""
    specs: Mapping[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))["specs"]
    return specs


def _nodes(trainer: Field, default: int) -> int:
    return trainer.get("numNodes").number(default, least=1, most=MAX_REPLICAS)


# -- what overrides a template ----------------------------------------------------------------


def _patched(job: Field, spec: Field) -> Field:
    """A replicatedJob with the TrainJob's patches, of all versions, over its template."""
    name, value = job.get("name").text(), job.value
    for patch in spec.get("runtimePatches").items():
        for over in patch.get("trainingRuntimeSpec", "template", "spec", "replicatedJobs").items():
            if over.get("name").text() == name and over.get("template").given:
                value = {**value, "template": merged(value.get("template"), over.get("template").value)}
    for key in ("podTemplateOverrides", "podSpecOverrides"):
        for over in spec.get(key).items():
            if name in [target.get("name").text() for target in over.get("targetJobs").items()]:
                value = _override(value, over)
    return replace(job, value=value)


def _claims(jobset: Field, job: str) -> dict[str, str]:
    """The claims that JobSet makes for all pods of this job: name of the volume -> name of the claim."""
    templates = (
        one for policy in jobset.get("volumeClaimPolicies").items() for one in policy.get("templates").items()
    )
    names = (one.get("metadata", "name").text() for one in templates)
    return {name: f"{name}-{job}" for name in names}


def with_volumes(job: Field, jobset: Field, name: str) -> Field:
    """A replicatedJob with a volume for each claim of the JobSet `name` that one of its containers mounts."""
    claims = _claims(jobset, name)
    spec = job.get("template", "spec", "template", "spec")
    containers = (*spec.get("initContainers").items(), *spec.get("containers").items())
    mounts = (mount for container in containers for mount in container.get("volumeMounts").items())
    names = dict.fromkeys(name for mount in mounts if (name := mount.get("name").text()) in claims)
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claims[name]}} for name in names]
    if not volumes:
        return job
    patch = {"template": {"spec": {"template": {"spec": {"volumes": volumes}}}}}
    return replace(job, value=merged(job.value, patch))


def _override(job: dict[str, Any], over: Field) -> dict[str, Any]:
    """v2.0 has the fields of the pod beside targetJobs, v2.1 below spec."""
    patch = {key: value for key, value in over.mapping().items() if key != "targetJobs"}
    if "spec" not in patch:
        patch = {"spec": patch}
    made: dict[str, Any] = merged(job, {"template": {"spec": {"template": patch}}})
    return made


def _replicated(job: Field, nodes: int) -> ReplicatedJob:
    job.only(REPLICATED)
    labels = job.get("template", "metadata", "labels")
    ancestor = labels.get(ANCESTOR).text("") or None
    batch = job.get("template", "spec")
    count = batch.get("parallelism").number(1, least=1, most=MAX_REPLICAS)
    replicas = job.get("replicas").number(1, least=1, most=MAX_REPLICAS)
    if ancestor == TRAINER:
        count = nodes
    return ReplicatedJob(
        name=job.get("name").name(),
        ancestor=ancestor,
        count=count,
        replicas=1 if ancestor in (TRAINER, *INITIALIZERS) else replicas,
        template=read_template(batch.get("template")),
        field=job,
    )


# -- what the TrainJob wishes -----------------------------------------------------------------


def _wished(job: ReplicatedJob, made: TrainJob) -> ReplicatedJob:
    """The trainer's container gets the TrainJob's command, arguments, resources and variables."""
    if job.ancestor in INITIALIZERS:
        return _initializer(job, made.job.get("spec", "initializer", job.ancestor.partition("-")[0]))
    works = made.policy == "mpi" and made.policy_field.get("runLauncherAsNode").flag() and job.name == NODE
    if not made.trainer.given or not (job.is_trainer or works):
        return job

    def given(container: Container) -> Container:
        if container.name != NODE:
            return container
        changed = upserted(container, read_env(made.trainer.get("env")))
        if job.is_trainer and made.trainer.get("command").given:
            changed = replace(changed, command=made.trainer.get("command").texts())
        if job.is_trainer and made.trainer.get("args").given:
            changed = replace(changed, args=made.trainer.get("args").texts())
        return _with_resources(changed, made.trainer.get("resourcesPerNode"))

    return on_containers(job, given)


def _with_resources(container: Container, resources: Field) -> Container:
    """Since v2.3 resourcesPerNode is merged with the runtime's resources by name; earlier versions replace them."""
    limits, requests = quantities(resources.get("limits")), quantities(resources.get("requests"))
    return replace(
        container,
        limits=MappingProxyType({**container.limits, **limits}),
        requests=MappingProxyType({**container.requests, **requests}),
    )


def _initializer(job: ReplicatedJob, wish: Field) -> ReplicatedJob:
    uri = wish.get("storageUri").text("")
    items: tuple[EnvItem, ...] = (*(env_items({"STORAGE_URI": uri}) if uri else ()), *read_env(wish.get("env")))
    secret = [{"secretRef": wish.get("secretRef").value}] if wish.get("secretRef").given else []
    sources = tuple(of_env_from(replace(wish, value=secret)))

    def given(one: Container) -> Container:
        if one.name == job.ancestor:
            one = replace(upserted(one, items), sources=(*one.sources, *sources))
        return replace(one, platforms=not (one.command or one.args))  # its image's program, which is not here

    return on_containers(job, given)


def on_containers(
    job: ReplicatedJob, change: Callable[[Container], Container], *, init: bool = False
) -> ReplicatedJob:
    """The job with each main container, or also each init container, changed."""
    template = replace(job.template, containers=tuple(map(change, job.template.containers)))
    if init:
        template = replace(template, init=tuple(map(change, template.init)))
    return replace(job, template=template)


def resources_of(job: TrainJob) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Limits and requests by which the controller counts processes.

    These are the TrainJob's own resourcesPerNode, not merged with the runtime's; without them, those of the first
    replicatedJob that is called node or is the trainer.
    """
    wish = job.trainer.get("resourcesPerNode")
    if wish.given:
        return quantities(wish.get("limits")), quantities(wish.get("requests"))
    nodes = (one.template.container(NODE) for one in job.jobs if one.name == NODE or one.is_trainer)
    first = next((container for container in nodes if container is not None), None)
    return (first.limits, first.requests) if first else ({}, {})


# -- strategic merge ---------------------------------------------------------------------------


# The field by which members of a list of this name are the same thing; every other list is replaced as a whole.
_NAMED = ("containers", "initContainers", "ephemeralContainers", "env", "volumes", "imagePullSecrets")
_KEYS = {
    **dict.fromkeys(_NAMED, "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """`base` with `patch` over it; null removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        kept = {key: value for key, value in base.items() if key not in patch or patch[key] is not None}
        over = {key: merged(base.get(key), value, key) for key, value in patch.items() if value is not None}
        return {**kept, **over}
    if isinstance(base, list) and isinstance(patch, list) and name in _KEYS:
        return _lists(base, patch, _KEYS[name])
    return patch


def _lists(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    made = list(base)
    fresh = []
    for item in patch:
        at = next(
            (n for n, old in enumerate(made) if _of(old, key) is not None and _of(old, key) == _of(item, key)), None
        )
        if at is None:
            fresh.append(item)
        else:
            made[at] = merged(made[at], item)
    return [*fresh, *made]  # as Kubernetes has it: what is new comes first


def _of(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else None


# -- rules of a JobSet and its Jobs ------------------------------------------------------------


_BACKOFF = 6  # a Job's own default
_BOUNDLESS = 2**31 - 1
_ACTIONS = ("FailJob", "Ignore", "Count", "FailIndex")
_SET_ACTIONS = (
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)  # fmt: skip
_REASONS = (
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
)  # fmt: skip
_IN_PLACE = "InPlaceRestart"
_STRATEGIES = ("Recreate", "BlockingRecreate", _IN_PLACE)
_PATTERNS = "onJobFailureMessagePatterns"
_JOB = (
    "parallelism", "completions", "completionMode", "backoffLimit", "activeDeadlineSeconds", "podFailurePolicy",
    "template", "selector", "manualSelector",
)  # fmt: skip
JOB_IGNORED = (
    "ttlSecondsAfterFinished", "suspend", "successPolicy", "podReplacementPolicy", "managedBy",
    "backoffLimitPerIndex", "maxFailedIndexes",
)  # fmt: skip
_SET_IGNORED = ("suspend", "managedBy", "ttlSecondsAfterFinished")


def read(spec: Field, drafts: tuple[Draft, ...], children: dict[str, ChildRules], deadline: Field) -> Rules:
    """The rules of a JobSet with these pods; `deadline` is that of whoever made the JobSet."""
    names = tuple(dict.fromkeys(draft.role for draft in drafts))
    success, failure = spec.get("successPolicy"), spec.get("failurePolicy")
    success.only(("operator", "targetReplicatedJobs"))
    failure.only(("maxRestarts", "rules", "restartStrategy"))
    strategy = failure.get("restartStrategy").choice(_STRATEGIES, "Recreate")
    chosen = [one.choice(names) for one in success.get("targetReplicatedJobs").items()] or names
    targets = dict.fromkeys(draft.child for draft in drafts if draft.role in chosen)
    return Rules(
        family="jobset",
        success=Success(
            groups=tuple(tuple(d.hostname for d in drafts if d.child == child) for child in targets),
            any_of=success.get("operator").choice(("All", "Any"), "All") == "Any",
        ),
        clean="Running",  # a finished JobSet deletes the Jobs that still run
        deadline_s=float(deadline.number(least=1)) if deadline.given else None,
        children=children,
        max_restarts=failure.get("maxRestarts").number(0),
        set_rules=tuple(made for rule in failure.get("rules").items() if (made := _set_rule(rule, names))),
        strategy="Recreate" if strategy == _IN_PLACE else strategy,
    )


def _set_rule(rule: Field, names: tuple[str, ...]) -> SetRule | None:
    """A rule by messages is left out as a whole: a rehearsal has not the messages of Kubernetes."""
    rule.only(("name", "action", "onJobFailureReasons", _PATTERNS, "targetReplicatedJobs"))
    made = SetRule(
        action=rule.get("action").choice(_SET_ACTIONS),
        reasons=tuple(one.choice(_REASONS) for one in rule.get("onJobFailureReasons").items()),
        jobs=tuple(one.choice(names) for one in rule.get("targetReplicatedJobs").items()),
    )
    return None if rule.get(_PATTERNS).items() else made


def read_job(spec: Field, name: str, restart: str) -> ChildRules:
    """The rules of a Job of the replicatedJob `name`; `restart` is its pods' restartPolicy."""
    spec.only((*_JOB, *JOB_IGNORED))
    policy = spec.get("podFailurePolicy")
    policy.only(("rules",))
    deadline = spec.get("activeDeadlineSeconds")
    if policy.given and restart != "Never":
        raise policy.bad("restartPolicy: Never in the pod, as Kubernetes wants it", found=None)
    return ChildRules(
        backoff_limit=spec.get("backoffLimit").number(_BACKOFF, most=_BOUNDLESS),
        exit_rules=tuple(map(_exit_rule, policy.get("rules").items())),
        deadline_s=float(deadline.number(least=1)) if deadline.given else None,
        replicated=name,
    )


def _exit_rule(rule: Field) -> ExitRule:
    rule.only(("action", "onExitCodes", "onPodConditions"))
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if codes.given is bool(conditions.items()):
        raise rule.bad("onExitCodes or onPodConditions")
    codes.only(("containerName", "operator", "values"))
    met = [one.get("type").text() for one in conditions.items() if one.get("status").text("True") == "True"]
    return ExitRule(
        action=rule.get("action").choice(_ACTIONS),
        container=codes.get("containerName").text("") or None,
        among=not codes.given or codes.get("operator").choice(("In", "NotIn")) == "In",
        codes=tuple(value.number(most=255) for value in codes.get("values").items()),
        conditions=tuple(met) if codes.given or met else ("none",),
    )


def ignored(spec: Field, jobs: tuple[ReplicatedJob, ...]) -> Iterator[str]:
    """What of a JobSet and its Jobs means something to their controllers and nothing here."""
    yield from left_out(spec, _SET_IGNORED)
    if spec.get("failurePolicy", "restartStrategy").value == _IN_PLACE:
        yield f"restartStrategy {_IN_PLACE}: failed pods are recreated"
    if any(rule.get(_PATTERNS).given for rule in spec.get("failurePolicy", "rules").items()):
        yield f"rules with {_PATTERNS}"
    for job in jobs:
        batch = job.field.get("template", "spec")
        if batch.get("completions").given and batch.get("completions").value != batch.get("parallelism").number(1):
            yield "completions of a Job: it has as many pods as its parallelism says"
        yield from left_out(batch, JOB_IGNORED, "of a Job")
