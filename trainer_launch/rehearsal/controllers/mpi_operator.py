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
    SSH_ARGS,
    ChildRules,
    Draft,
    EnvItem,
    File,
    Rules,
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
_ROLES = ("Launcher", "Worker")
_HOSTFILE = "/etc/mpi/hostfile"
_DISCOVERY = "/etc/mpi/discover_hosts.sh"
_NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
_BACKOFF = 6  # a Job's own default


class _Job(Struct, frozen=True, kw_only=True):
    name: str
    space: str
    slots: int
    workers: int
    implementation: str
    launcher_works: bool
    ssh: str

    def host(self, pod: str) -> str:
        return f"{pod}.{self.name}.{self.space}.svc"

    @property
    def hosts(self) -> list[str]:
        """Those that mpirun may use, in the order of the hostfile."""
        workers = [self.host(f"{self.name}-worker-{index}") for index in range(self.workers)]
        return [self.host(f"{self.name}-launcher"), *workers] if self.launcher_works else workers


def read(found: Field) -> Workload:
    """The pods of an MPIJob v2beta1."""
    spec = found.get("spec")
    spec.only(_SPEC)
    specs = spec.get("mpiReplicaSpecs")
    for key, role in specs.fields():
        if key not in _ROLES:
            raise role.bad(f"only the replica types {', '.join(_ROLES)}")
    launcher, worker = specs.get("Launcher"), specs.get("Worker")
    if not launcher.given or launcher.get("replicas").number(1) != 1:
        raise launcher.bad("one Launcher")
    job = _Job(
        name=v1.job_name(found),
        space=v1.namespace(found),
        slots=spec.get("slotsPerWorker").number(1),
        workers=worker.get("replicas").number(1, most=v1.MAX_REPLICAS) if worker.given else 0,
        implementation=spec.get("mpiImplementation").choice(("OpenMPI", "Intel", "MPICH"), "OpenMPI"),
        launcher_works=spec.get("runLauncherAsWorker").flag(),
        ssh=spec.get("sshAuthMountPath").text("/root/.ssh").rstrip("/"),
    )
    waits = spec.get("launcherCreationPolicy").choice(("AtStartup", "WaitForWorkersReady"), "AtStartup")
    templates = {"launcher": _read(launcher), **({"worker": _read(worker)} if worker.given else {})}
    drafts = [
        _draft(job, "worker", index, _worker(job, templates["worker"]), worker) for index in range(job.workers)
    ]
    front = _draft(job, "launcher", 0, _launcher(job, templates["launcher"]), launcher)
    if waits == "WaitForWorkersReady":
        front = replace(front, after=(f"{job.name}-worker=Ready",))
    return Workload(
        kind="MPIJob v2beta1",
        name=job.name,
        namespace=job.space,
        drafts=(front, *drafts),
        rules=_rules(found, job),
        ignored=v1.ignored(found, templates.values()),
    )


def _read(spec: Field) -> Template:
    spec.only(("replicas", "template", "restartPolicy"))
    return read_template(spec.get("template"))


def _rules(found: Field, job: _Job) -> Rules:
    rules = v1.rules(found, Success(groups=((f"{job.name}-launcher",),)))
    limit = _BACKOFF if rules.backoff_limit is None else rules.backoff_limit
    child = {f"{job.name}-launcher": ChildRules(backoff_limit=limit)}
    workers = tuple(f"{job.name}-worker-{index}" for index in range(job.workers))
    return replace(rules, family="mpi", backoff_limit=None, children=child, may_fail=workers)


def _draft(job: _Job, role: str, index: int, template: Template, spec: Field) -> Draft:
    name = f"{job.name}-launcher" if role == "launcher" else f"{job.name}-worker-{index}"
    default = "OnFailure" if role == "launcher" else "Never"
    return Draft(
        template=template,
        hostname=name,
        role=role,
        index=index,
        main=template.containers[0].name,
        restart=spec.get("restartPolicy").choice(RESTARTS[1:], default) or default,
        names=(name, f"{name}.{job.name}", f"{name}.{job.name}.{job.space}", job.host(name)),
        labels=_labels(job, role, index),
        child=f"{job.name}-{role}",
    )


def _labels(job: _Job, role: str, index: int) -> Mapping[str, str]:
    start = "training.kubeflow.org"
    shifted = index + 1 if role == "worker" and job.launcher_works else index
    return {
        f"{start}/operator-name": "mpi-operator",
        f"{start}/job-name": job.name,
        f"{start}/job-role": role,
        f"{start}/replica-index": str(shifted),
    }


def _launcher(job: _Job, template: Template) -> Template:
    told = {"K_MPI_JOB_ROLE": "launcher", **({} if job.launcher_works else _NO_GPUS)}
    colon = "" if job.implementation == "OpenMPI" else ":"
    slots = f"{colon or ' slots='}{job.slots}"
    files = {
        **_keys(job),
        _HOSTFILE: File("".join(f"{host}{slots}\n" for host in job.hosts), 0o444),
        _DISCOVERY: _discovery(job),
    }
    return _first(template, (*env_items(told), *_dialect(job)), files)


def _worker(job: _Job, template: Template) -> Template:
    made = _first(template, env_items({"K_MPI_JOB_ROLE": "worker"}), _keys(job))
    first, *others = made.containers
    if not first.command and not first.args:
        first = replace(first, command=("/usr/sbin/sshd", "-De"))
    return replace(made, containers=(first, *others))


def _dialect(job: _Job) -> tuple[EnvItem, ...]:
    if job.implementation == "OpenMPI":
        return open_mpi(_HOSTFILE, job.slots)
    if job.implementation == "Intel":
        return env_items(
            {
                "I_MPI_HYDRA_HOST_FILE": _HOSTFILE,
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_ARGS,
                "I_MPI_PERHOST": str(job.slots),
            }
        )
    return env_items({"HYDRA_HOST_FILE": _HOSTFILE, "HYDRA_LAUNCH_EXTRA_ARGS": SSH_ARGS})


def _keys(job: _Job) -> Mapping[str, File]:
    mode = 0o600 if job.ssh == "/root/.ssh" else 0o644
    return key_files(job.ssh, mode, mode)


def _first(template: Template, items: tuple[EnvItem, ...], files: Mapping[str, File]) -> Template:
    """Only the first container of a pod gets variables and files."""
    first, *others = template.containers
    first = replace(first, items=(*first.items, *items), files={**first.files, **files})
    return replace(template, containers=(first, *others))


def _discovery(job: _Job) -> File:
    """The launcher first, the others sorted as text; the operator rewrites it whenever a worker comes or goes."""
    pods = sorted(f"{job.name}-worker-{index}" for index in range(job.workers))
    first = [("", f"echo {job.host(f'{job.name}-launcher')}\n")] if job.launcher_works else []
    parts = (("", "#!/bin/sh\n"), *first, *((pod, f"echo {job.host(pod)}\n") for pod in pods))
    return File("".join(part for _, part in parts), 0o555, parts=parts)
