"""Inside a process that an MPI runtime started: Open MPI, or a Hydra (MPICH, Intel MPI)."""

from __future__ import annotations

from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "mpi-rank"
MARKS = Marks(any_of=("OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def read(source: Source) -> Job:
    """Read the rank and, where they are there, the sizes."""
    open_mpi = source.has("OMPI_COMM_WORLD_RANK")
    prefix = "OMPI_COMM_WORLD_" if open_mpi else "PMI_"
    world_size = source.count(f"{prefix}SIZE", "world_size", default=None)
    rank = source.index(f"{prefix}RANK", "env_rank", below=world_size)
    local_size_name = "OMPI_COMM_WORLD_LOCAL_SIZE" if open_mpi else "MPI_LOCALNRANKS"
    local_rank_name = "OMPI_COMM_WORLD_LOCAL_RANK" if open_mpi else "MPI_LOCALRANKID"
    local_size = source.count(local_size_name, "nproc_per_node", default=None)
    return Job(
        contract=NAME,
        role="rank",
        nproc_per_node=local_size,
        world_size=world_size,
        engine="plain",
        details={
            "rank": rank,
            "local_rank": source.index(local_rank_name, "local_rank", below=local_size, default=None),
            "env_rank": rank,
            "env_world_size": world_size,
            "env_rank_means": "process",
            "mpi_implementation": "OpenMPI" if open_mpi else None,
        },
    )
