"""Kubeflow Trainer v2, MPI runtimes: a launcher by its variables, and nodes that have nothing but mounted keys."""

from __future__ import annotations

from trainer_launch.contracts import mpi_files, mpi_roles, names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "trainer-v2-mpi"

# A node has none of these: another kind of job whose image carries ssh keys does.
_NOT_A_NODE = ("PET_", "JAX_", "DMLC_", "PADDLE_", "OMPI_MCA_orte_", "OMPI_MCA_plm_")
_NOT_A_NODE_EITHER = ("TF_CONFIG", "MX_CONFIG", "COORDINATOR_ADDRESS")


def _fits(source: Source) -> bool:
    if source.has_any(mpi_roles.ROLE, mpi_roles.AGENT):
        return False
    return source.has(mpi_files.OPEN_MPI_HOSTFILE) or _is_node(source)


def _is_node(source: Source) -> bool:
    if source.has_prefix(*_NOT_A_NODE) or source.has_any(*_NOT_A_NODE_EITHER):
        return False
    return mpi_files.ssh_dir(source) is not None


MARKS = Marks(
    all_of=("JOB_COMPLETION_INDEX",),
    when=_fits,
    shows=(mpi_files.OPEN_MPI_HOSTFILE, "/root/.ssh/id_rsa", "/home/mpiuser/.ssh/id_rsa"),
)


def read(source: Source) -> Job:
    """Read the launcher's host file, or find a node's keys."""
    own = names.split_v2(source.pod.hostname)
    index = source.index("JOB_COMPLETION_INDEX", default=None)
    if source.has_any(mpi_files.OPEN_MPI_HOSTFILE, mpi_files.OPEN_MPI_SLOTS):
        return _launcher(source)
    return mpi_files.sshd_pod(source, "node", own.index if own else index, {})


def _launcher(source: Source) -> Job:
    path = source.path(mpi_files.OPEN_MPI_HOSTFILE, "hostfile_path")
    slots = source.count(mpi_files.OPEN_MPI_SLOTS, "slots_env", least=0, default=None)
    members = mpi_files.read_hosts(source, path, hydra=False, default_slots=slots)
    return mpi_files.launcher(
        source,
        path,
        members,
        {"mpi_implementation": mpi_files.OPEN_MPI, "slots_env": slots, **mpi_files.over_ssh(source)},
    )
