"""The pods of a rehearsal: what each would get from Kubeflow Trainer v2, on loopback. Pure.

A loopback address of its own stands for each pod's name, which nothing resolves on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_launch.errors import UsageError
from trainer_launch.hostfile import render_open_mpi
from trainer_launch.model import Member

JOB = "local"
# Our own command line. Not -m: it would look for our modules, and for Python's own, in the user's folder first.
RUN = "import sys; '' in sys.path and sys.path.remove(''); from trainer_launch.cli import main; main()"
_FIRST_ADDRESS = 2  # 127.0.0.1 stays the machine's own
MAX_NODES = 200
# What a pod must not inherit from the shell it is rehearsed in: other platforms' words, and our own job settings.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_", "OMPI_", "PMI_", "DMLC_", "JAX_", "K_MPI_", "PADDLE_", "FLYTE_")
_FOREIGN_NAMES = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "JOB_COMPLETION_INDEX", "TF_CONFIG", "MX_CONFIG", "HOSTNAME", "TRAINER_LAUNCH_CONTRACT",
        "TRAINER_LAUNCH_NODES", "TRAINER_LAUNCH_NPROC_PER_NODE", "TRAINER_LAUNCH_NODE_RANK",
        "TRAINER_LAUNCH_MASTER_ADDR", "TRAINER_LAUNCH_MASTER_PORT",
    }
)  # fmt: skip

# More ranks than CPUs are fine here, which let each other run, none is bound to one, and the network may be down.
ON_A_LAPTOP = {
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_prte_if_include": "lo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPod:
    """One pod: its name, its loopback address, and its whole environment."""

    name: str
    address: str
    label: str  # what its own lines are marked with
    env: Mapping[str, str]
    command: tuple[str, ...] = ("run", "--")  # of trainer-launch; a run's own follows


def address_of(node: int) -> str:
    """The loopback address of a node: 127.0.0.2 for node 0."""
    return f"127.0.0.{_FIRST_ADDRESS + node}"


def pods(nodes: int, nproc_per_node: str, port: int, env: Mapping[str, str]) -> Sequence[RehearsedPod]:
    """The pods of a torch job; `env` is the shell's, `port` a free one that node 0 may use.

    The five PET_* values are those of kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go;
    node 0's address stands for its name, which nothing resolves on a laptop.

    Raises:
        UsageError: more pods than loopback addresses.
    """
    base = _base(nodes, env)
    return tuple(
        RehearsedPod(
            name=f"{JOB}-node-0-{node}",
            address=address_of(node),
            label=str(node),
            env={
                **base,
                "PET_NNODES": str(nodes),
                "PET_NPROC_PER_NODE": nproc_per_node,
                "PET_NODE_RANK": str(node),
                "PET_MASTER_ADDR": address_of(0),
                "PET_MASTER_PORT": str(port),
                "JOB_COMPLETION_INDEX": str(node),
                "HOSTNAME": f"{JOB}-node-0-{node}",
            },
        )
        for node in range(nodes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFiles:
    """What the pods of a rehearsed MPI job have mounted."""

    hostfile: str
    ssh_dir: str
    tmp: str  # each pod has a folder of its name in it


def mpi_pods(
    nodes: int, nproc_per_node: int, port: int, files: MpiFiles, env: Mapping[str, str]
) -> Sequence[RehearsedPod]:
    """The pods of an MPI job, its launcher last: every node runs sshd at `port` of its own address.

    The launcher's variables are those of kubeflow/trainer pkg/runtime/framework/plugins/mpi/mpi.go.

    Raises:
        UsageError: more pods than loopback addresses.
    """
    base = _base(nodes, env)
    ssh = {"TRAINER_LAUNCH_SSH_DIR": files.ssh_dir, "TRAINER_LAUNCH_SSH_PORT": str(port)}

    def pod(name: str, index: int, **more: str) -> dict[str, str]:
        own = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, "TMPDIR": f"{files.tmp}/{name}"}
        return {**base, **ssh, **own, **more}

    made = []
    for node in range(nodes):
        name, address = f"{JOB}-node-0-{node}", address_of(node)
        # Open MPI takes pods of one machine for machines that do not share their memory, and its files would meet.
        apart = {f"OMPI_MCA_btl_{btl}_backing_directory": f"{files.tmp}/{name}" for btl in ("vader", "sm")}
        command = ("sshd", "--listen-address", address)
        env_of_pod = pod(name, node, **apart)
        made.append(RehearsedPod(name=name, address=address, label=str(node), env=env_of_pod, command=command))
    name = f"{JOB}-launcher-0-0"
    told = {
        "OMPI_MCA_orte_default_hostfile": files.hostfile,
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(nproc_per_node),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    launcher = pod(name, 0, **told, **ON_A_LAPTOP)
    return (*made, RehearsedPod(name=name, address="127.0.0.1", label="launcher", env=launcher))


def mpi_hostfile(nodes: int, nproc_per_node: int) -> str:
    """The host file of a rehearsed MPI job."""
    return render_open_mpi(Member(address_of(node), nproc_per_node) for node in range(nodes))


def _base(nodes: int, env: Mapping[str, str]) -> dict[str, str]:
    """What every pod has from the shell."""
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes is {nodes}; a rehearsal takes 1 to {MAX_NODES}")
    base = own_environment(env)
    base.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name may resolve to a network that is down
    return base


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The shell's variables without those of another platform."""
    return {name: value for name, value in env.items() if not _foreign(name)}


def _foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)
