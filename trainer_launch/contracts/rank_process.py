"""Inside a process that torchrun or an MPI runtime started: the job runs already, and this is one rank of it."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.model import Endpoint, Job, NodeRange


def _read_torchrun(source: Source) -> Job:
    """Read what torch elastic gives each worker; only the two marks have to be there."""
    world_size = source.count("WORLD_SIZE", "world_size", default=None)
    local_size = source.count("LOCAL_WORLD_SIZE", "nproc_per_node", default=None)
    source.index("LOCAL_RANK", "local_rank", below=local_size)
    rank = source.index("RANK", "env_rank", below=world_size, default=None)
    nodes = source.count("GROUP_WORLD_SIZE", "nodes", default=None)
    node_rank = source.index("GROUP_RANK", "node_rank", below=nodes, default=None)
    max_restarts = source.index("TORCHELASTIC_MAX_RESTARTS", "max_restarts", default=None)
    source.index("TORCHELASTIC_RESTART_COUNT", "restart_count", default=None)
    if not source.blank("TORCHELASTIC_RUN_ID"):
        source.text("TORCHELASTIC_RUN_ID", "run_id")
    source.derive(rank=rank, env_rank=rank, env_world_size=world_size, env_rank_means="process")
    return Job(
        role="rank",
        nodes=NodeRange(nodes, nodes) if nodes else None,
        nproc_per_node=local_size,
        node_rank=node_rank,
        world_size=world_size,
        coordinator=_master(source),
        is_coordinator=node_rank == 0 if node_rank is not None else None,
        max_restarts=max_restarts,
        engine="plain",
    )


def _master(source: Source) -> Endpoint | None:
    host = source.host("MASTER_ADDR", "master_addr", default=None)
    port = source.port("MASTER_PORT", "master_port", default=None)
    return Endpoint(host, port) if host is not None and port is not None else None


def _read_mpi(source: Source) -> Job:
    """Read the rank and, where they are there, the sizes: of Open MPI, or of a Hydra (MPICH, Intel MPI)."""
    open_mpi = source.has("OMPI_COMM_WORLD_RANK")
    prefix = "OMPI_COMM_WORLD_" if open_mpi else "PMI_"
    world_size = source.count(f"{prefix}SIZE", "world_size", default=None)
    rank = source.index(f"{prefix}RANK", "env_rank", below=world_size)
    local_size_name = "OMPI_COMM_WORLD_LOCAL_SIZE" if open_mpi else "MPI_LOCALNRANKS"
    local_rank_name = "OMPI_COMM_WORLD_LOCAL_RANK" if open_mpi else "MPI_LOCALRANKID"
    local_size = source.count(local_size_name, "nproc_per_node", default=None)
    source.index(local_rank_name, "local_rank", below=local_size, default=None)
    source.derive(
        rank=rank,
        env_rank=rank,
        env_world_size=world_size,
        env_rank_means="process",
        mpi_implementation="OpenMPI" if open_mpi else None,
    )
    return Job(role="rank", nproc_per_node=local_size, world_size=world_size, engine="plain")


_TORCHRUN = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")  # LOCAL_RANK alone may be of a whole node


def is_mpi_rank(env: Mapping[str, str]) -> bool:
    """Whether an MPI runtime started this process.

    `srun --mpi=pmi2` sets PMI_RANK in each task, even in the only task of a node, which is the launcher. A Hydra
    that srun starts on each node also sets MPI_LOCALRANKID.
    """
    tasks, nodes = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_STEP_NUM_NODES")
    is_node = "SLURM_STEP_ID" in env and tasks in (None, nodes) and "MPI_LOCALRANKID" not in env
    return "OMPI_COMM_WORLD_RANK" in env or ("PMI_RANK" in env and not is_node)


def is_worker(env: Mapping[str, str]) -> bool:
    """Whether this process is a worker of torchrun or a rank of MPI, where nothing else is to be launched."""
    return is_mpi_rank(env) or all(name in env for name in _TORCHRUN)


TORCHRUN = Contract("torchrun-child", Marks(all_of=_TORCHRUN), _read_torchrun)
MPI = Contract(
    "mpi-rank",
    Marks(any_of=("OMPI_COMM_WORLD_RANK", "PMI_RANK"), when=lambda source: is_mpi_rank(source.pod.env)),
    _read_mpi,
)
