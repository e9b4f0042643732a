"""PyTorchJob, fixed and elastic.

kubeflow/trainer release-1.9, pkg/controller.v1/pytorch/{envvar,elastic,initcontainer}.go.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from trainer_launch.contracts.v1_table import PYTORCH
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import Container, Draft, Pod, Success, Workload

_BACKENDS = ("c10d", "etcd", "etcd-v2")
_ELASTIC = (
    "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
    "nProcPerNode", "maxRestarts", "metrics",
)  # fmt: skip


def read(request: Request) -> Workload:
    """The pods of a PyTorchJob."""
    job = v1.job_of(request.job, PYTORCH)
    spec, master = request.job.get("spec"), job.specs.get("master")
    if master is not None and master.count != 1:
        raise master.where.get("replicas").bad("1: a PyTorchJob has one Master")
    nproc, elastic = _nproc(spec), _elastic(job)
    shared = {"nproc": nproc, **elastic}
    if master is not None:
        shared["world_size"] = job.pods * (int(nproc) if nproc and nproc.isdigit() else 1)
    else:  # nothing says where the pods meet, nor which is which
        shared |= dict.fromkeys(("host", "port", "rank"))
    made = v1.workload(job, lambda spec, index: shared, _success(job, is_elastic=bool(elastic)))
    if master is not None:
        return replace(made, drafts=tuple(map(_waiting, made.drafts)), ignored=(*made.ignored, *_ignored(job)))
    ports = {} if elastic else {PORT: job.pod_name("worker")}
    return replace(made, ports=ports, ignored=(*made.ignored, *_ignored(job)))


def _ignored(job: v1.V1Job) -> Iterator[str]:
    if job.document.get("spec", "elasticPolicy", "metrics").given:
        yield "elasticPolicy.metrics"
    if {"master", "worker"} <= job.specs.keys():
        yield "init container init-pytorch: the master's name is an address here"


def _success(job: v1.V1Job, *, is_elastic: bool) -> Success:
    if "master" in job.specs:
        return Success(groups=(job.pod_names("master"),))
    workers = job.pod_names("worker")
    if is_elastic:  # the first worker that is done ends it
        return Success(groups=tuple((worker,) for worker in workers), any_of=True)
    return Success(groups=(workers,))


def _waiting(draft: Draft) -> Draft:
    """A worker with the init container that the operator puts in front of it: it waits for the master's name."""
    if draft.role != "worker":
        return draft
    init = (*draft.template.init, Container(name="init-pytorch", platforms=True))
    return replace(draft, template=replace(draft.template, init=init))


def _nproc(spec: Field) -> str | None:
    """The default is only left out when the elasticPolicy says it in the old place."""
    given, old = spec.get("nprocPerNode"), spec.get("elasticPolicy", "nProcPerNode")
    if given.given and old.given:
        raise old.bad("nprocPerNode in one place only: spec.nprocPerNode")
    text = given.text("")
    if text and parse_number(text, 0, MAX_COUNT) is None and text not in ("auto", "cpu", "gpu"):
        raise given.bad("a number as a string, or auto, cpu or gpu")
    return text or (None if old.given else "auto")


def _elastic(job: v1.V1Job) -> dict[str, object]:
    """The values of an elasticPolicy, none without one."""
    spec = job.document.get("spec")
    policy, worker = spec.get("elasticPolicy"), job.specs.get("worker")
    if not policy.given:
        return {}
    policy.only(_ELASTIC)
    if worker is None:
        raise spec.get(job.kind.specs, "Worker").bad("Worker replicas, because the job has an elasticPolicy")
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    least = low.number(high.number(worker.count, least=1), least=1)
    most = high.number(least if low.given else worker.count, least=1)
    if most < least:
        raise high.bad(f"at least minReplicas, {least}")
    host = policy.get("rdzvHost").text("") or job.pod_name("worker")
    conf = (f"{item.get('key').text()}={item.get('value').text()}" for item in policy.get("rdzvConf").items())
    restarts, old_nproc = policy.get("maxRestarts"), policy.get("nProcPerNode")
    values: dict[str, object] = {
        "nodes": f"{least}:{most}",
        "rdzv_endpoint": f"{host}:{policy.get('rdzvPort').number(worker.port)}",
        "rdzv_backend": policy.get("rdzvBackend").choice(_BACKENDS, "c10d"),
        "rdzv_id": policy.get("rdzvId").text("") or None,
        "rdzv_conf": ",".join(conf) or None,
        "max_restarts": restarts.number() if restarts.given else None,
        "standalone": "" if policy.get("standalone").flag() else None,
    }
    return {**values, **({"nproc": old_nproc.number(least=1)} if old_nproc.given else {})}


# -- on one machine ----------------------------------------------------------------------------


ADDRESS, PORT = "TRAINER_LAUNCH_MASTER_ADDR", "TRAINER_LAUNCH_MASTER_PORT"
_PORT = "29500"  # any: the rehearsal puts a free one in its place
_TOLD = ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", ADDRESS)


def on_loopback(pod: Pod, first: str) -> Pod:
    """The pod whose launchers meet at `first`, a pod's name, where neither the operator nor the job says where."""
    return replace(pod, containers=tuple(_changed(container, first) for container in pod.containers))


def _changed(container: Container, first: str) -> Container:
    if "PET_NNODES" not in container.env or any(name in container.env for name in _TOLD):
        return container
    return replace(container, env={**container.env, ADDRESS: first, PORT: _PORT})
