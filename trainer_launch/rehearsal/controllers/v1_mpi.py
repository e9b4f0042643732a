"""MPIJob v1, whose agents are started by `kubectl exec`: kubeflow/trainer release-1.9, pkg/controller.v1/mpi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.documents import Request
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    Draft,
    EnvItem,
    File,
    Success,
    Template,
    Workload,
    env_items,
)

KIND = v1.Kind(
    name="MPIJob v1",
    specs="mpiReplicaSpecs",
    roles=("Launcher", "Worker"),
    container="",  # the first one, whatever its name
    port_name="mpijob-port",
    port=9999,
    restart="Never",
    fields=("slotsPerWorker", "cleanPodPolicy", "mainContainer"),
)
_FOLDER = "/etc/mpi"
_KUBECTL = "/opt/kube"


def read(request: Request) -> Workload:
    """The pods of an MPIJob v1."""
    found = request.job
    spec = found.get("spec")
    specs = v1.replicas(found, KIND)
    if specs.get("launcher") is None or specs["launcher"].count != 1:
        raise spec.get("mpiReplicaSpecs", "Launcher").bad("one Launcher")
    name, space = v1.job_name(found), v1.namespace(found)
    slots = spec.get("slotsPerWorker").number(1)
    workers = [f"{name}-worker-{i}" for i in range(specs["worker"].count)] if "worker" in specs else []
    hosts = [f"{name}-launcher", *workers] if _has_gpu(specs["launcher"].template) else workers
    files = {
        f"{_FOLDER}/kubexec.sh": File(_kubexec(spec.get("mainContainer").text("")), 0o555),
        f"{_FOLDER}/hostfile": File("".join(f"{host} slots={slots}\n" for host in hosts), 0o444),
        f"{_FOLDER}/discover_hosts.sh": _discovery(f"{name}-launcher", hosts, slots),
    }

    def template(one: v1.Replicas, _: int) -> Template:
        if one.role == "worker":
            return _worker(one.template, files)
        return _launcher(one.template, files, space)

    pods = tuple(_placed(draft, name) for draft in v1.drafts(name, space, specs, template))
    made = v1.workload(found, KIND, specs, pods, Success(groups=((f"{name}-launcher",),)))
    clean = spec.get("cleanPodPolicy").choice(v1.CLEAN, made.rules.clean)
    ignored = (*made.ignored, "init container kubectl-delivery: a stand-in for kubectl is there")
    return replace(made, rules=replace(made.rules, clean=clean), ignored=ignored)


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
    """Rewritten by the operator whenever a worker comes or goes."""
    first = [("", f"\necho {launcher}:{slots}\n")] if launcher in hosts else []
    workers = sorted(host for host in hosts if host != launcher)
    parts = (("", "#!/bin/sh"), *first, *((host, f"\necho {host}:{slots}") for host in workers))
    return File(discovery(launcher, hosts, slots), 0o555, parts=parts)


def discovery(launcher: str, running: Sequence[str], slots: int) -> str:
    """discover_hosts.sh for the hosts that run: the launcher first and a blank line, the others sorted as text."""
    lines = [f"echo {launcher}:{slots}\n"] if launcher in running else []
    lines += [f"echo {host}:{slots}" for host in sorted(running) if host != launcher]
    return "\n".join(["#!/bin/sh", *lines])


def _kubexec(container: str) -> str:
    chosen = f" --container {container}" if container else ""
    return (
        f'#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n{_KUBECTL}/kubectl exec ${{POD_NAME}}{chosen} -- /bin/sh -c "$*"'
    )
