"""A JobSet without a TrainJob above it, and a batch Job without a JobSet. Pure.

kubernetes-sigs/jobset pkg/controllers/jobset_controller.go and pkg/webhooks/jobset_webhook.go; Kubernetes'
pkg/controller/job/indexed_job_utils.go.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from trainer_launch.rehearsal.controllers import trainer_runtime, trainer_v2
from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import Draft, Workload, pods
from trainer_launch.rehearsal.controllers.podspec import left_out, read_template
from trainer_launch.rehearsal.controllers.trainer_runtime import ReplicatedJob, TrainJob
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS, job_name, namespace

_RESTARTS = ("OnFailure", "Never")  # what a Job's pods may have
_NETWORK = ("enableDNSHostnames", "subdomain", "publishNotReadyAddresses")


def read(request: Request) -> Workload:
    """The pods of a JobSet or Job; MASTER_PORT is a port of the pod that MASTER_ADDR names."""
    made = (_jobset if request.job.get("kind").text() == "JobSet" else _job)(request)
    return replace(made, ports=dict(_port(made)))


def _port(made: Workload) -> Iterator[tuple[str, str]]:
    owners = {name: draft.hostname for draft in made.drafts for name in draft.names}
    told = (pod.main.env.get("MASTER_ADDR", "").removesuffix(".cluster.local") for pod in pods(made))
    yield from (("MASTER_PORT", owners[name]) for name in told if name in owners)


def _count(batch: Field) -> int:
    """How many pods a Job has."""
    completions, most = batch.get("completions"), batch.get("parallelism").number(1, least=1, most=MAX_REPLICAS)
    if completions.number(most) != most:
        raise completions.bad(f"parallelism, which is {most}: a rehearsal runs all pods of a Job at the same time")
    return most


def _indexed(batch: Field, default: str) -> bool:
    """Whether each of its pods is told which one it is."""
    mode, completions = batch.get("completionMode"), batch.get("completions")
    indexed = mode.choice(("Indexed", "NonIndexed"), default) == "Indexed"
    if indexed and batch.get("parallelism").given and not completions.given:
        raise completions.bad("a number, as an Indexed Job needs one")
    return indexed


def _jobset(request: Request) -> Workload:
    found = request.job
    spec, name = found.get("spec"), job_name(found)
    network, nothing = spec.get("network"), Field(None, "", found.where)
    spec.only(trainer_runtime.JOBSET)
    network.only(_NETWORK)
    jobs = [trainer_runtime.with_volumes(one, spec, name) for one in spec.get("replicatedJobs").items()]
    if not jobs:
        raise spec.get("replicatedJobs").bad("at least one replicatedJob")
    made = trainer_v2.made(
        TrainJob(
            name=name,
            space=namespace(found),
            subdomain=network.get("subdomain").name("") or name,
            policy="",
            policy_field=nothing,
            trainer=nothing,
            jobset=spec,
            jobs=tuple(map(_replicated, jobs)),
            job=found,
        ),
        "JobSet",
    )
    return (
        made
        if network.get("enableDNSHostnames").flag(default=True)
        else _nameless(made, "set enableDNSHostnames: true")
    )


def _replicated(job: Field) -> ReplicatedJob:
    job.only(trainer_runtime.REPLICATED)
    batch = job.get("template", "spec")
    if not _indexed(batch, "Indexed"):
        raise batch.get("completionMode").bad("Indexed, by which the pods of a JobSet get their names")
    batch.get("template", "spec", "restartPolicy").choice(_RESTARTS, "OnFailure")
    return ReplicatedJob(
        name=job.get("name").name(),
        ancestor=None,
        count=_count(batch),
        replicas=job.get("replicas").number(1, least=1, most=MAX_REPLICAS),
        template=read_template(batch.get("template")),
        field=job,
    )


def _job(request: Request) -> Workload:
    found = request.job
    spec, name, space = found.get("spec"), job_name(found), namespace(found)
    count, indexed, pod = _count(spec), _indexed(spec, "NonIndexed"), spec.get("template", "spec")
    if count > 1 and not indexed:
        raise spec.get("completionMode").bad(f"Indexed, so that each of the {count} pods knows which one it is")
    restart, subdomain = pod.get("restartPolicy").choice(_RESTARTS), pod.get("subdomain").name("")
    template = read_template(spec.get("template"))

    def draft(index: int) -> Draft:
        host = f"{name}-{index}" if indexed else name
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
            labels={**labels, trainer_v2.INDEX: str(index)} if indexed else labels,
            completion_index=index if indexed else None,
            child=name,
        )

    drafts, nothing = tuple(map(draft, range(count))), Field(None, "", found.where)
    made = Workload(
        kind="Job",
        name=name,
        namespace=space,
        drafts=drafts,
        rules=trainer_runtime.read(nothing, drafts, {name: trainer_runtime.read_job(spec, "", restart)}, nothing),
        ignored=(*left_out(spec, trainer_runtime.JOB_IGNORED), *template.ignored),
    )
    advice = "set subdomain in the pod's spec, and make a headless Service of that name"
    return made if subdomain and indexed else _nameless(made, advice)


def _nameless(made: Workload, advice: str) -> Workload:
    """The same with pods that nobody finds by name."""
    drafts = tuple(replace(draft, names=()) for draft in made.drafts)
    odd = (f"the pods of this {made.kind} do not find each other by name; {advice}",) if len(drafts) > 1 else ()
    return replace(made, drafts=drafts, odd=odd)
