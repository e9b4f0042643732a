"""MPIJob v2beta1 of mpi-operator: Open MPI, Intel MPI or MPICH over ssh."""

from __future__ import annotations

from trainer_launch.contracts import mpi_roles
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "mpijob-v2beta1"
MARKS = Marks(all_of=(mpi_roles.ROLE,))
WEAKER_THAN: tuple[str, ...] = ("flyte-kfmpi",)


def read(source: Source) -> Job:
    """Read the role, and for a launcher the host file of whichever implementation."""
    return mpi_roles.read_v2beta1(source)
