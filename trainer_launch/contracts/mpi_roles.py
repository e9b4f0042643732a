"""The two MPIJobs, each as launcher and as worker: v1 (kubectl exec) and v2beta1 (ssh). Flyte makes either."""

from __future__ import annotations

from trainer_launch.contracts import mpi_files, names
from trainer_launch.contracts.source import Source
from trainer_launch.model import Job, Json

ROLE = "K_MPI_JOB_ROLE"  # mpi-operator's, on launchers and workers
AGENT = "OMPI_MCA_plm_rsh_agent"  # the v1 operator's, on launchers
AGENT_NAME = "kubexec.sh"

_INTEL_HOSTFILE = "I_MPI_HYDRA_HOST_FILE"
_MPICH_HOSTFILE = "HYDRA_HOST_FILE"


# -- v1: kubectl exec -------------------------------------------------------------------------


def is_v1(source: Source) -> bool:
    """Whether the v1 operator made the pod, as launcher or as worker."""
    if source.has_any("JOB_COMPLETION_INDEX", ROLE):
        return False
    return _is_v1_launcher(source) or _is_v1_worker(source)


def _is_v1_launcher(source: Source) -> bool:
    return source.peek(AGENT).endswith(f"/{AGENT_NAME}")


def _is_v1_worker(source: Source) -> bool:
    # Open MPI looks for the agent on each rank, so workers have the script too, but no variable at all.
    return source.has_file(mpi_files.KUBEXEC) and not source.has_prefix("OMPI_")


def read_v1(source: Source) -> Job:
    """Read an MPIJob of the v1 operator."""
    if source.has(AGENT) or source.has(mpi_files.OPEN_MPI_HOSTFILE):
        return _v1_launcher(source)
    own = names.split_v1(source.pod.hostname)
    # Nothing has to run here but the pod itself: the launcher comes in by `kubectl exec`.
    return Job(
        contract=source.contract,
        role="worker",
        hostname_index=own.index if own else None,
        engine="plain",
        details={
            "worker_index": own.index if own else None,
            "launch_agent": "kubexec",
            "launch_agent_path": mpi_files.KUBEXEC,
            "sshd_required": False,
        },
    )


def _v1_launcher(source: Source) -> Job:
    agent = source.path(AGENT, "launch_agent_path")
    path = source.path(mpi_files.OPEN_MPI_HOSTFILE, "hostfile_path")
    members = mpi_files.read_hosts(source, path, hydra=False, default_slots=None)
    return mpi_files.launcher(
        source,
        path,
        members,
        {
            "mpi_implementation": None,  # variables for Open MPI and for Intel MPI are both there
            **mpi_files.over_kubexec(agent),
            "intel_bootstrap": source.text("I_MPI_HYDRA_BOOTSTRAP", "intel_bootstrap", default=None),
            "intel_bootstrap_exec": source.path("I_MPI_HYDRA_BOOTSTRAP_EXEC", "intel_bootstrap_exec", default=None),
        },
    )


# -- v2beta1: ssh -----------------------------------------------------------------------------


def is_v2beta1(source: Source) -> bool:
    """Whether mpi-operator made the pod."""
    return source.has(ROLE)


def read_v2beta1(source: Source) -> Job:
    """Read an MPIJob of mpi-operator."""
    role = source.choice(ROLE, ("launcher", "worker"), "role")
    return _v2beta1_launcher(source) if role == "launcher" else _v2beta1_worker(source)


def _v2beta1_launcher(source: Source) -> Job:
    implementation, variable, slots_variable = _implementation(source)
    path = source.path(variable, "hostfile_path")
    slots = source.count(slots_variable, "slots_env", least=0, default=None) if slots_variable else None
    hydra = implementation != mpi_files.OPEN_MPI
    members = mpi_files.read_hosts(source, path, hydra=hydra, default_slots=slots)
    details: dict[str, Json] = {
        "mpi_implementation": implementation,
        "slots_env": slots,
        **mpi_files.over_ssh(source),
    }
    return mpi_files.launcher(source, path, members, details)


def _implementation(source: Source) -> tuple[str, str, str | None]:
    """The implementation, the variable with the host file, and the one with the slots: MPICH has none."""
    if source.has(_INTEL_HOSTFILE):
        return mpi_files.INTEL, _INTEL_HOSTFILE, "I_MPI_PERHOST"
    if source.has(_MPICH_HOSTFILE):
        return mpi_files.MPICH, _MPICH_HOSTFILE, None
    return mpi_files.OPEN_MPI, mpi_files.OPEN_MPI_HOSTFILE, mpi_files.OPEN_MPI_SLOTS


def _v2beta1_worker(source: Source) -> Job:
    own = names.split_v1(source.pod.hostname)
    domain = f"{own.job}.{source.pod.namespace}.svc" if own and source.pod.namespace else None
    return mpi_files.sshd_pod(
        source,
        "worker",
        own.index if own else None,
        {
            "worker_index": own.index if own else None,
            "fqdn": f"{source.pod.hostname}.{domain}" if domain else None,
            # the operator writes this domain into the pod whatever the cluster's is
            "search_domain": f"{domain}.cluster.local" if domain else None,
        },
    )
