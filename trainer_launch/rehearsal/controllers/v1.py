"""Kinds of the v1 operator but PyTorchJob, and what all its kinds have in common. Pure.

kubeflow/trainer release-1.9: pkg/controller.v1/common, pkg/core, pkg/apis/kubeflow.org/v1/common_types.go, and
pkg/controller.v1/{jax/envvar,mpi,paddlepaddle/envvar,tensorflow/tensorflow,xgboost/xgboost}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.rehearsal.controllers.documents import Field, Request
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    Draft,
    EnvItem,
    File,
    Rules,
    Success,
    Template,
    Workload,
    env_items,
)
from trainer_launch.rehearsal.controllers.podspec import left_out, read_template

RESTARTS = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN = ("None", "Running", "All")
MAX_REPLICAS = 4096
_RUN_POLICY = ("cleanPodPolicy", "activeDeadlineSeconds", "backoffLimit")
_RUN_POLICY_IGNORED = ("suspend", "schedulingPolicy", "managedBy", "ttlSecondsAfterFinished")


class Kind(Struct, frozen=True):
    """What differs between the kinds."""

    name: str
    specs: str  # the field with the replica specs
    roles: tuple[str, ...]  # as the manifest writes them
    container: str  # that counts; "": each pod's first
    port_name: str
    port: int
    restart: str
    fields: tuple[str, ...] = ()  # of its spec, besides its run policy


class Replicas(Struct, frozen=True, kw_only=True):
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
    """Variables behind those of all main containers, or of the one that is named: of one name the last counts."""
    fresh = tuple(items)
    containers = (
        replace(one, items=(*one.items, *fresh)) if only in (None, one.name) else one for one in template.containers
    )
    return replace(template, containers=tuple(containers))


def workload(
    found: Field,
    kind: Kind,
    specs: Mapping[str, Replicas],
    made: Callable[[Replicas, int], Template],
    success: Callable[[tuple[Draft, ...]], Success],
) -> Workload:
    """The job with all pods of its replica specs, and its run policy; `made` gives each pod its template."""
    name, space = job_name(found), namespace(found)
    members = [(one, index) for one in specs.values() for index in range(one.count)]
    pods = tuple(_draft(name, space, one, index, made(one, index)) for one, index in members)
    return Workload(
        kind=kind.name,
        name=name,
        namespace=space,
        drafts=pods,
        rules=rules(found, success(pods)),
        ignored=ignored(found, [one.template for one in specs.values()]),
    )


def _draft(job: str, space: str, one: Replicas, index: int, template: Template) -> Draft:
    name, start = f"{job}-{one.role}-{index}", "training.kubeflow.org"
    return Draft(
        template=template,
        hostname=name,
        role=one.role,
        index=index,
        main=one.main,
        restart=one.restart,
        names=(name, f"{name}.{space}", f"{name}.{space}.svc"),
        labels={f"{start}/job-name": job, f"{start}/replica-type": one.role, f"{start}/replica-index": str(index)},
    )


def rules(found: Field, success: Success) -> Rules:
    """The run policy."""
    run = found.get("spec", "runPolicy")
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


def ignored(found: Field, templates: Iterable[Template]) -> tuple[str, ...]:
    """What this machine leaves out of the run policy and the pods, each once."""
    of_pods = (phrase for one in templates for phrase in one.ignored)
    return tuple(dict.fromkeys((*left_out(found.get("spec", "runPolicy"), _RUN_POLICY_IGNORED), *of_pods)))


def everyone(pods: Sequence[Draft], role: str) -> tuple[str, ...]:
    """The pods of a role by name."""
    return tuple(pod.hostname for pod in pods if pod.role == role)


def of_role(role: str) -> Callable[[tuple[Draft, ...]], Success]:
    """The job succeeds when all pods of this role have."""
    return lambda pods: Success(groups=(everyone(pods, role),))


# -- the kinds ---------------------------------------------------------------------------------


# Name, replica specs, roles, the container that counts, its port's name, the port, restartPolicy, other fields.
_JAX = Kind("JAXJob", "jaxReplicaSpecs", ("Worker",), "jax", "jaxjob-port", 6666, "Never")
_MPI = Kind(
    "MPIJob v1", "mpiReplicaSpecs", ("Launcher", "Worker"), "", "mpijob-port", 9999, "Never",
    ("slotsPerWorker", "cleanPodPolicy", "mainContainer"),
)  # fmt: skip
_PADDLE = Kind(
    "PaddleJob", "paddleReplicaSpecs", ("Master", "Worker"), "paddle", "master", 36543, "OnFailure",
    ("elasticPolicy",),
)  # fmt: skip
_MXNET = Kind(
    "MXJob", "mxReplicaSpecs", ("Scheduler", "Server", "Worker"), "mxnet", "mxjob-port", 9091, "Never", ("jobMode",)
)
PYTORCH = Kind(
    "PyTorchJob", "pytorchReplicaSpecs", ("Master", "Worker"), "pytorch", "pytorchjob-port", 23456, "OnFailure",
    ("elasticPolicy", "nprocPerNode"),
)  # fmt: skip
_TENSORFLOW = Kind(
    "TFJob", "tfReplicaSpecs", ("Chief", "Master", "PS", "Worker", "Evaluator"), "tensorflow", "tfjob-port", 2222,
    "Never", ("successPolicy", "enableDynamicWorker"),
)  # fmt: skip
_XGBOOST = Kind("XGBoostJob", "xgbReplicaSpecs", ("Master", "Worker"), "xgboost", "xgboostjob-port", 9999, "Never")


# -- JAXJob ------------------------------------------------------------------------------------


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

    made = workload(found, _JAX, specs, template, of_role("worker"))
    return replace(made, ports={"COORDINATOR_PORT": f"{name}-worker-0"})


# -- MXJob, up to v1.8 of the operator ---------------------------------------------------------


def _mxnet(request: Request) -> Workload:
    """Read as v1.7 does: pkg/controller.v1/mxnet/mxnet.go."""
    found = request.job
    mode = found.get("spec", "jobMode")
    if mode.text("MXTrain") != "MXTrain":
        raise mode.bad("MXTrain: jobs of TVM's tuner are not rehearsed")
    specs, name = replicas(found, _MXNET), job_name(found)
    counts = {role: specs[role].count if role in specs else 0 for role in ("scheduler", "server", "worker")}
    leader = "scheduler" if "scheduler" in specs else "worker"
    if leader == "worker" and counts != {"scheduler": 0, "server": 0, "worker": 1}:
        raise found.get("spec", _MXNET.specs, "Scheduler").bad("a Scheduler, whose end is that of the job")
    cluster = {
        role: [{"url": f"{name}-{role}-{index}", "port": one.port} for index in range(one.count)]
        for role, one in sorted(specs.items())
    }
    root = cluster.get("scheduler", [{"url": "", "port": 0}])[0]
    shared = {"cluster": cluster, "labels": dict.fromkeys(cluster, "")}

    def template(one: Replicas, index: int) -> Template:
        task = {"type": one.role, "index": index}
        env = {
            "MX_CONFIG": json.dumps({**shared, "task": task}, separators=(",", ":")),
            "DMLC_PS_ROOT_PORT": str(root["port"]),
            "DMLC_PS_ROOT_URI": str(root["url"]),
            "DMLC_NUM_SERVER": str(counts["server"]),
            "DMLC_NUM_WORKER": str(counts["worker"]),
            "DMLC_ROLE": one.role,
            "DMLC_USE_KUBERNETES": "1",
        }
        env |= {"DMLC_WORKER_ID": str(index)} if one.role == "worker" else {}
        return with_env(one.template, env_items(env))

    _fits("MX_CONFIG", len(json.dumps(shared)), found.get("spec", _MXNET.specs))
    made = workload(found, _MXNET, specs, template, of_role(leader))
    return replace(made, ports={"DMLC_PS_ROOT_PORT": str(root["url"])} if root["url"] else {})


# -- PaddleJob, collective and with parameter servers ------------------------------------------


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

    made = workload(found, _PADDLE, specs, template, of_role(first.role))
    if found.get("spec", "elasticPolicy").given:
        made = replace(made, ignored=(*made.ignored, "elasticPolicy (as in the operator)"))
    return made


# -- XGBoostJob --------------------------------------------------------------------------------


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

    made = workload(found, _XGBOOST, specs, template, of_role("master"))
    return replace(made, ports={"MASTER_PORT": master})


# -- TFJob, full and with dynamic workers ------------------------------------------------------


def _tensorflow(request: Request) -> Workload:
    found = request.job
    spec = found.get("spec")
    specs = replicas(found, _TENSORFLOW)
    name, space = job_name(found), namespace(found)
    dynamic = spec.get("enableDynamicWorker").flag()
    addresses = {
        role: [f"{name}-{role}-{i}.{space}.svc:{one.port}" for i in range(one.count)] for role, one in specs.items()
    }
    alone = sum(one.count for one in specs.values()) == 1

    if not dynamic:
        _fits("TF_CONFIG", max(sum(map(len, each)) for each in addresses.values()), spec.get(_TENSORFLOW.specs))

    def template(one: Replicas, index: int) -> Template:
        if alone:
            return one.template
        made = _sparse(addresses, one.role, index) if dynamic else _full(addresses, one.role, index)
        config = json.dumps(made, separators=(",", ":"), ensure_ascii=False)
        return with_env(one.template, env_items({"TF_CONFIG": config}), only=_TENSORFLOW.container)

    everybody = spec.get("successPolicy").choice(("", "AllWorkers"), "") == "AllWorkers"

    def success(pods: tuple[Draft, ...]) -> Success:
        chiefs = (*everyone(pods, "chief"), *everyone(pods, "master"))
        workers = everyone(pods, "worker")
        return Success(groups=(chiefs or (workers if everybody else workers[:1]),))

    made = workload(found, _TENSORFLOW, specs, template, success)
    workers = everyone(made.drafts, "worker")
    return replace(made, rules=replace(made.rules, may_fail=workers)) if dynamic else made


def _fits(name: str, length: int, specs: Field) -> None:
    if length > MAX_VALUE_BYTES:
        text = f"fewer replicas: Linux takes {MAX_VALUE_BYTES} bytes in a variable, and {name} would be longer"
        raise specs.bad(text, found=length)


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


# -- MPIJob v1, whose agents are started by `kubectl exec` -------------------------------------


_FOLDER = "/etc/mpi"
_KUBECTL = "/opt/kube"


def _mpi(request: Request) -> Workload:
    found = request.job
    spec = found.get("spec")
    specs = replicas(found, _MPI)
    if specs.get("launcher") is None or specs["launcher"].count != 1:
        raise spec.get("mpiReplicaSpecs", "Launcher").bad("one Launcher")
    name, space = job_name(found), namespace(found)
    slots = spec.get("slotsPerWorker").number(1)
    workers = [f"{name}-worker-{i}" for i in range(specs["worker"].count)] if "worker" in specs else []
    hosts = [f"{name}-launcher", *workers] if _has_gpu(specs["launcher"].template) else workers
    files = {
        f"{_FOLDER}/kubexec.sh": File(_kubexec(spec.get("mainContainer").text("")), 0o555),
        f"{_FOLDER}/hostfile": File("".join(f"{host} slots={slots}\n" for host in hosts), 0o444),
        f"{_FOLDER}/discover_hosts.sh": _discovery(f"{name}-launcher", hosts, slots),
    }

    def template(one: Replicas, _: int) -> Template:
        if one.role == "worker":
            return _worker(one.template, files)
        return _launcher(one.template, files, space)

    made = workload(found, _MPI, specs, template, lambda _: Success(groups=((f"{name}-launcher",),)))
    clean = spec.get("cleanPodPolicy").choice(CLEAN, made.rules.clean)
    left = (*made.ignored, "init container kubectl-delivery: a stand-in for kubectl is there")
    placed = tuple(_placed(draft, name) for draft in made.drafts)
    return replace(made, drafts=placed, rules=replace(made.rules, clean=clean), ignored=left)


def _placed(draft: Draft, job: str) -> Draft:
    """The launcher has no index in its name."""
    if draft.role != "launcher":
        return draft
    return replace(draft, hostname=f"{job}-launcher", names=(f"{job}-launcher",))


def _has_gpu(template: Template) -> bool:
    return any(name.endswith("gpu") for one in template.containers for name in one.limits)


def _launcher(template: Template, files: Mapping[str, File], space: str) -> Template:
    first, *others = template.containers
    given = {item.name for item in first.items}
    env = {
        "OMPI_MCA_plm_rsh_agent": f"{_FOLDER}/kubexec.sh",
        "OMPI_MCA_orte_default_hostfile": f"{_FOLDER}/hostfile",
    }
    if not _has_gpu(template):
        env |= {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
    intel = {"I_MPI_HYDRA_BOOTSTRAP": "rsh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{_FOLDER}/kubexec.sh"}
    env |= {key: value for key, value in intel.items() if key not in given}
    changed = replace(first, items=(*first.items, *env_items(env)), files={**first.files, **files})
    delivery = Container(
        name="kubectl-delivery",
        items=(EnvItem(name="TARGET_DIR", value=_KUBECTL), EnvItem(name="NAMESPACE", value=space)),
        platforms=True,
    )
    return replace(template, containers=(changed, *others), init=(*template.init, delivery))


def _worker(template: Template, files: Mapping[str, File]) -> Template:
    """A worker without a command sleeps, whatever its args were."""
    first, *others = template.containers
    if not first.command:
        first = replace(first, command=("sleep",), args=("365d",))
    agent = f"{_FOLDER}/kubexec.sh"
    return replace(template, containers=(replace(first, files={**first.files, agent: files[agent]}), *others))


def _discovery(launcher: str, hosts: Sequence[str], slots: int) -> File:
    """The launcher first and a blank line, the others sorted as text, no newline at the end.

    The operator rewrites it whenever a worker comes or goes.
    """
    first = [("", f"\necho {launcher}:{slots}\n")] if launcher in hosts else []
    workers = sorted(host for host in hosts if host != launcher)
    parts = (("", "#!/bin/sh"), *first, *((host, f"\necho {host}:{slots}") for host in workers))
    return File("".join(part for _, part in parts), 0o555, parts=parts)


def _kubexec(container: str) -> str:
    chosen = f" --container {container}" if container else ""
    return (
        f'#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n{_KUBECTL}/kubectl exec ${{POD_NAME}}{chosen} -- /bin/sh -c "$*"'
    )


_READERS = {
    "JAXJob": _jax,
    "MPIJob": _mpi,
    "MXJob": _mxnet,
    "PaddleJob": _paddle,
    "TFJob": _tensorflow,
    "XGBoostJob": _xgboost,
}


def read(request: Request) -> Workload:
    """The pods of a job of one of these kinds."""
    return _READERS[request.job.get("kind").text()](request)
