"""MPI jobs: of mpi-operator (v2beta1, ssh), the v1 operator (kubectl exec), Kubeflow Trainer v2 (ssh).

All mount a host file and keys or a script into a launcher, and little or nothing into the other pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.model import Job, Member, Mpi, NodeRange, Origin, hostfile
from trainer_launch.model.value_parsers import parse_path

DISCOVERY = "/etc/mpi/discover_hosts.sh"

_ROLE = "K_MPI_JOB_ROLE"  # mpi-operator's, on launchers and workers
_AGENT = "OMPI_MCA_plm_rsh_agent"  # the v1 operator's, on launchers
_AGENT_NAME = "kubexec.sh"
_KUBEXEC = "/etc/mpi/kubexec.sh"
_OPEN_MPI = "OpenMPI"
_OPEN_MPI_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
_OPEN_MPI_SLOTS = "OMPI_MCA_orte_set_default_slots"
_INTEL_HOSTFILE = "I_MPI_HYDRA_HOST_FILE"
_MPICH_HOSTFILE = "HYDRA_HOST_FILE"
_SSH_DIR_SETTING = "TRAINER_LAUNCH_SSH_DIR"  # sshAuthMountPath, which no controller tells the container
_SSH_DIRS = ("/root/.ssh", "/home/mpiuser/.ssh")
_SSH_FILES = ("id_rsa", "authorized_keys")
_GPU_NAMES = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
# A node of Trainer v2 has none of these: another kind of job whose image carries ssh keys does.
_NOT_A_NODE = ("PET_", "JAX_", "DMLC_", "PADDLE_", "OMPI_MCA_orte_", "OMPI_MCA_plm_")
_NOT_A_NODE_EITHER = ("TF_CONFIG", "COORDINATOR_ADDRESS")


def _is_v1(source: Source) -> bool:
    if source.has_any("JOB_COMPLETION_INDEX", _ROLE):
        return False
    # Open MPI looks for the agent on each rank, so workers have the script too, but no variable at all.
    is_worker = source.has_file(_KUBEXEC) and not source.has_prefix("OMPI_")
    return is_worker or source.peek(_AGENT).endswith(f"/{_AGENT_NAME}")


def _read_v1(source: Source) -> Job:
    """Read the launcher's variables and files, or what little a worker has."""
    if source.has_any(_AGENT, _OPEN_MPI_HOSTFILE):
        return _v1_launcher(source)
    own = names.split_v1(source.pod.hostname)
    index = own.index if own else None
    source.derive(launch_agent="kubexec", launch_agent_path=_KUBEXEC, sshd_required=False, worker_index=index)
    # Nothing has to run here but the pod itself: the launcher comes in by `kubectl exec`.
    return Job(role="worker", hostname_index=index, engine="plain")


def _v1_launcher(source: Source) -> Job:
    agent = source.path(_AGENT, "launch_agent_path")
    path = source.path(_OPEN_MPI_HOSTFILE, "hostfile_path")
    members = _hosts(source, path)
    source.text("I_MPI_HYDRA_BOOTSTRAP", "intel_bootstrap", default=None)
    source.path("I_MPI_HYDRA_BOOTSTRAP_EXEC", "intel_bootstrap_exec", default=None)
    # No implementation: variables for Open MPI and for Intel MPI are both there.
    return _launcher(source, members, Mpi(hostfile_path=path, launch_agent="kubexec", launch_agent_path=agent))


def _read_v2beta1(source: Source) -> Job:
    """Read the role, and for a launcher the host file of whichever implementation."""
    if source.choice(_ROLE, ("launcher", "worker"), "role") == "launcher":
        return _ssh_launcher(source, *_implementation(source))
    own = names.split_v1(source.pod.hostname)
    index = own.index if own else None
    domain = f"{own.job}.{source.pod.namespace}.svc" if own and source.pod.namespace else None
    source.derive(
        worker_index=index,
        fqdn=f"{source.pod.hostname}.{domain}" if domain else None,
        # the operator writes this domain into the pod whatever the cluster's is
        search_domain=f"{domain}.cluster.local" if domain else None,
    )
    return _sshd_pod(source, "worker", index)


def _implementation(source: Source) -> tuple[str, str, str | None]:
    """The implementation, the variable with the host file, and the one with the slots: MPICH has none."""
    if source.has(_INTEL_HOSTFILE):
        return "Intel", _INTEL_HOSTFILE, "I_MPI_PERHOST"
    if source.has(_MPICH_HOSTFILE):
        return "MPICH", _MPICH_HOSTFILE, None
    return _OPEN_MPI, _OPEN_MPI_HOSTFILE, _OPEN_MPI_SLOTS


def _fits_trainer_v2(source: Source) -> bool:
    if source.has_any(_ROLE, _AGENT):
        return False
    if source.has(_OPEN_MPI_HOSTFILE):
        return True
    if source.has_prefix(*_NOT_A_NODE) or source.has_any(*_NOT_A_NODE_EITHER):
        return False
    if source.has_any(_INTEL_HOSTFILE, _MPICH_HOSTFILE):
        return True
    may_be_node = source.has(_SSH_DIR_SETTING) or not _is_of_indexed_job(source)
    return may_be_node and _ssh_dir(source) is not None


def _is_of_indexed_job(source: Source) -> bool:
    """Whether an Indexed Job that is no TrainJob's node has named this pod; its ssh keys may be for anything."""
    label, own = names.first_label(source.pod.hostname), names.split_v2(source.pod.hostname)
    is_node = own is not None and own.group.endswith("-node")
    return label.endswith(f"-{source.peek('JOB_COMPLETION_INDEX')}") and not is_node


def _read_trainer_v2(source: Source) -> Job:
    """Read the launcher's host file, or find a node's keys: it has nothing else."""
    index = source.index("JOB_COMPLETION_INDEX", default=None)
    if source.has_any(_OPEN_MPI_HOSTFILE, _OPEN_MPI_SLOTS, _INTEL_HOSTFILE, _MPICH_HOSTFILE):
        return _ssh_launcher(source, *_implementation(source))
    own = names.v2_index(source.pod.hostname)
    return _sshd_pod(source, "node", index if own is None else own)


def _ssh_launcher(source: Source, implementation: str, variable: str, slots_variable: str | None) -> Job:
    path = source.path(variable, "hostfile_path")
    slots = source.count(slots_variable, "slots_env", least=0, default=None) if slots_variable else None
    members = _hosts(source, path, hydra=implementation != _OPEN_MPI, default_slots=slots)
    mpi = Mpi(hostfile_path=path, launch_agent="ssh", mpi_implementation=implementation, slots_env=slots)
    return replace(_launcher(source, members, mpi), ssh_dir=_ssh_dir(source))


def _sshd_pod(source: Source, role: str, index: int | None) -> Job:
    """The job as a pod sees it that only has to run sshd."""
    directory = _ssh_dir(source)
    source.derive(sshd_required=True, authorized_keys=f"{directory}/authorized_keys" if directory else None)
    return Job(role=role, hostname_index=index, engine="sshd", ssh_dir=directory)


def _ssh_dir(source: Source) -> str | None:
    """Where the job's keys are mounted, None when they are at none of the known places."""
    for directory in _ssh_dirs(source):
        paths = [f"{directory}/{name}" for name in _SSH_FILES]
        if all(map(source.has_file, paths)):
            for path in paths:
                source.note(path, "present", Origin.FILE, "ssh_dir")
            return directory
    return None


def _ssh_dirs(source: Source) -> Iterable[str]:
    home = parse_path(source.pod.env.get("HOME", ""))
    set_by_user = source.path(_SSH_DIR_SETTING, "ssh_dir", default=None)
    directories = (set_by_user, f"{home.rstrip('/')}/.ssh" if home else None, *_SSH_DIRS)
    return dict.fromkeys(d.rstrip("/") for d in directories if d)


def _launcher(source: Source, members: tuple[Member, ...], mpi: Mpi) -> Job:
    slots = [m.slots for m in members if m.slots is not None]
    all_have = len(slots) == len(members)
    source.derive(launcher_gpu_hidden=any(source.has(n) and source.blank(n) for n in _GPU_NAMES))
    _derive_discovered(source)
    return Job(
        role="launcher",
        nodes=NodeRange(len(members), len(members)) if members else None,
        nproc_per_node=slots[0] if all_have and len(set(slots)) == 1 else None,
        world_size=sum(slots) if all_have else None,
        members=members,
        engine="mpirun",
        mpi=replace(mpi, launcher_in_hostfile=any(_is_launcher(source, m.host) for m in members)),
    )


def _is_launcher(source: Source, host: str) -> bool:
    return names.first_label(host) == source.pod.hostname or names.is_launcher(host)


def _hosts(
    source: Source, path: str, *, hydra: bool = False, default_slots: int | None = None
) -> tuple[Member, ...]:
    """The hosts in the order of the file; an empty file is a job without workers."""
    text = source.file(path, "hosts")
    if text is None:
        raise source.missing(path, "the list of hosts")
    parse = hostfile.parse_hydra if hydra else hostfile.parse_open_mpi
    members = parse(text, path, source.contract)
    # mpi-operator 0.3 wrote no slots into the file and relied on the variable
    return tuple(Member(m.host, default_slots) if m.slots is None else m for m in members)


def _derive_discovered(source: Source) -> None:
    text = source.file(DISCOVERY, "discovered_hosts")
    members = None if text is None else hostfile.parse_discovery(text, DISCOVERY, source.contract)
    slots = None if members is None else tuple(m.slots for m in members)
    source.derive(
        discovered_hosts=None if members is None else tuple(m.host for m in members),
        discovered_slots=None if slots is None or None in slots else slots,
    )


V2BETA1 = Contract("mpijob-v2beta1", Marks(all_of=(_ROLE,)), _read_v2beta1, kind="MPIJob")
V1 = Contract("mpijob-v1", Marks(when=_is_v1), _read_v1, kind="MPIJob")
TRAINER_V2 = Contract(
    "trainer-v2-mpi",
    Marks(
        all_of=("JOB_COMPLETION_INDEX",),
        when=_fits_trainer_v2,
    ),
    _read_trainer_v2,
    kind="TrainJob with MPI",
)
