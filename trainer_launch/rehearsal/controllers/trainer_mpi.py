"""The MPI policy of a TrainingRuntime: keys, hostfile and Open MPI's variables. Pure.

kubeflow/trainer pkg/runtime/framework/plugins/mpi/mpi.go.
"""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.rehearsal.controllers import quantity
from trainer_launch.rehearsal.controllers.pod_values import Container, File
from trainer_launch.rehearsal.controllers.pods import env_items, upserted
from trainer_launch.rehearsal.controllers.runtime import (
    LAUNCHER,
    NODE,
    ReplicatedJob,
    TrainJob,
    on_containers,
    resources_of,
)
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS

_POLICY = ("numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode")
_HOSTFILE = "/etc/mpi/hostfile"
_RESERVED = (
    "OMPI_MCA_orte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames",
    "OMPI_MCA_orte_set_default_slots",
    "OMPI_MCA_plm_rsh_args",
)


def mpi(job: TrainJob) -> TrainJob:
    """Keys for the launcher and the nodes; variables and hostfile for the launcher."""
    policy = job.policy_field
    policy.only(_POLICY)
    policy.get("mpiImplementation").choice(("OpenMPI",), "OpenMPI")
    for item in job.trainer.get("env").items():
        if item.get("name").value in _RESERVED:
            raise item.get("name").bad("a variable that the mpi runtime does not set itself")
    works = policy.get("runLauncherAsNode").flag()
    job = replace(job, jobs=tuple(_counted(one, job, works=works) for one in job.jobs))
    slots = _slots(job)
    hosts = [
        f"{job.name}-{one.name}-{number}-{index}.{job.subdomain}"
        for one in job.jobs
        if one.name == NODE or (one.name == LAUNCHER and works)
        for number in range(one.replicas)
        for index in range(one.count)
    ]
    ssh = policy.get("sshAuthMountPath").text("/root/.ssh").rstrip("/")
    keys = {
        f"{ssh}/id_rsa": File(mode=0o640, key="private"),
        f"{ssh}/id_rsa.pub": File(mode=0o644, key="public"),
        f"{ssh}/authorized_keys": File(mode=0o644, key="public"),
    }
    hostfile = {_HOSTFILE: File("".join(f"{host} slots={slots}\n" for host in hosts), 0o444)}
    env = env_items(
        {
            "OMPI_MCA_orte_default_hostfile": _HOSTFILE,
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }
    )

    def launcher(one: Container) -> Container:
        return upserted(replace(one, files={**one.files, **keys, **hostfile}), env) if one.name == NODE else one

    def node(one: Container) -> Container:
        return replace(one, files={**one.files, **keys}) if one.name == NODE else one

    changes = {LAUNCHER: launcher, NODE: node}
    jobs = (on_containers(one, changes[one.name]) if one.name in changes else one for one in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _counted(one: ReplicatedJob, job: TrainJob, *, works: bool) -> ReplicatedJob:
    """trainer.numNodes counts the nodes, the launcher too where it is one; the launcher keeps mlPolicy.numNodes."""
    wish = job.trainer.get("numNodes")
    if one.name != NODE or not wish.given:
        return one
    nodes = wish.number(least=1, most=MAX_REPLICAS)
    return replace(one, count=max(nodes - 1, 1) if works else nodes)


def _slots(job: TrainJob) -> int:
    given = job.trainer.get("numProcPerNode")
    if given.given:
        return given.number(least=1)
    slots = job.policy_field.get("numProcPerNode").number(1, least=1)
    devices = quantity.gpus(*resources_of(job))
    return devices if slots == 1 and devices > 1 else slots
