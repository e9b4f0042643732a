"""MPIJob v2beta1 of mpi-operator: Open MPI, Intel MPI and MPICH.

kubeflow/mpi-operator pkg/controller/mpi_job_controller.go.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import (
    HOSTFILE,
    SSH_ARGS,
    ChildRules,
    Draft,
    EnvItem,
    PodFile,
    Success,
    Template,
    Workload,
    env_items,
    key_files,
    open_mpi,
)
from trainer_launch.rehearsal.controllers.podspec import RESTARTS, read_template

_SPEC = (
    "slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath",
    "launcherCreationPolicy", "mpiImplementation",
)  # fmt: skip
_LAUNCHER, _WORKER = "launcher", "worker"
_DEFAULT_RESTARTS = {_LAUNCHER: "OnFailure", _WORKER: "Never"}
_DISCOVERY = "/etc/mpi/discover_hosts.sh"
_NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
_BACKOFF = 6  # a Job's own default


class _Job(Struct, frozen=True, kw_only=True):
    name: str
    space: str
    slots: int
    workers: tuple[str, ...]  # their pods
    implementation: str
    launcher_works: bool

    @property
    def launcher(self) -> str:
        """The launcher's pod."""
        return f"{self.name}-{_LAUNCHER}"

    def host(self, pod: str) -> str:
        """A pod's name as mpirun has it."""
        return f"{pod}.{self.name}.{self.space}.svc"


def read(document: Field) -> Workload:
    """The pods of an MPIJob v2beta1."""
    spec, name = document.get("spec"), v1.job_name(document)
    spec.only(_SPEC)
    specs = spec.get("mpiReplicaSpecs")
    for key, role in specs.fields():
        if key not in ("Launcher", "Worker"):
            raise role.bad("only the replica types Launcher, Worker")
    launcher, worker = specs.get("Launcher"), specs.get("Worker")
    if not launcher.given or launcher.get("replicas").number(1) != 1:
        raise launcher.bad("one Launcher")
    count = worker.get("replicas").number(1, most=v1.MAX_REPLICAS) if worker.given else 0
    job = _Job(
        name=name,
        space=v1.namespace(document),
        slots=spec.get("slotsPerWorker").number(1),
        workers=tuple(f"{name}-{_WORKER}-{index}" for index in range(count)),
        implementation=spec.get("mpiImplementation").choice(("OpenMPI", "Intel", "MPICH"), "OpenMPI"),
        launcher_works=spec.get("runLauncherAsWorker").flag(),
    )
    folder = spec.get("sshAuthMountPath").text("/root/.ssh").rstrip("/")
    mode = 0o600 if folder == "/root/.ssh" else 0o644
    keys = key_files(folder, mode, mode)
    template = _template(launcher, _launcher_items(job), {**keys, **_files(job)})
    front = _draft(job, _LAUNCHER, 0, job.launcher, template)
    if spec.get("launcherCreationPolicy").choice(("AtStartup", "WaitForWorkersReady"), "AtStartup") != "AtStartup":
        front = replace(front, after=(f"{name}-{_WORKER}=Ready",))
    drafts = [front]
    if worker.given:
        template = _with_sshd(_template(worker, env_items({"K_MPI_JOB_ROLE": _WORKER}), keys))
        drafts += [_draft(job, _WORKER, index, pod, template) for index, pod in enumerate(job.workers)]
    rules = v1.rules(document, Success(groups=((job.launcher,),)))
    limit = _BACKOFF if rules.backoff_limit is None else rules.backoff_limit
    children = {job.launcher: ChildRules(backoff_limit=limit)}
    return Workload(
        kind="MPIJob v2beta1",
        name=name,
        namespace=job.space,
        drafts=tuple(drafts),
        rules=replace(rules, family="mpi", backoff_limit=None, children=children),
    )


def _template(spec: Field, items: tuple[EnvItem, ...], files: Mapping[str, PodFile]) -> Template:
    """The template of a role; only the first container of a pod gets variables and files."""
    spec.only(("replicas", "template", "restartPolicy"))
    template = read_template(spec.get("template"))
    restart = spec.get("restartPolicy").choice(RESTARTS[1:], "")
    first, *others = template.containers
    first = replace(first, items=(*first.items, *items), files={**first.files, **files})
    return replace(template, containers=(first, *others), restart=restart or None)


def _with_sshd(template: Template) -> Template:
    first, *others = template.containers
    sshd = replace(first, command=("/usr/sbin/sshd", "-De"))
    return template if first.command or first.args else replace(template, containers=(sshd, *others))


def _draft(job: _Job, role: str, index: int, name: str, template: Template) -> Draft:
    shifted = index + 1 if role == _WORKER and job.launcher_works else index
    labels = {"operator-name": "mpi-operator", "job-name": job.name}
    labels |= {"job-role": role, "replica-index": str(shifted)}
    return Draft(
        template=template,
        hostname=name,
        role=role,
        index=index,
        main=template.containers[0].name,
        restart=template.restart or _DEFAULT_RESTARTS[role],
        names=(name, f"{name}.{job.name}", f"{name}.{job.name}.{job.space}", job.host(name)),
        labels={f"training.kubeflow.org/{key}": value for key, value in labels.items()},
        child=f"{job.name}-{role}",
    )


def _launcher_items(job: _Job) -> tuple[EnvItem, ...]:
    own = env_items({"K_MPI_JOB_ROLE": _LAUNCHER, **({} if job.launcher_works else _NO_GPUS)})
    if job.implementation == "OpenMPI":
        return (*own, *open_mpi(HOSTFILE, job.slots))
    if job.implementation == "MPICH":
        return (*own, *env_items({"HYDRA_HOST_FILE": HOSTFILE, "HYDRA_LAUNCH_EXTRA_ARGS": SSH_ARGS}))
    ssh = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_ARGS, "I_MPI_PERHOST": str(job.slots)}
    return (*own, *env_items({"I_MPI_HYDRA_HOST_FILE": HOSTFILE, **ssh}))


def _files(job: _Job) -> dict[str, PodFile]:
    """The hostfile, and a script that names the same hosts: first the launcher, then the others sorted as text."""
    slots = f" slots={job.slots}" if job.implementation == "OpenMPI" else f":{job.slots}"
    own = [job.launcher] if job.launcher_works else []
    hostfile = "".join(f"{job.host(pod)}{slots}\n" for pod in (*own, *job.workers))
    script = "".join(["#!/bin/sh\n", *(f"echo {job.host(pod)}\n" for pod in (*own, *sorted(job.workers)))])
    return {HOSTFILE: PodFile(hostfile, 0o444), _DISCOVERY: PodFile(script, 0o555)}
