"""A JobSet, and a batch Job by itself: their pods, and the rules by which these live. Pure.

kubernetes-sigs/jobset pkg/controllers/jobset_controller.go and pkg/webhooks/jobset_webhook.go; Kubernetes'
pkg/controller/job/indexed_job_utils.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import (
    JOBSET_LABEL,
    ChildRules,
    Draft,
    JobRules,
    SetRule,
    Success,
    Template,
    Workload,
    pods,
)
from trainer_launch.rehearsal.controllers.podspec import exit_rule, read_template
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS, MEETING_PORT, job_name, namespace

INDEX = "batch.kubernetes.io/job-completion-index"
NODE = "node"  # the container that counts, where a pod has one of this name
_JOBSET = (
    "replicatedJobs", "network", "successPolicy", "failurePolicy", "coordinator", "volumeClaimPolicies",
)  # fmt: skip
_NETWORK = ("enableDNSHostnames", "subdomain", "publishNotReadyAddresses")
_REPLICATED = ("name", "replicas", "template", "dependsOn", "groupName")
_JOB = (
    "parallelism", "completions", "completionMode", "backoffLimit", "podFailurePolicy", "template", "selector",
    "manualSelector", "backoffLimitPerIndex",
)  # fmt: skip
_RESTARTS = ("OnFailure", "Never")  # what a Job's pods may have
_BACKOFF = 6  # a Job's own default
_BOUNDLESS = 2**31 - 1
_ACTIONS = ("FailJob", "Ignore", "Count", "FailIndex")
_SET_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_OF_WHOLE_SET = {"RestartJob": _SET_ACTIONS[1], "RestartJobAndIgnoreMaxRestarts": _SET_ACTIONS[2]}
_REASONS = (
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
)  # fmt: skip
_NARROWING = ("onJobFailureMessagePatterns", "targetReplicatedJobs")  # a rehearsal ignores rules with one of these
_CONDITIONS = "onPodConditions"


class ReplicatedJob(Struct, frozen=True, kw_only=True):
    """A replicatedJob: its template, and its number of pods."""

    name: str
    count: int  # pods of each of its Jobs
    replicas: int  # Jobs
    template: Template
    field: Field

    @property
    def restart(self) -> str:
        """The restartPolicy of its pods."""
        return self.template.restart or "OnFailure"


class JobSet(Struct, frozen=True, kw_only=True):
    """A JobSet, read."""

    name: str
    space: str
    subdomain: str
    spec: Field
    jobs: tuple[ReplicatedJob, ...]

    def children(self, job: ReplicatedJob) -> list[str]:
        """The Jobs that a replicatedJob becomes."""
        return [f"{self.name}-{job.name}-{number}" for number in range(job.replicas)]

    def before(self, job: ReplicatedJob) -> tuple[ReplicatedJob, ...]:
        """The replicatedJobs that stand before this one."""
        return self.jobs[: [other.name for other in self.jobs].index(job.name)]


def read(document: Field) -> Workload:
    """The pods of a JobSet or Job; MASTER_PORT is a port of the pod that MASTER_ADDR names.

    Of a clustered task of Flyte's no variable names a pod: its launchers make the name.
    """
    made = (_jobset if document.get("kind").text() == "JobSet" else _job)(document)
    owners = {name: draft.hostname for draft in made.drafts for name in draft.names}
    envs = [pod.main.env for pod in pods(made)]
    masters = (env.get("MASTER_ADDR", "").removesuffix(".cluster.local") for env in envs)
    master = next((owners[name] for name in masters if name in owners), None)
    ports = {} if master is None else {"MASTER_PORT": master}
    is_flytes = bool(envs) and {"JOBSET_NAME", "NNODES"} <= envs[0].keys()
    return replace(made, ports={MEETING_PORT: made.drafts[0].hostname} if is_flytes and not ports else ports)


def _jobset(document: Field) -> Workload:
    spec, name = document.get("spec"), job_name(document)
    jobs = tuple(map(_replicated, replicated_jobs(spec, name)))
    jobset = JobSet(
        name=name,
        space=namespace(document),
        subdomain=spec.get("network", "subdomain").name("") or name,
        spec=spec,
        jobs=jobs,
    )
    made = workload(jobset, "JobSet")
    is_named = spec.get("network", "enableDNSHostnames").flag(default=True)
    return made if is_named else _nameless(made, "set enableDNSHostnames: true")


def replicated_jobs(spec: Field, name: str) -> list[Field]:
    """The replicatedJobs of the JobSet called `name`, each with volumes for the claims that JobSet makes for it."""
    spec.only(_JOBSET)
    spec.get("network").only(_NETWORK)
    jobs = spec.get("replicatedJobs").named_items()
    if not jobs:
        raise spec.get("replicatedJobs").bad("at least one replicatedJob")
    claims = [
        {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
        for policy in spec.get("volumeClaimPolicies").items()
        for template in policy.get("templates").items()
        if (claim := template.get("metadata", "name").text())
    ]
    for job in jobs:
        job.only(_REPLICATED)
    where = ("template", "spec", "template", "spec", "volumes")
    return [job.changed(where, [*claims, *(job.get(*where).value or [])]) if claims else job for job in jobs]


def _replicated(job: Field) -> ReplicatedJob:
    batch = job.get("template", "spec")
    if not _indexed(batch, "Indexed"):
        raise batch.get("completionMode").bad("Indexed, by which the pods of a JobSet get their names")
    batch.get("template", "spec", "restartPolicy").choice(_RESTARTS, "OnFailure")
    return ReplicatedJob(
        name=job.get("name").name(),
        count=_count(batch),
        replicas=job.get("replicas").number(1, least=1, most=MAX_REPLICAS),
        template=read_template(batch.get("template")),
        field=job,
    )


def workload(jobset: JobSet, kind: str) -> Workload:
    """The pods of a JobSet."""
    drafts = tuple(draft for job in jobset.jobs for draft in _drafts(jobset, job))
    children = {
        child: _child_rules(job.field.get("template", "spec"))
        for job in jobset.jobs
        for child in jobset.children(job)
    }
    return Workload(
        kind=kind,
        name=jobset.name,
        namespace=jobset.space,
        drafts=drafts,
        rules=_rules(jobset.spec, drafts, children),
    )


def _drafts(jobset: JobSet, job: ReplicatedJob) -> Iterator[Draft]:
    """Every pod of a replicatedJob: `<job>-<replicatedJob>-<jobIndex>-<podIndex>`."""
    containers = job.template.containers
    main = NODE if job.template.container(NODE) else containers[0].name
    after = _after(jobset, job)
    for number, child in enumerate(jobset.children(job)):
        for index in range(job.count):
            full = f"{child}-{index}.{jobset.subdomain}"
            yield Draft(
                template=job.template,
                hostname=f"{child}-{index}",
                role=job.name,
                index=index,
                main=main,
                restart=job.restart,
                names=(full, f"{full}.{jobset.space}", f"{full}.{jobset.space}.svc"),
                labels=_labels(jobset, job, number, index),
                completion_index=index,
                child=child,
                after=after,
            )


def _labels(jobset: JobSet, job: ReplicatedJob, number: int, index: int) -> Mapping[str, str]:
    labels = {
        "jobset-name": jobset.name,
        "replicatedjob-name": job.name,
        "replicatedjob-replicas": str(job.replicas),
        "global-replicas": str(sum(each.replicas for each in jobset.jobs)),
        "job-index": str(number),
        "job-global-index": str(sum(each.replicas for each in jobset.before(job)) + number),
        "restart-attempt": "0",
    }
    coordinator = jobset.spec.get("coordinator")
    if coordinator.given:
        coordinator.only(("replicatedJob", "jobIndex", "podIndex"))
        chosen = coordinator.get("replicatedJob").choice(tuple(each.name for each in jobset.jobs))
        place = f"{coordinator.get('jobIndex').number(0)}-{coordinator.get('podIndex').number(0)}"
        labels["coordinator"] = f"{jobset.name}-{chosen}-{place}.{jobset.subdomain}"
    return {**{f"{JOBSET_LABEL}{name}": value for name, value in labels.items()}, INDEX: str(index)}


def _after(jobset: JobSet, job: ReplicatedJob) -> tuple[str, ...]:
    """The Jobs that a replicatedJob waits for, as JOB=Ready or JOB=Complete."""
    jobs = {each.name: each for each in jobset.jobs}
    waits: list[tuple[ReplicatedJob, str]] = []
    for dependency in job.field.get("dependsOn").items():
        name = dependency.get("name").choice(tuple(jobs))
        waits.append((jobs[name], dependency.get("status").choice(("Ready", "Complete"), "Complete")))
    return tuple(f"{child}={status}" for each, status in waits for child in jobset.children(each))


def _job(document: Field) -> Workload:
    spec, name, space = document.get("spec"), job_name(document), namespace(document)
    count, is_indexed, pod = _count(spec), _indexed(spec, "NonIndexed"), spec.get("template", "spec")
    if count > 1 and not is_indexed:
        raise spec.get("completionMode").bad(f"Indexed, so that each of the {count} pods knows which one it is")
    restart, subdomain = pod.get("restartPolicy").choice(_RESTARTS), pod.get("subdomain").name("")
    template = read_template(spec.get("template"))

    def draft(index: int) -> Draft:
        host = f"{name}-{index}" if is_indexed else name
        full = f"{host}.{subdomain}"
        labels = {"batch.kubernetes.io/job-name": name, "job-name": name}
        return Draft(
            template=template,
            hostname=host,
            role="pod",
            index=index,
            main=template.containers[0].name,
            restart=restart,
            names=(full, f"{full}.{space}", f"{full}.{space}.svc"),
            labels={**labels, INDEX: str(index)} if is_indexed else labels,
            completion_index=index if is_indexed else None,
            child=name,
        )

    drafts = tuple(map(draft, range(count)))
    children = {name: _child_rules(spec)}
    made = Workload(
        kind="Job",
        name=name,
        namespace=space,
        drafts=drafts,
        rules=_rules(Field(None, "", document.where), drafts, children),
    )
    advice = "set subdomain in the pod's spec, and make a headless Service of that name"
    return made if subdomain and is_indexed else _nameless(made, advice)


def _count(batch: Field) -> int:
    """How many pods a Job has."""
    completions, most = batch.get("completions"), batch.get("parallelism").number(1, least=1, most=MAX_REPLICAS)
    if completions.number(most) != most:
        raise completions.bad(f"parallelism, which is {most}: a rehearsal runs all pods of a Job at the same time")
    return most


def _indexed(batch: Field, default: str) -> bool:
    """Whether each pod of a Job has an index."""
    return batch.get("completionMode").choice(("Indexed", "NonIndexed"), default) == "Indexed"


def _nameless(made: Workload, advice: str) -> Workload:
    """The same job, whose pods have no names in DNS."""
    drafts = tuple(replace(draft, names=()) for draft in made.drafts)
    odd = (f"the pods of this {made.kind} do not find each other by name; {advice}",) if len(drafts) > 1 else ()
    return replace(made, drafts=drafts, odd=odd)


def _rules(spec: Field, drafts: tuple[Draft, ...], children: Mapping[str, ChildRules]) -> JobRules:
    """The rules of a JobSet with these pods and Jobs."""
    names = tuple(dict.fromkeys(draft.role for draft in drafts))
    success, failure = spec.get("successPolicy"), spec.get("failurePolicy")
    success.only(("operator", "targetReplicatedJobs"))
    failure.only(("maxRestarts", "rules"))
    chosen = [target.choice(names) for target in success.get("targetReplicatedJobs").items()] or names
    targets = dict.fromkeys(draft.child for draft in drafts if draft.role in chosen)
    return JobRules(
        family="jobset",
        success=Success(
            groups=tuple(tuple(d.hostname for d in drafts if d.child == child) for child in targets),
            any_of=success.get("operator").choice(("All", "Any"), "All") == "Any",
        ),
        clean="Running",  # a finished JobSet deletes the Jobs that still run
        children=children,
        max_restarts=failure.get("maxRestarts").number(0),
        set_rules=tuple(
            _set_rule(rule) for rule in failure.get("rules").items() if _is_rehearsed(rule, *_NARROWING)
        ),
    )


def _is_rehearsed(rule: Field, *keys: str) -> bool:
    """Whether a rule does without these keys, which are not rehearsed."""
    given = [key for key in keys if rule.get(key).items()]
    for key in given:
        rule.ignore(f"rules with {key}")
    return not given


def _set_rule(rule: Field) -> SetRule:
    rule.only(("name", "action", "onJobFailureReasons", *_NARROWING))
    action = rule.get("action").choice((*_SET_ACTIONS, *_OF_WHOLE_SET))
    if action in _OF_WHOLE_SET:
        rule.ignore("RestartJob: the whole JobSet restarts")
    return SetRule(
        action=_OF_WHOLE_SET.get(action, action),
        reasons=tuple(reason.choice(_REASONS) for reason in rule.get("onJobFailureReasons").items()),
    )


def _child_rules(batch: Field) -> ChildRules:
    """The rules of a Job."""
    batch.only(_JOB, "of a Job")
    if batch.get("completions").given and batch.get("completions").value != batch.get("parallelism").number(1):
        batch.ignore("completions of a Job: it has as many pods as its parallelism says")
    if batch.get("backoffLimitPerIndex").given:
        batch.ignore("backoffLimitPerIndex of a Job")
    policy = batch.get("podFailurePolicy")
    policy.only(("rules",))
    return ChildRules(
        backoff_limit=batch.get("backoffLimit").number(_BACKOFF, most=_BOUNDLESS),
        exit_rules=tuple(
            exit_rule(rule.get("onExitCodes"), rule.get("action").choice(_ACTIONS))
            for rule in policy.get("rules").items()
            if _is_rehearsed(rule, _CONDITIONS)  # pods that are deleted count as no failures here
        ),
    )
