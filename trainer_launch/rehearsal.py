"""The pods of a rehearsal: what each would get from Kubeflow Trainer v2, on loopback. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_launch.errors import UsageError

JOB = "local"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPod:
    """One pod: its name, its loopback address, and its whole environment."""

    name: str
    address: str
    env: Mapping[str, str]


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
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes is {nodes}; a rehearsal takes 1 to {MAX_NODES}")
    base = {name: value for name, value in env.items() if not _foreign(name)}
    base.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name may resolve to a network that is down
    return tuple(
        RehearsedPod(
            name=f"{JOB}-node-0-{node}",
            address=address_of(node),
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


def _foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)
