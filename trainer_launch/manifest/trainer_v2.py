"""TrainJob of Kubeflow Trainer v2: its JobSet's pods, with what each runtime's policy injects into them. Pure.

The policies are in `trainer_policies`; here are pods, names and the JobSet's rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.manifest import trainer_mpi, trainer_policies
from trainer_launch.manifest.fields import Field
from trainer_launch.manifest.request import Request
from trainer_launch.manifest.runtime import NODE, ReplicatedJob, TrainJob, read_trainjob
from trainer_launch.manifest.values import ChildRules, Draft, ExitRule, Rules, Success, Workload

_POLICIES = {
    "torch": trainer_policies.torch,
    "jax": trainer_policies.jax,
    "xgboost": trainer_policies.xgboost,
    "flux": trainer_policies.flux,
    "mpi": trainer_mpi.mpi,
}
_PORTS = {"torch": ("PET_MASTER_PORT",), "xgboost": ("DMLC_TRACKER_PORT",)}
_BACKOFF = 6  # a Job's own default
_ACTIONS = ("FailJob", "Ignore", "Count", "FailIndex")


def read(request: Request) -> Workload:
    """The pods of a TrainJob."""
    job = read_trainjob(request)
    if job.policy:
        job = _POLICIES[job.policy](job)
    drafts = tuple(draft for one in job.jobs for draft in _drafts(job, one))
    first = f"{job.name}-{NODE}-0-0"
    return Workload(
        kind="TrainJob",
        name=job.name,
        namespace=job.space,
        drafts=drafts,
        rules=_rules(job, drafts),
        ports=dict.fromkeys(_PORTS.get(job.policy, ()), first),
        ignored=tuple(dict.fromkeys(phrase for one in job.jobs for phrase in _ignored(job, one))),
    )


def _ignored(job: TrainJob, one: ReplicatedJob) -> list[str]:
    phrases = list(one.template.ignored)
    named = job.trainer.get("resourcesPerNode")
    if one.is_trainer and named.given:
        words = dict.fromkeys((*named.get("requests").mapping(), *named.get("limits").mapping()))
        phrases.append(f"resources ({', '.join(words)})")
    return phrases


def _drafts(job: TrainJob, one: ReplicatedJob) -> list[Draft]:
    """Every pod of a replicatedJob: `<job>-<replicatedJob>-<jobIndex>-<podIndex>`."""
    containers = one.template.containers
    main = next((each.name for each in containers if each.name == NODE), containers[0].name)
    pods = []
    for number in range(one.replicas):
        for index in range(one.count):
            host = f"{job.name}-{one.name}-{number}-{index}"
            full = f"{host}.{job.subdomain}"
            pods.append(
                Draft(
                    template=one.template,
                    hostname=host,
                    role=one.name,
                    index=index,
                    main=main,
                    restart=one.template.restart or "OnFailure",
                    names=(full, f"{full}.{job.space}", f"{full}.{job.space}.svc{job.domain}"),
                    labels=_labels(job, one, number, index),
                    completion_index=index,
                    child=f"{job.name}-{one.name}-{number}",
                    after=_after(job, one),
                )
            )
    return pods


def _labels(job: TrainJob, one: ReplicatedJob, number: int, index: int) -> Mapping[str, str]:
    return {
        "jobset.sigs.k8s.io/jobset-name": job.name,
        "jobset.sigs.k8s.io/replicatedjob-name": one.name,
        "jobset.sigs.k8s.io/job-index": str(number),
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "batch.kubernetes.io/job-completion-index": str(index),
    }


def _after(job: TrainJob, one: ReplicatedJob) -> tuple[str, ...]:
    names = {each.name: each for each in job.jobs}
    waits = []
    for dependency in one.field.get("dependsOn").items():
        name = dependency.get("name").choice(tuple(names))
        status = dependency.get("status").choice(("Ready", "Complete"), "Complete")
        waits += [f"{job.name}-{name}-{number}={status}" for number in range(names[name].replicas)]
    return tuple(waits)


# -- rules ------------------------------------------------------------------------------------


def _rules(job: TrainJob, drafts: tuple[Draft, ...]) -> Rules:
    policy = job.jobset.get("successPolicy")
    targets = policy.get("targetReplicatedJobs").texts() or tuple(one.name for one in job.jobs)
    children = dict.fromkeys(draft.child for draft in drafts if draft.role in targets)
    groups = tuple(tuple(d.hostname for d in drafts if d.child == child) for child in children)
    deadline = job.job.get("spec", "activeDeadlineSeconds")
    return Rules(
        family="jobset",
        success=Success(groups=groups, any_of=policy.get("operator").choice(("All", "Any"), "All") == "Any"),
        clean="Running",  # a finished JobSet deletes the Jobs that still run
        deadline_s=float(deadline.number(least=1)) if deadline.given else None,
        children={
            f"{job.name}-{one.name}-{number}": _child(one) for one in job.jobs for number in range(one.replicas)
        },
        max_restarts=job.jobset.get("failurePolicy", "maxRestarts").number(0),
    )


def _child(one: ReplicatedJob) -> ChildRules:
    spec = one.field.get("template", "spec")
    rules = spec.get("podFailurePolicy", "rules").items()
    read_rules = tuple(made for rule in rules if (made := _exit_rule(rule)) is not None)
    if read_rules and (one.template.restart or "OnFailure") != "Never":
        raise spec.get("podFailurePolicy").bad("restartPolicy: Never in the pod, as Kubernetes wants it")
    return ChildRules(backoff_limit=spec.get("backoffLimit").number(_BACKOFF), exit_rules=read_rules)


def _exit_rule(rule: Field) -> ExitRule | None:
    """A rule about exit codes; those about the conditions of pods find none on this machine."""
    codes = rule.get("onExitCodes")
    if not codes.given:
        return None
    return ExitRule(
        action=rule.get("action").choice(_ACTIONS),
        container=codes.get("containerName").text("") or None,
        among=codes.get("operator").choice(("In", "NotIn")) == "In",
        codes=tuple(value.number(most=255) for value in codes.get("values").items()),
    )
