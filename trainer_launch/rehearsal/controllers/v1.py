"""Kinds of the v1 operator: JAXJob, PaddleJob, TFJob and XGBoostJob, and what all its kinds have in common. Pure.

kubeflow/trainer release-1.9: pkg/controller.v1/common, pkg/core, pkg/apis/kubeflow.org/v1/common_types.go, and
pkg/controller.v1/{jax/envvar,paddlepaddle/envvar,tensorflow/tensorflow,xgboost/xgboost}.go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    Draft,
    EnvItem,
    Rules,
    Success,
    Template,
    Workload,
    appended,
    env_items,
)
from trainer_launch.rehearsal.controllers.podspec import read_template

RESTARTS = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN = ("None", "Running", "All")
MAX_REPLICAS = 4096
_NO_PORTS: Mapping[str, str] = MappingProxyType({})
_RUN_POLICY = ("cleanPodPolicy", "activeDeadlineSeconds", "backoffLimit")
_RUN_POLICY_IGNORED = ("suspend", "schedulingPolicy", "managedBy", "ttlSecondsAfterFinished")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What differs between the kinds."""

    name: str
    specs: str  # the field with the replica specs
    roles: tuple[str, ...]  # as the manifest writes them
    container: str  # that counts; "": each pod's first
    port_name: str
    port: int
    restart: str
    fields: tuple[str, ...] = ()  # of its spec, besides its run policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """One replica spec."""

    role: str  # lower case
    count: int
    restart: str
    template: Template
    main: str  # the container that counts
    port: int
    where: Field


def job_name(found: Field) -> str:
    """The job's name; without one, as with generateName, what comes before the random part."""
    metadata = found.get("metadata")
    if metadata.get("name").given:
        return metadata.get("name").name()
    prefix = metadata.get("generateName")
    return Field(prefix.text().rstrip("-"), prefix.path, prefix.where).name()


def namespace(found: Field) -> str:
    """The job's namespace."""
    return found.get("metadata", "namespace").name("") or "default"


def replicas(found: Field, kind: Kind) -> dict[str, Replicas]:
    """The replica specs by role, in the order of `kind.roles`."""
    found.get("spec").only(("runPolicy", kind.specs, *kind.fields))
    specs = found.get("spec", kind.specs)
    by_role = {role.lower(): role for role in kind.roles}
    for key, spec in specs.fields():
        if key.lower() not in by_role:
            raise spec.bad(f"only the replica types {', '.join(kind.roles)}")
    given = {key.lower(): spec for key, spec in specs.fields() if spec.given}
    if not given:
        raise specs.bad(f"replica specs: {', '.join(kind.roles)}")
    return {role: _replicas(role, given[role], kind) for role in by_role if role in given}


def _replicas(role: str, spec: Field, kind: Kind) -> Replicas:
    spec.only(("replicas", "template", "restartPolicy"))
    template = read_template(spec.get("template"))
    main = template.container(kind.container) if kind.container else template.containers[0]
    if main is None:
        names = ", ".join(one.name for one in template.containers)
        raise spec.get("template", "spec", "containers").bad(
            f"a container named {kind.container}, which gets the controller's variables (found: {names})"
        )
    return Replicas(
        role=role,
        count=spec.get("replicas").number(1, most=MAX_REPLICAS),
        restart=spec.get("restartPolicy").choice(RESTARTS, kind.restart) or kind.restart,
        template=template,
        main=main.name,
        port=main.ports.get(kind.port_name, kind.port),
        where=spec,
    )


def with_env(template: Template, items: Iterable[EnvItem], only: str | None = None) -> Template:
    """Variables for all main containers, or for the one that is named."""
    fresh = tuple(items)

    def given(container: Container) -> Container:
        return container if only not in (None, container.name) else appended(container, fresh)

    return replace(template, containers=tuple(map(given, template.containers)))


def drafts(
    job: str,
    space: str,
    specs: Mapping[str, Replicas],
    made: Callable[[Replicas, int], Template],
    domain: str = "",
) -> tuple[Draft, ...]:
    """The pods of all replica specs; `made` gives each its template."""
    pods = []
    for one, index in [(each, index) for each in specs.values() for index in range(each.count)]:
        name = f"{job}-{one.role}-{index}"
        pods.append(
            Draft(
                template=made(one, index),
                hostname=name,
                role=one.role,
                index=index,
                main=one.main,
                restart=one.restart,
                names=(name, f"{name}.{space}", f"{name}.{space}.svc{domain}"),
                labels=_labels(job, one.role, index),
            )
        )
    return tuple(pods)


def workload(
    found: Field,
    kind: Kind,
    specs: Mapping[str, Replicas],
    pods: tuple[Draft, ...],
    success: Success,
    ports: Mapping[str, str] = _NO_PORTS,
) -> Workload:
    """The job of these pods, with its run policy."""
    return Workload(
        kind=kind.name,
        name=job_name(found),
        namespace=namespace(found),
        drafts=pods,
        rules=rules(found, success),
        ports=ports,
        ignored=ignored(found, specs.values()),
    )


def _labels(job: str, role: str, index: int) -> Mapping[str, str]:
    start = "training.kubeflow.org"
    return {f"{start}/job-name": job, f"{start}/replica-type": role, f"{start}/replica-index": str(index)}


def rules(found: Field, success: Success, policy: Field | None = None) -> Rules:
    """The run policy."""
    run = found.get("spec", "runPolicy") if policy is None else policy
    run.only((*_RUN_POLICY, *_RUN_POLICY_IGNORED))
    deadline = run.get("activeDeadlineSeconds")
    backoff = run.get("backoffLimit")
    return Rules(
        family="v1",
        success=success,
        backoff_limit=backoff.number() if backoff.given else None,
        clean=run.get("cleanPodPolicy").choice(CLEAN, "None") or "None",
        deadline_s=float(deadline.number()) if deadline.given else None,
    )


def ignored(found: Field, templates: Iterable[Replicas]) -> tuple[str, ...]:
    """What this machine leaves out, each once."""
    of_pods = (phrase for one in templates for phrase in one.template.ignored)
    return tuple(dict.fromkeys((*of_run_policy(found), *of_pods)))


def of_run_policy(found: Field) -> Iterator[str]:
    """What of the run policy means nothing here."""
    run = found.get("spec", "runPolicy")
    for key in _RUN_POLICY_IGNORED:
        if run.get(key).given:
            yield "suspend: the rehearsal runs anyway" if key == "suspend" and run.get(key).flag() else key


def everyone(pods: Sequence[Draft], role: str) -> tuple[str, ...]:
    """The pods of a role by name."""
    return tuple(pod.hostname for pod in pods if pod.role == role)


# -- JAXJob ------------------------------------------------------------------------------------


_JAX = Kind(
    name="JAXJob",
    specs="jaxReplicaSpecs",
    roles=("Worker",),
    container="jax",
    port_name="jaxjob-port",
    port=6666,
    restart="Never",
)


def _jax(request: Request) -> Workload:
    found = request.job
    specs = replicas(found, _JAX)
    worker, name = specs["worker"], job_name(found)

    def template(_: Replicas, index: int) -> Template:
        env = {
            "PYTHONUNBUFFERED": "1",
            "COORDINATOR_PORT": str(worker.port),
            "COORDINATOR_ADDRESS": f"{name}-worker-0",
            "NUM_PROCESSES": str(worker.count),
            "PROCESS_ID": str(index),
        }
        return with_env(worker.template, env_items(env))

    pods = drafts(name, namespace(found), specs, template)
    success = Success(groups=(everyone(pods, "worker"),))
    return workload(found, _JAX, specs, pods, success, {"COORDINATOR_PORT": f"{name}-worker-0"})


# -- PaddleJob, collective and with parameter servers ------------------------------------------


_PADDLE = Kind(
    name="PaddleJob",
    specs="paddleReplicaSpecs",
    roles=("Master", "Worker"),
    container="paddle",
    port_name="master",
    port=36543,
    restart="OnFailure",
    fields=("elasticPolicy",),
)


def _paddle(request: Request) -> Workload:
    found = request.job
    specs = replicas(found, _PADDLE)
    name = job_name(found)
    total = sum(one.count for one in specs.values())
    first = specs.get("master") or specs["worker"]  # where all meet

    def template(one: Replicas, index: int) -> Template:
        env = {"PYTHONUNBUFFERED": "1", "PADDLE_JOB_ID": name, "PADDLE_NNODES": str(total)}
        items = list(env_items(env))
        if one is first and index == 0:  # its own name is not published before it is ready
            items.append(EnvItem(name="POD_IP_DUMMY", field="status.podIP"))
            items.append(EnvItem(name="PADDLE_MASTER", value=f"$(POD_IP_DUMMY):{first.port}"))
        else:
            items.append(EnvItem(name="PADDLE_MASTER", value=f"{name}-{first.role}-0:{first.port}"))
        if "master" in specs:
            number = "PADDLE_SERVER_NUM" if one.role == "master" else "PADDLE_TRAINER_NUM"
            items.append(EnvItem(name=number, value="1"))
        return with_env(one.template, items)

    pods = drafts(name, namespace(found), specs, template)
    made = workload(found, _PADDLE, specs, pods, Success(groups=(everyone(pods, first.role),)))
    if found.get("spec", "elasticPolicy").given:
        made = replace(made, ignored=(*made.ignored, "elasticPolicy (as in the operator)"))
    return made


# -- XGBoostJob --------------------------------------------------------------------------------


_XGBOOST = Kind(
    name="XGBoostJob",
    specs="xgbReplicaSpecs",
    roles=("Master", "Worker"),
    container="xgboost",
    port_name="xgboostjob-port",
    port=9999,
    restart="Never",
)


def _xgboost(request: Request) -> Workload:
    found = request.job
    specs = replicas(found, _XGBOOST)
    if "master" not in specs or specs["master"].count != 1:
        raise found.get("spec", "xgbReplicaSpecs", "Master").bad("one Master")
    name = job_name(found)
    master = f"{name}-master-0"
    total = sum(one.count for one in specs.values())

    def template(one: Replicas, index: int) -> Template:
        rank = index if one.role == "master" else index + specs["master"].count
        env = {"MASTER_PORT": str(specs["master"].port), "MASTER_ADDR": master, "WORLD_SIZE": str(total)}
        env |= {"RANK": str(rank), "PYTHONUNBUFFERED": "1"}
        if total > 1 and "worker" in specs:
            workers = ",".join(f"{name}-worker-{i}" for i in range(specs["worker"].count))
            env |= {"WORKER_PORT": str(specs["worker"].port), "WORKER_ADDRS": workers}
        return with_env(one.template, env_items(env))

    pods = drafts(name, namespace(found), specs, template)
    return workload(found, _XGBOOST, specs, pods, Success(groups=((master,),)), {"MASTER_PORT": master})


# -- TFJob, full and with dynamic workers ------------------------------------------------------


_TENSORFLOW = Kind(
    name="TFJob",
    specs="tfReplicaSpecs",
    roles=("Chief", "Master", "PS", "Worker", "Evaluator"),
    container="tensorflow",
    port_name="tfjob-port",
    port=2222,
    restart="Never",
    fields=("successPolicy", "enableDynamicWorker"),
)


def _tensorflow(request: Request) -> Workload:
    found = request.job
    spec = found.get("spec")
    specs = replicas(found, _TENSORFLOW)
    name, space = job_name(found), namespace(found)
    dynamic = spec.get("enableDynamicWorker").flag()
    addresses = {
        role: [f"{name}-{role}-{i}.{space}.svc{request.dotted_domain}:{one.port}" for i in range(one.count)]
        for role, one in specs.items()
    }
    alone = sum(one.count for one in specs.values()) == 1

    longest = max(sum(map(len, each)) for each in addresses.values())
    if longest > MAX_VALUE_BYTES and not dynamic:
        text = f"fewer replicas: Linux takes {MAX_VALUE_BYTES} bytes in a variable, and TF_CONFIG would be longer"
        raise found.get("spec", _TENSORFLOW.specs).bad(text, found=longest)

    def template(one: Replicas, index: int) -> Template:
        if alone:
            return one.template
        made = _sparse(addresses, one.role, index) if dynamic else _full(addresses, one.role, index)
        config = json.dumps(made, separators=(",", ":"), ensure_ascii=False)
        return with_env(one.template, env_items({"TF_CONFIG": config}), only=_TENSORFLOW.container)

    pods = drafts(name, space, specs, template, request.dotted_domain)
    everybody = spec.get("successPolicy").choice(("", "AllWorkers"), "") == "AllWorkers"
    made = workload(found, _TENSORFLOW, specs, pods, Success(groups=(_judges(pods, everybody=everybody),)))
    return replace(made, rules=replace(made.rules, may_fail=everyone(pods, "worker"))) if dynamic else made


def _judges(pods: tuple[Draft, ...], *, everybody: bool) -> tuple[str, ...]:
    """Whose success is the job's."""
    chiefs = (*everyone(pods, "chief"), *everyone(pods, "master"))
    workers = everyone(pods, "worker")
    return chiefs or (workers if everybody else workers[:1])


def _full(addresses: Mapping[str, list[str]], role: str, index: int) -> dict[str, object]:
    cluster = {key: addresses[key] for key in sorted(addresses)}
    return {"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"}


def _sparse(addresses: Mapping[str, list[str]], role: str, index: int) -> dict[str, object]:
    """Everybody knows only itself; workers know all parameter servers."""
    worker: dict[str, str] = {}
    servers: list[str] | None = []
    if role == "worker":
        worker = {str(index): addresses["worker"][index]}
        servers = addresses.get("ps")
    elif role == "ps":
        servers = [addresses["ps"][index]]
    return {"cluster": {"worker": worker, "ps": servers}, "task": {"type": role, "index": index}}


_READERS = {"JAXJob": _jax, "PaddleJob": _paddle, "TFJob": _tensorflow, "XGBoostJob": _xgboost}


def read(request: Request) -> Workload:
    """The pods of a job of one of these kinds."""
    return _READERS[request.job.get("kind").text()](request)
