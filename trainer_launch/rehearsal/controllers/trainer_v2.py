"""TrainJob of Kubeflow Trainer v2: its JobSet, with what the TrainJob and its runtime's policy change in it.

kubeflow/trainer pkg/runtime/core/trainingruntime.go and pkg/runtime/framework/plugins; PlainML injects nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import parse_quantity, shown
from trainer_launch.rehearsal.controllers import jobset
from trainer_launch.rehearsal.controllers.documents import RUNTIMES, Field
from trainer_launch.rehearsal.controllers.jobset import NODE, JobSet, ReplicatedJob
from trainer_launch.rehearsal.controllers.pod_values import (
    COMPLETION_INDEX,
    HOSTFILE,
    Container,
    EnvItem,
    PodFile,
    Workload,
    env_items,
    key_files,
    open_mpi,
    upserted,
)
from trainer_launch.rehearsal.controllers.podspec import ignore_resources, quantities, read_env, read_template
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS, job_name, namespace

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
LAUNCHER = "launcher"
TRAINER = "trainer"
INITIALIZERS = ("dataset-initializer", "model-initializer")
POLICIES = ("torch", "mpi", "jax", "xgboost", "flux")
PORT = 29500
PUBLISHED = Path(__file__).with_name("runtimes.json")  # the manifests that Trainer is released with, by name
_TRAINJOB = (
    "runtimeRef", "trainer", "labels", "annotations", "podTemplateOverrides", "podSpecOverrides",
    "runtimePatches",
)  # fmt: skip
_TRAINER = ("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode")
_TORCH = ("numProcPerNode", "envInjection")
_MPI = ("numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode")
_TUNE = ("tune", "run")
_PORTS = {"torch": ("PET_MASTER_PORT",), "xgboost": ("DMLC_TRACKER_PORT",)}


class TrainJob(JobSet, frozen=True, kw_only=True):
    """A TrainJob and its runtime, read: its JobSet, and what the policy goes by."""

    policy: str  # torch, mpi, jax, xgboost, flux, or "" for PlainML
    policy_field: Field
    job: Field

    @property
    def trainer(self) -> Field:
        """The TrainJob's own wishes for its nodes."""
        return self.job.get("spec", "trainer")

    @property
    def main(self) -> ReplicatedJob | None:
        """The replicatedJob whose pods are the TrainJob's nodes."""
        return next((job for job in self.jobs if _ancestor(job) == TRAINER), None)

    @property
    def node_0(self) -> str:
        """The address that controllers write for the first node, whatever the subdomain is."""
        return f"{self.name}-{NODE}-0-0.{self.name}"


def read(document: Field) -> Workload:
    """The pods of a TrainJob."""
    job = _trainjob(document)
    if job.policy == "flux":
        raise UsageError(
            f"{document.where}: a Flux job is not rehearsed, because flux run and its controller's scripts "
            "are not on this machine; rehearse its program with --nodes N -- PROGRAM"
        )
    job = _mpi(job) if job.policy == "mpi" else _with_variables(job)
    made = jobset.workload(job, "TrainJob")
    return replace(
        made,
        ports=dict.fromkeys(_PORTS.get(job.policy, ()), f"{job.name}-{NODE}-0-0"),
    )


def _trainjob(document: Field) -> TrainJob:
    spec, name = document.get("spec"), job_name(document)
    spec.only(_TRAINJOB)
    spec.get("trainer").only(_TRAINER)
    runtime = _runtime(document)
    runtime.get("spec").only(("mlPolicy", "template"))
    policies = runtime.get("spec", "mlPolicy")
    policies.only(("numNodes", *POLICIES))
    policy = next((each for each in POLICIES if policies.get(each).given), "")
    template = runtime.get("spec", "template", "spec")
    nodes = policies.get("numNodes").number(1, least=1, most=MAX_REPLICAS)
    # The MPI plugin gives the TrainJob's own number to the replicatedJob called node, and to no other.
    if policy != "mpi":
        nodes = spec.get("trainer", "numNodes").number(nodes, least=1, most=MAX_REPLICAS)
    jobs = jobset.replicated_jobs(template, name)
    names = tuple(job.get("name").text() for job in jobs)
    made = TrainJob(
        name=name,
        space=namespace(document),
        subdomain=template.get("network", "subdomain").name("") or name,
        spec=template,
        jobs=tuple(_replicated(_patched(job, spec, names), nodes) for job in jobs),
        policy=policy,
        policy_field=policies.get(policy) if policy else Field(None, policies.path, policies.where),
        job=document,
    )
    return replace(made, jobs=tuple(_wished(job, made) for job in made.jobs))


def _runtime(document: Field) -> Field:
    """The runtime that runtimeRef means among those given with the job, else one that Trainer is released with."""
    reference, space = document.get("spec", "runtimeRef"), namespace(document)
    reference.only(("name", "kind", "apiGroup"))
    name, kind = reference.get("name").text(), reference.get("kind").choice(RUNTIMES, RUNTIMES[0])
    given = document.configs.runtimes
    for runtime in given:
        if (runtime.get("metadata", "name").text(), *_scope(runtime, space)) == (name, kind, space):
            version = runtime.get("apiVersion")
            if not version.text().startswith("trainer.kubeflow.org/"):
                raise version.bad("trainer.kubeflow.org/v1alpha1, as the TrainJob has it")
            return replace(runtime, configs=document.configs)
    if name in published() and kind == RUNTIMES[0]:
        return Field({"spec": published()[name]}, "", f"the published runtime {name}", document.configs)
    there = ", ".join(_words(runtime, space) for runtime in given) or "none"
    raise reference.get("name").bad(
        f"a {kind} from one of the files (found: {there}), or one that Trainer is released "
        f"with ({', '.join(published())}); add its file with another -f, or set runtimeRef.kind"
    )


def _scope(runtime: Field, space: str) -> tuple[str, str]:
    """The runtime's kind, and the namespace of the TrainJobs that may refer to it; it is in `space`."""
    kind = runtime.get("kind").text()
    return kind, space if kind == RUNTIMES[0] else runtime.get("metadata", "namespace").text("") or space


def _words(runtime: Field, space: str) -> str:
    kind, own = _scope(runtime, space)
    where = "" if own == space else f" of namespace {own}"
    return f"{kind} {runtime.get('metadata', 'name').text()}{where}"


@cache
def published() -> Mapping[str, Any]:
    """The specs of the runtimes that Trainer is released with, by name."""
    specs: Mapping[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))["specs"]
    return specs


def _ancestor(job: ReplicatedJob) -> str:
    """The step of a TrainJob that a replicatedJob stands for: trainer, an initializer, or none."""
    return job.field.get("template", "metadata", "labels", ANCESTOR).text("")


def _replicated(field: Field, nodes: int) -> ReplicatedJob:
    batch = field.get("template", "spec")
    job = ReplicatedJob(
        name=field.get("name").name(),
        count=batch.get("parallelism").number(1, least=1, most=MAX_REPLICAS),
        replicas=field.get("replicas").number(1, least=1, most=MAX_REPLICAS),
        template=read_template(batch.get("template")),
        field=field,
    )
    if _ancestor(job) == TRAINER:
        return replace(job, count=nodes, replicas=1)
    return replace(job, replicas=1) if _ancestor(job) in INITIALIZERS else job


def _patched(job: Field, spec: Field, names: tuple[str, ...]) -> Field:
    """A replicatedJob with the TrainJob's patches, of all versions, over its template; `names` are those of all."""
    name, value = job.get("name").text(), job.value

    def is_meant(target: Field) -> bool:
        wanted = target.get("name")
        if wanted.text() not in names:
            wanted.ignore(f"{wanted.path} {shown(wanted.text())}: the runtime has no such replicatedJob")
        return wanted.text() == name

    for patch in spec.get("runtimePatches").items():
        for over in patch.get("trainingRuntimeSpec", "template", "spec", "replicatedJobs").items():
            if is_meant(over) and over.get("template").given:
                value = {**value, "template": merged(value.get("template"), over.get("template").value)}
    for key in ("podTemplateOverrides", "podSpecOverrides"):
        for over in spec.get(key).items():
            if True in [is_meant(target) for target in over.get("targetJobs").items()]:
                # v2.0 has the fields of the pod beside targetJobs, v2.1 below spec.
                is_new = key == "podTemplateOverrides"
                _check_containers(job, over.get("spec") if is_new else over)
                patched = {
                    name: field.value for name, field in over.fields() if name != "targetJobs" and field.given
                }
                value = merged(
                    value, {"template": {"spec": {"template": patched if is_new else {"spec": patched}}}}
                )
    return replace(job, value=value)


def _check_containers(job: Field, over: Field) -> None:
    """See that an override has no container beside those of its job. Raises UsageError: it has one."""
    for kind in ("containers", "initContainers"):
        there = job.get("template", "spec", "template", "spec", kind).items()
        names = [container.get("name").text() for container in there]
        for name in (container.get("name") for container in over.get(kind).items()):
            if name.text() not in names:
                raise name.bad(f"one of the runtime's {kind} ({', '.join(names) or 'none'})")


def _wished(job: ReplicatedJob, made: TrainJob) -> ReplicatedJob:
    """The trainer's container gets the TrainJob's command, arguments, resources and variables."""
    if _ancestor(job) in INITIALIZERS:
        for container in job.template.containers:
            if not container.command and not container.args:
                job.field.ignore(f"{job.name}: its program is in its image")
        return _on_containers(
            job, lambda each: replace(each, platforms=not (each.command or each.args)), _ancestor(job)
        )
    wish, is_trainer = made.trainer, _ancestor(job) == TRAINER
    works = made.policy == "mpi" and made.policy_field.get("runLauncherAsNode").flag() and job.name == NODE
    if not wish.given or not (is_trainer or works):
        return job
    ignore_resources(wish, *_resources(wish))

    def given(container: Container) -> Container:
        changed = upserted(container, read_env(wish.get("env")))
        if is_trainer and wish.get("command").given:
            changed = replace(changed, command=wish.get("command").texts())
        if is_trainer and wish.get("args").given:
            changed = replace(changed, args=wish.get("args").texts())
        return changed

    return _on_containers(job, given)


def _on_containers(job: ReplicatedJob, change: Callable[[Container], Container], name: str = NODE) -> ReplicatedJob:
    """The job with its container of this name changed."""
    containers = (change(each) if each.name == name else each for each in job.template.containers)
    return replace(job, template=replace(job.template, containers=tuple(containers)))


def _resources(wish: Field) -> tuple[Mapping[str, str], Mapping[str, str]]:
    resources = wish.get("resourcesPerNode")
    return quantities(resources.get("limits")), quantities(resources.get("requests"))


# The field by which members of a list of this name are matched; every other list is replaced as a whole.
_NAMED = ("containers", "initContainers", "ephemeralContainers", "env", "volumes", "imagePullSecrets")
_KEYS = {
    **dict.fromkeys(_NAMED, "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """`base` with `patch` over it, as Kubernetes' strategic merge has it; null removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        kept = {key: value for key, value in base.items() if key not in patch or patch[key] is not None}
        over = {key: merged(base.get(key), value, key) for key, value in patch.items() if value is not None}
        return {**kept, **over}
    if not (isinstance(base, list) and isinstance(patch, list) and name in _KEYS):
        return patch
    made, fresh = list(base), []
    for item in patch:
        key = item.get(_KEYS[name]) if isinstance(item, dict) else None
        keys = [old.get(_KEYS[name]) if isinstance(old, dict) else None for old in made]
        if key is None or key not in keys:
            fresh.append(item)
        else:
            made[keys.index(key)] = merged(made[keys.index(key)], item)
    return [*fresh, *made]  # as Kubernetes has it: what is new comes first


def _with_variables(job: TrainJob) -> TrainJob:
    """The policy's variables for the trainer's container, and for the targets of torch's envInjection."""
    items = _variables(job)
    if job.policy == "torch":
        job.policy_field.only(_TORCH)
        if job.trainer.get("command").texts() == _TUNE:
            job.trainer.ignore("the recipe and configuration that Trainer adds to tune run")
    if job.trainer.given and job.main is not None:
        job = _with(job, _on_containers(job.main, lambda container: upserted(container, items)))
    for target in job.policy_field.get("envInjection", "targets").items():
        job = _injected(job, target, items)
    return job


def _variables(job: TrainJob) -> tuple[EnvItem, ...]:
    """The policy's variables in the order of the controller; a container that has the first has them all."""
    nodes, port = job.main.count if job.main else 1, str(PORT)
    if job.policy == "torch":
        return (
            *env_items({"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": _nproc(job)}),
            _index("PET_NODE_RANK"),
            *env_items({"PET_MASTER_ADDR": job.node_0, "PET_MASTER_PORT": port}),
        )
    if job.policy == "jax":  # one process per node, whatever its devices are
        address = {"JAX_COORDINATOR_ADDRESS": f"{job.node_0}:{port}"}
        return (*env_items({"JAX_NUM_PROCESSES": str(nodes)}), _index("JAX_PROCESS_ID"), *env_items(address))
    if job.policy == "xgboost":  # a tracker on node 0, and one worker per GPU
        workers = {"DMLC_NUM_WORKER": str(nodes * max(1, _gpus(job)))}
        tracker = env_items({"DMLC_TRACKER_URI": job.node_0, "DMLC_TRACKER_PORT": port})
        return (*tracker, _index("DMLC_TASK_ID"), *env_items(workers))
    return ()


def _index(name: str) -> EnvItem:
    return EnvItem(name=name, field=COMPLETION_INDEX)


def _injected(job: TrainJob, target: Field, items: tuple[EnvItem, ...]) -> TrainJob:
    """All five variables for a target, in any replicatedJob, init containers too."""
    target.only(("jobName", "containerNames"))
    name, chosen = target.get("jobName").choice(tuple(each.name for each in job.jobs)), target.get("containerNames")
    changed = next(each for each in job.jobs if each.name == name)
    template = changed.template
    names = tuple(container.name for container in (*template.init, *template.containers))
    wanted = [container.choice(names) for container in chosen.items()]

    def given(container: Container) -> Container:
        return upserted(container, items) if container.name in wanted else container

    init, containers = tuple(map(given, template.init)), tuple(map(given, template.containers))
    return _with(job, replace(changed, template=replace(template, init=init, containers=containers)))


def _with(job: TrainJob, changed: ReplicatedJob) -> TrainJob:
    return replace(job, jobs=tuple(changed if each.name == changed.name else each for each in job.jobs))


def _nproc(job: TrainJob) -> str:
    """An integer as given; auto becomes the number of CPUs where no GPU is asked for."""
    given = job.trainer.get("numProcPerNode")
    if not given.given:
        given = job.policy_field.get("numProcPerNode")
    if isinstance(given.value, str):  # until v2.1
        word = given.choice(("auto", "cpu", "gpu"))
    else:
        word = str(given.number(least=1)) if given.given else "auto"
    if word == "cpu" or (word == "auto" and not _gpus(job)):
        limits, requests = _counted_resources(job)
        return str(max(1, requests.get("cpu", 0) or limits.get("cpu", 0)))
    return word


def _gpus(job: TrainJob) -> int:
    """GPUs as Trainer v2 counts them: any resource with gpu in its name, requests first."""
    limits, requests = _counted_resources(job)
    first = (next((each[name] for name in each if "gpu" in name.lower()), 0) for each in (requests, limits))
    return next(filter(None, first), 0)


def _counted_resources(job: TrainJob) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Limits and requests by which the controller counts processes.

    These are the TrainJob's own resourcesPerNode, not merged with the runtime's; without them, those of the first
    replicatedJob that is called node or is the trainer.
    """
    nodes = (each.template.container(NODE) for each in job.jobs if each.name == NODE or _ancestor(each) == TRAINER)
    first = next((container for container in nodes if container is not None), None)
    limits, requests = (first.limits, first.requests) if first else ({}, {})
    if job.trainer.get("resourcesPerNode").given:
        limits, requests = _resources(job.trainer)
    return _rounded(limits), _rounded(requests)


def _rounded(amounts: Mapping[str, str]) -> Mapping[str, int]:
    return {name: parse_quantity(amount) or 0 for name, amount in amounts.items()}


def _mpi(job: TrainJob) -> TrainJob:
    """Keys for the launcher and the nodes; variables and hostfile for the launcher."""
    policy = job.policy_field
    policy.only(_MPI)
    policy.get("mpiImplementation").choice(("OpenMPI",), "OpenMPI")  # Trainer up to v2.3 knows no other
    works = policy.get("runLauncherAsNode").flag()
    wish = job.trainer.get("numNodes")
    if wish.given:  # it counts the launcher too where that is a node; the launcher keeps mlPolicy.numNodes
        nodes = wish.number(least=1, most=MAX_REPLICAS)
        count = max(nodes - 1, 1) if works else nodes
        for each in job.jobs:
            job = _with(job, replace(each, count=count)) if each.name == NODE else job
    slots = _slots(job)
    env = open_mpi(HOSTFILE, slots)
    hosts = [
        f"{child}-{index}.{job.subdomain}"
        for each in job.jobs
        if each.name == NODE or (each.name == LAUNCHER and works)
        for child in job.children(each)
        for index in range(each.count)
    ]
    hostfile = {HOSTFILE: PodFile("".join(f"{host} slots={slots}\n" for host in hosts), 0o444)}
    keys = key_files(policy.get("sshAuthMountPath").text("/root/.ssh").rstrip("/"), 0o640, 0o644)

    def launcher(container: Container) -> Container:
        return upserted(replace(container, files={**container.files, **keys, **hostfile}), env)

    def node(container: Container) -> Container:
        return replace(container, files={**container.files, **keys})

    changes = {LAUNCHER: launcher, NODE: node}
    jobs = (_on_containers(each, changes[each.name]) if each.name in changes else each for each in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _slots(job: TrainJob) -> int:
    given = job.trainer.get("numProcPerNode")
    if given.given:
        return given.number(least=1)
    slots, devices = job.policy_field.get("numProcPerNode").number(1, least=1), _gpus(job)
    return devices if slots == 1 and devices > 1 else slots
