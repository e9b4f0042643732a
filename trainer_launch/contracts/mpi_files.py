"""What the three MPI operators mount into a launcher or a worker: host files, discovery scripts, ssh keys."""

from __future__ import annotations

from collections.abc import Iterable

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Source
from trainer_launch.model import Job, Json, Member, NodeRange, Origin, hostfile
from trainer_launch.model.value_parsers import parse_path

OPEN_MPI = "OpenMPI"
INTEL = "Intel"
MPICH = "MPICH"
KUBEXEC = "/etc/mpi/kubexec.sh"
DISCOVERY = "/etc/mpi/discover_hosts.sh"
OPEN_MPI_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
OPEN_MPI_SLOTS = "OMPI_MCA_orte_set_default_slots"
SSH_DIR_SETTING = "TRAINER_LAUNCH_SSH_DIR"  # sshAuthMountPath, which no controller tells the container

_SSH_DIRS = ("/root/.ssh", "/home/mpiuser/.ssh")
_SSH_FILES = ("id_rsa", "authorized_keys")
_GPU_NAMES = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


# -- ssh --------------------------------------------------------------------------------------


def ssh_dir(source: Source) -> str | None:
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
    set_by_user = source.path(SSH_DIR_SETTING, "ssh_dir", default=None)
    directories = (set_by_user, f"{home.rstrip('/')}/.ssh" if home else None, *_SSH_DIRS)
    return dict.fromkeys(d.rstrip("/") for d in directories if d)


# -- hosts ------------------------------------------------------------------------------------


def read_hosts(source: Source, path: str, *, hydra: bool, default_slots: int | None) -> tuple[Member, ...]:
    """The hosts in the order of the file; an empty file is a job without workers."""
    text = source.file(path, "hosts")
    if text is None:
        raise source.no_file(path, "the list of hosts")
    parse = hostfile.parse_hydra if hydra else hostfile.parse_open_mpi
    members = parse(text, path, source.contract)
    # mpi-operator 0.3 wrote no slots into the file and relied on the variable
    return tuple(Member(m.host, default_slots) if m.slots is None else m for m in members)


def _discovered(source: Source) -> dict[str, Json]:
    text = source.file(DISCOVERY, "discovered_hosts")
    if text is None:
        return {"discovered_hosts": None, "discovered_slots": None}
    members = hostfile.parse_discovery(text, DISCOVERY, source.contract)
    slots = tuple(m.slots for m in members)
    return {
        "discovered_hosts": tuple(m.host for m in members),
        "discovered_slots": None if None in slots else slots,
    }


# -- jobs -------------------------------------------------------------------------------------


def launcher(source: Source, path: str, members: tuple[Member, ...], details: dict[str, Json]) -> Job:
    """The job as the pod that runs mpirun sees it."""
    slots = [m.slots for m in members if m.slots is not None]
    all_told = len(slots) == len(members)
    return Job(
        contract=source.contract,
        role="launcher",
        nodes=NodeRange(len(members), len(members)) if members else None,
        nproc_per_node=slots[0] if all_told and len(set(slots)) == 1 else None,
        world_size=sum(slots) if all_told else None,
        members=members,
        engine="mpirun",
        details={
            "hostfile_path": path,
            "launcher_in_hostfile": any(_is_launcher(source, m.host) for m in members),
            "launcher_gpu_hidden": any(source.has(n) and source.blank(n) for n in _GPU_NAMES),
            **_discovered(source),
            **details,
        },
    )


def _is_launcher(source: Source, host: str) -> bool:
    return names.first_label(host) == source.pod.hostname or names.is_launcher(host)


def over_ssh(source: Source) -> dict[str, Json]:
    """Details of a launcher that reaches its hosts by ssh."""
    return {"launch_agent": "ssh", "ssh_dir": ssh_dir(source)}


def over_kubexec(agent: str) -> dict[str, Json]:
    """Details of a launcher that reaches its hosts by `kubectl exec`."""
    return {"launch_agent": "kubexec", "launch_agent_path": agent, "ssh_dir": None}


def sshd_pod(source: Source, role: str, index: int | None, details: dict[str, Json]) -> Job:
    """The job as a pod sees it that only has to run sshd."""
    directory = ssh_dir(source)
    return Job(
        contract=source.contract,
        role=role,
        hostname_index=index,
        engine="sshd",
        details={
            "ssh_dir": directory,
            "sshd_required": True,
            "authorized_keys": f"{directory}/authorized_keys" if directory else None,
            **details,
        },
    )
