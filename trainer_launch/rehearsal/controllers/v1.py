"""Jobs of the v1 operator, each kind by its row in `contracts/v1_table.py`. Pure.

kubeflow/trainer release-1.9: pkg/controller.v1/common, pkg/core, pkg/apis/kubeflow.org/v1/common_types.go, and
pkg/controller.v1/{jax,paddlepaddle,pytorch,tensorflow,xgboost}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import v1_table
from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.contracts.v1_table import V1Kind
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import Draft, EnvItem, JobRules, Success, Template, Workload
from trainer_launch.rehearsal.controllers.podspec import read_template

RESTARTS = ("Always", "OnFailure", "Never", "ExitCode")
MAX_REPLICAS = 4096
# The port of node 0 on loopback where no variable names node 0, as in a PyTorchJob of Workers alone.
MEETING_PORT = "TRAINER_LAUNCH_MASTER_PORT"
_CLEAN = ("None", "Running", "All")
_RUN_POLICY = ("cleanPodPolicy", "backoffLimit")
_BACKENDS = ("c10d", "etcd", "etcd-v2")
_ELASTIC = (
    "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
    "nProcPerNode", "maxRestarts",
)  # fmt: skip


class Replicas(Struct, frozen=True, kw_only=True):
    """A replica spec."""

    role: str  # lower case
    count: int
    restart: str
    template: Template
    port: int
    before: int  # pods of the replica types before it


class V1Job(Struct, frozen=True, kw_only=True):
    """A job's manifest, read as far as all kinds have it in common."""

    document: Field
    kind: V1Kind
    name: str
    namespace: str
    specs: Mapping[str, Replicas]  # by role, in the order of the kind's roles

    @property
    def spec(self) -> Field:
        """The job's spec."""
        return self.document.get("spec")

    @property
    def leader(self) -> Replicas | None:
        """The replicas whose pod 0 all others connect to."""
        return next((self.specs[role] for role in self.kind.leaders if role in self.specs), None)

    @property
    def pods(self) -> int:
        """How many pods the job has."""
        return sum(spec.count for spec in self.specs.values())

    def pod_name(self, role: str, index: int = 0) -> str:
        """The name of a pod, which is its host name as well."""
        return f"{self.name}-{role}-{index}"

    def pod_names(self, role: str) -> tuple[str, ...]:
        """The pods of a role by name."""
        count = self.specs[role].count if role in self.specs else 0
        return tuple(self.pod_name(role, index) for index in range(count))


def read(document: Field) -> Workload:
    """The pods of a job of one of these kinds, with its run policy."""
    job = _job(document, v1_table.KINDS[document.get("kind").text()])
    host = _values(job, next(iter(job.specs.values())), 0).get("host")  # the same in all pods
    leaders = job.pod_names(job.leader.role) if job.leader else ()
    made = Workload(
        kind=job.kind.name,
        name=job.name,
        namespace=job.namespace,
        drafts=tuple(_draft(job, spec, index) for spec in job.specs.values() for index in range(spec.count)),
        rules=rules(document, Success(groups=(leaders,))),
        ports={} if host is None else dict.fromkeys(job.kind.variables("port"), str(host)),
    )
    return _FINISHED[job.kind.name](job, made) if job.kind.name in _FINISHED else made


def job_name(document: Field) -> str:
    """The job's name; without one, as with generateName, what comes before the random part."""
    metadata = document.get("metadata")
    prefix = metadata.get("generateName")
    if metadata.get("name").given or not prefix.given:
        return metadata.get("name").name()
    return Field(prefix.text().rstrip("-"), prefix.path, prefix.where).name()


def namespace(document: Field) -> str:
    """The job's namespace."""
    return document.get("metadata", "namespace").name("") or "default"


def _job(document: Field, kind: V1Kind) -> V1Job:
    """The job's replica specs, checked. Raises UsageError: something does not fit."""
    document.get("spec").only(("runPolicy", kind.specs, *kind.fields))
    specs = document.get("spec", kind.specs)
    by_role = {role.lower(): role for role in kind.roles}
    for key, spec in specs.fields():
        if key.lower() not in by_role:
            raise spec.bad(f"only the replica types {', '.join(kind.roles)}")
    given = {key.lower(): spec for key, spec in specs.fields() if spec.given}
    if not given:
        raise specs.bad(f"replica specs: {', '.join(kind.roles)}")
    made: dict[str, Replicas] = {}
    for role in by_role:
        if role in given:
            made[role] = _replicas(role, given[role], kind, sum(spec.count for spec in made.values()))
    leader = by_role[kind.leaders[0]]
    if kind.needs_leader and (leader.lower() not in made or made[leader.lower()].count != 1):
        raise specs.get(leader).bad(f"one {leader}, whose end is that of the job")
    return V1Job(document=document, kind=kind, name=job_name(document), namespace=namespace(document), specs=made)


def _replicas(role: str, spec: Field, kind: V1Kind, before: int) -> Replicas:
    spec.only(("replicas", "template", "restartPolicy"))
    template = read_template(spec.get("template"))
    name, port_name, port = kind.container
    main = template.container(name)
    if main is None:
        names = ", ".join(container.name for container in template.containers)
        raise spec.get("template", "spec", "containers").bad(
            f"a container named {name}, which gets the controller's variables (found: {names})"
        )
    return Replicas(
        role=role,
        count=spec.get("replicas").number(1, most=MAX_REPLICAS),
        restart=spec.get("restartPolicy").choice(RESTARTS, kind.restart) or kind.restart,
        template=template,
        port=main.ports.get(port_name, port),
        before=before,
    )


def _values(job: V1Job, spec: Replicas, index: int) -> dict[str, object]:
    """The values of a pod, see `V1Kind`: those of all kinds, and its kind's own, of which None takes one away."""
    values: dict[str, object] = {"job": job.name, "role": spec.role, "index": index}
    values |= {"nodes": job.pods, "rank": spec.before + index}
    if job.leader is not None:
        host, port = job.pod_name(job.leader.role), job.leader.port
        values |= {"host": host, "port": port, "address": f"{host}:{port}"}
    own = _OF_KIND.get(job.kind.name)
    return values if own is None else {**values, **own(job, spec, index)}


def _draft(job: V1Job, spec: Replicas, index: int) -> Draft:
    name, space = job.pod_name(spec.role, index), job.namespace
    items = []
    for key, text in job.kind.written(_values(job, spec, index)).items():
        if len(text) > MAX_VALUE_BYTES:  # before it is made for all pods
            raise job.document.get("spec", job.kind.specs).bad(
                f"fewer replicas: Linux takes {MAX_VALUE_BYTES} bytes in a variable, and {key} would be longer",
                f"the number {len(text)}",
            )
        is_field = job.kind.env[key] == v1_table.POD_IP
        items.append(EnvItem(name=key, field=text) if is_field else EnvItem(name=key, value=text))
    # Variables stand behind those of all main containers, of a TFJob of its own container only.
    containers = tuple(
        replace(each, items=(*each.items, *items))
        if job.kind is not v1_table.TENSORFLOW or each.name == job.kind.container[0]
        else each
        for each in spec.template.containers
    )
    labels = {"job-name": job.name, "replica-type": spec.role, "replica-index": str(index)}
    return Draft(
        template=replace(spec.template, containers=containers),
        hostname=name,
        role=spec.role,
        index=index,
        main=job.kind.container[0],
        restart=spec.restart,
        names=(name, f"{name}.{space}", f"{name}.{space}.svc"),
        labels={f"training.kubeflow.org/{key}": value for key, value in labels.items()},
    )


def rules(document: Field, success: Success) -> JobRules:
    """The run policy."""
    run = document.get("spec", "runPolicy")
    run.only(_RUN_POLICY)
    backoff = run.get("backoffLimit")
    return JobRules(
        family="v1",
        success=success,
        backoff_limit=backoff.number() if backoff.given else None,
        clean=run.get("cleanPodPolicy").choice(_CLEAN, "None") or "None",
    )


def _pytorch(job: V1Job, spec: Replicas, index: int) -> dict[str, object]:
    nproc = _nproc(job.spec)
    values: dict[str, object] = {"nproc": nproc, **_elastic(job)}
    if "master" not in job.specs:  # no variable has node 0's address, or the rank
        return values | dict.fromkeys(("host", "port", "rank"))
    return values | {"world_size": job.pods * (int(nproc) if nproc and nproc.isdigit() else 1)}


def _nproc(spec: Field) -> str | None:
    """The default is only left out when the elasticPolicy has the old field."""
    given, old = spec.get("nprocPerNode"), spec.get("elasticPolicy", "nProcPerNode")
    text = given.text("")
    if text and parse_number(text, 0, MAX_COUNT) is None and text not in ("auto", "cpu", "gpu"):
        raise given.bad("a number as a string, or auto, cpu or gpu")
    return text or (None if old.given else "auto")


def _elastic(job: V1Job) -> dict[str, object]:
    """The values of an elasticPolicy, none without one."""
    policy, worker = job.spec.get("elasticPolicy"), job.specs.get("worker")
    if not policy.given:
        return {}
    policy.only(_ELASTIC, "of elasticPolicy")
    if worker is None:
        raise job.spec.get(job.kind.specs, "Worker").bad("Worker replicas, because the job has an elasticPolicy")
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    least = low.number(high.number(worker.count, least=1), least=1)
    most = high.number(least if low.given else worker.count, least=1)
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


def _finished_pytorch(job: V1Job, made: Workload) -> Workload:
    """Without a master all workers have to be done, or in an elastic job the first one."""
    if "master" in job.specs:
        return made
    is_elastic, workers = job.spec.get("elasticPolicy").given, job.pod_names("worker")
    groups = tuple((worker,) for worker in workers) if is_elastic else (workers,)
    rules = replace(made.rules, success=Success(groups=groups, any_of=is_elastic))
    return replace(made, rules=rules, ports={} if is_elastic else {MEETING_PORT: job.pod_name("worker")})


def _xgboost(job: V1Job, spec: Replicas, index: int) -> dict[str, object]:
    workers = ",".join(job.pod_names("worker")) or None
    return {"workers": workers, "worker_port": job.specs["worker"].port if workers else None}


def _paddle(job: V1Job, spec: Replicas, index: int) -> dict[str, object]:
    values: dict[str, object] = {}
    if spec is job.leader and index == 0:
        values |= {"pod_ip": "status.podIP", "address": f"$({job.kind.variable('pod_ip')}):{spec.port}"}
    if "master" in job.specs:
        values["server_num" if spec.role == "master" else "trainer_num"] = 1
    return values


def _tensorflow(job: V1Job, spec: Replicas, index: int) -> dict[str, object]:
    if job.pods == 1:
        return {}
    cluster = {
        role: [f"{name}.{job.namespace}.svc:{each.port}" for name in job.pod_names(role)]
        for role, each in sorted(job.specs.items())
    }
    config = {"cluster": cluster, "task": {"type": spec.role, "index": index}, "environment": "cloud"}
    return {"config": json.dumps(config, separators=(",", ":"), ensure_ascii=False)}


def _finished_tensorflow(job: V1Job, made: Workload) -> Workload:
    """A TFJob has succeeded with its chiefs, else with its first worker or all of them."""
    policy = job.spec.get("successPolicy").choice(("", "AllWorkers"), "")
    chiefs, workers = (*job.pod_names("chief"), *job.pod_names("master")), job.pod_names("worker")
    last = chiefs or (workers if policy == "AllWorkers" else workers[:1])
    return replace(made, rules=replace(made.rules, success=Success(groups=(last,))))


_OF_KIND: Mapping[str, Callable[[V1Job, Replicas, int], dict[str, object]]] = {
    "PyTorchJob": _pytorch,
    "TFJob": _tensorflow,
    "XGBoostJob": _xgboost,
    "PaddleJob": _paddle,
}
_FINISHED: Mapping[str, Callable[[V1Job, Workload], Workload]] = {
    "PyTorchJob": _finished_pytorch,
    "TFJob": _finished_tensorflow,
}
