"""PyTorchJob, fixed and elastic.

kubeflow/trainer release-1.9, pkg/controller.v1/pytorch/{envvar,elastic,initcontainer}.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    Draft,
    Pod,
    Success,
    Template,
    Workload,
    env_items,
)

_BACKENDS = ("c10d", "etcd", "etcd-v2")
_ELASTIC = (
    "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
    "nProcPerNode", "maxRestarts", "metrics",
)  # fmt: skip


class _Job(Struct, frozen=True, kw_only=True):
    name: str
    specs: Mapping[str, v1.Replicas]
    nproc: str | None  # nprocPerNode, with its default
    elastic: Mapping[str, str] | None  # the variables of an elasticPolicy


def read(request: Request) -> Workload:
    """The pods of a PyTorchJob."""
    found = request.job
    spec = found.get("spec")
    specs = v1.replicas(found, v1.PYTORCH)
    master, worker = specs.get("master"), specs.get("worker")
    if master is not None and master.count != 1:
        raise master.where.get("replicas").bad("1: a PyTorchJob has one Master")
    name = v1.job_name(found)
    job = _Job(name=name, specs=specs, nproc=_nproc(spec), elastic=_elastic(name, spec, worker))
    made = v1.workload(
        found, v1.PYTORCH, specs, lambda one, index: _template(job, one, index), lambda pods: _success(pods, job)
    )
    return replace(made, ports=_ports(job), ignored=(*made.ignored, *_ignored(job, spec)))


def _ports(job: _Job) -> Mapping[str, str]:
    """Which variable has a port of which pod."""
    if "master" in job.specs:
        return dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), f"{job.name}-master-0")
    return {} if job.elastic is not None else {PORT: f"{job.name}-worker-0"}


def _ignored(job: _Job, spec: Field) -> Iterator[str]:
    if spec.get("elasticPolicy", "metrics").given:
        yield "elasticPolicy.metrics"
    if {"master", "worker"} <= job.specs.keys():
        yield "init container init-pytorch: the master's name is an address here"


def _success(pods: tuple[Draft, ...], job: _Job) -> Success:
    workers = v1.everyone(pods, "worker")
    if "master" in job.specs:
        return Success(groups=(v1.everyone(pods, "master"),))
    if job.elastic is not None:  # the first worker that is done ends it
        return Success(groups=tuple((worker,) for worker in workers), any_of=True)
    return Success(groups=(workers,))


def _nproc(spec: Field) -> str | None:
    """The default is only left out when the elasticPolicy says it in the old place."""
    given, old = spec.get("nprocPerNode"), spec.get("elasticPolicy", "nProcPerNode")
    if given.given and old.given:
        raise old.bad("nprocPerNode in one place only: spec.nprocPerNode")
    text = given.text("")
    if text and parse_number(text, 0, MAX_COUNT) is None and text not in ("auto", "cpu", "gpu"):
        raise given.bad("a number as a string, or auto, cpu or gpu")
    return text or (None if old.given else "auto")


def _template(job: _Job, one: v1.Replicas, index: int) -> Template:
    env = {"PYTHONUNBUFFERED": "1"}
    master = job.specs.get("master")
    rank = index if one.role == "master" or master is None else index + 1
    total = sum(each.count for each in job.specs.values())
    if master is not None:
        factor = int(job.nproc) if job.nproc and job.nproc.isdigit() else 1
        port, host = str(master.port), f"{job.name}-master-0"
        env |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": host, "PET_MASTER_ADDR": host}
        env |= {"WORLD_SIZE": str(total * factor), "RANK": str(rank), "PET_NODE_RANK": str(rank)}
    if job.nproc is not None:
        env["PET_NPROC_PER_NODE"] = job.nproc
    env |= {"PET_NNODES": str(total)} if job.elastic is None else job.elastic
    template = v1.with_env(one.template, env_items(env))
    if one.role == "worker" and master is not None:
        template = replace(template, init=(*template.init, _waiting(f"{job.name}-master-0")))
    return template


def _waiting(master: str) -> Container:
    """What the operator puts in front of a worker: it waits for the master's name."""
    script = (
        f"err=1;for i in $(seq 100); do if nslookup {master}; then err=0 && break; fi;"
        "echo waiting for master; sleep 2; done; exit $err"
    )
    return Container(name="init-pytorch", command=("sh", "-c", script), platforms=True)


def _elastic(job: str, spec: Field, worker: v1.Replicas | None) -> Mapping[str, str] | None:
    policy = spec.get("elasticPolicy")
    if not policy.given:
        return None
    policy.only(_ELASTIC)
    if worker is None:
        raise spec.get("pytorchReplicaSpecs", "Worker").bad("Worker replicas, because the job has an elasticPolicy")
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    least = low.number(high.number(worker.count, least=1), least=1)
    most = high.number(least if low.given else worker.count, least=1)
    if most < least:
        raise high.bad(f"at least minReplicas, {least}")
    host, port = policy.get("rdzvHost").text("") or f"{job}-worker-0", policy.get("rdzvPort").number(worker.port)
    env = {
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend").choice(_BACKENDS, "c10d"),
        "PET_NNODES": f"{least}:{most}",
    }
    conf = ",".join(f"{one.get('key').text()}={one.get('value').text()}" for one in policy.get("rdzvConf").items())
    if policy.get("maxRestarts").given:
        env["PET_MAX_RESTARTS"] = str(policy.get("maxRestarts").number())
    if policy.get("nProcPerNode").given:
        env["PET_NPROC_PER_NODE"] = str(policy.get("nProcPerNode").number(least=1))
    if policy.get("rdzvId").text(""):
        env["PET_RDZV_ID"] = policy.get("rdzvId").text()
    if conf:
        env["PET_RDZV_CONF"] = conf
    if policy.get("standalone").flag():
        env["PET_STANDALONE"] = ""
    return env


# -- on one machine ----------------------------------------------------------------------------


ADDRESS, PORT = "TRAINER_LAUNCH_MASTER_ADDR", "TRAINER_LAUNCH_MASTER_PORT"
_PORT = "29500"  # any: the rehearsal puts a free one in its place
_TOLD = ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", ADDRESS)


def on_loopback(pod: Pod, first: str) -> Pod:
    """The pod whose launchers meet at `first`, a pod's name, where neither the operator nor the job says where."""
    return replace(pod, containers=tuple(_changed(one, first) for one in pod.containers))


def _changed(container: Container, first: str) -> Container:
    if "PET_NNODES" not in container.env or any(name in container.env for name in _TOLD):
        return container
    return replace(container, env={**container.env, ADDRESS: first, PORT: _PORT})
