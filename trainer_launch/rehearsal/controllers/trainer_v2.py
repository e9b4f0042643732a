"""TrainJob of Kubeflow Trainer v2: its JobSet's pods, with what each runtime's policy injects into them. Pure.

The policies are in `trainer_policies`; here are pods, names and the JobSet's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer_launch.rehearsal.controllers import jobset, trainer_mpi, trainer_policies
from trainer_launch.rehearsal.controllers.pod_values import Draft, Rules, Workload
from trainer_launch.rehearsal.controllers.request import Request
from trainer_launch.rehearsal.controllers.runtime import (
    ANCESTOR,
    LAUNCHER,
    NODE,
    TRAINER,
    ReplicatedJob,
    TrainJob,
    read_trainjob,
)

_POLICIES = {
    "torch": trainer_policies.torch,
    "jax": trainer_policies.jax,
    "xgboost": trainer_policies.xgboost,
    "flux": trainer_policies.flux,
    "mpi": trainer_mpi.mpi,
}
_PORTS = {"torch": ("PET_MASTER_PORT",), "xgboost": ("DMLC_TRACKER_PORT",)}
_MARKS = {"torch": "PET_NNODES", "xgboost": "DMLC_TRACKER_URI", "jax": "JAX_NUM_PROCESSES"}


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
        ignored=tuple(
            dict.fromkeys((*_ignored_of_job(job), *(text for one in job.jobs for text in _ignored(job, one))))
        ),
        odd=tuple(_odd(job)),
    )


def _odd(job: TrainJob) -> Iterator[str]:
    """What the author of the job can hardly have meant."""
    launchers = next((one.count for one in job.jobs if one.name == LAUNCHER), 1)
    if job.policy == "mpi" and launchers > 1:
        yield (
            f"the controller makes {launchers} launchers, each of which runs the command, because "
            f"mlPolicy.numNodes is {launchers}; set that to 1, and trainer.numNodes to the number of nodes"
        )
    mark = _MARKS.get(job.policy)
    if mark is None:
        return
    if job.main is None:
        yield (
            f"no container gets {mark} and the like, because no replicatedJob has the label {ANCESTOR}: {TRAINER}; "
            f"add the label to the template of the replicatedJob that trains"
        )
    elif not any(item.name == mark for one in job.main.template.containers for item in one.items):
        yield (
            f"the container {NODE} gets no {mark} and the like, because the TrainJob has no spec.trainer; "
            f"add at least trainer: {{}}"
        )


def _ignored_of_job(job: TrainJob) -> Iterator[str]:
    """What the TrainJob and its runtime wish for beside their pods."""
    for key in ("suspend", "managedBy", "ttlSecondsAfterFinished"):
        if job.job.get("spec", key).given:
            yield (
                "suspend: the rehearsal runs anyway"
                if key == "suspend" and job.job.get("spec", key).flag()
                else key
            )
    if job.has_pod_group:
        yield "podGroupPolicy"
    yield from jobset.ignored(job.jobset, [one.field for one in job.jobs])


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
    if (
        job.jobset.get("startupPolicy", "startupPolicyOrder").choice(("AnyOrder", "InOrder"), "AnyOrder")
        == "InOrder"
    ):
        earlier = job.jobs[: [each.name for each in job.jobs].index(one.name)][-1:]
        waits += [f"{job.name}-{each.name}-{number}=Ready" for each in earlier for number in range(each.replicas)]
    for dependency in one.field.get("dependsOn").items():
        name = dependency.get("name").choice(tuple(names))
        status = dependency.get("status").choice(("Ready", "Complete"), "Complete")
        waits += [f"{job.name}-{name}-{number}={status}" for number in range(names[name].replicas)]
    return tuple(waits)


def _rules(job: TrainJob, drafts: tuple[Draft, ...]) -> Rules:
    children = {
        f"{job.name}-{one.name}-{number}": jobset.read_job(
            one.field.get("template", "spec"), one.name, one.template.restart or "OnFailure"
        )
        for one in job.jobs
        for number in range(one.replicas)
    }
    return jobset.read(job.jobset, drafts, children, job.job.get("spec", "activeDeadlineSeconds"))
