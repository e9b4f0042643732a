"""MPIJob of the v1 operator: ranks are started by `kubectl exec`, without ssh and without names in DNS."""

from __future__ import annotations

from trainer_launch.contracts import mpi_files, mpi_roles
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "mpijob-v1"
MARKS = Marks(when=mpi_roles.is_v1, shows=(mpi_roles.AGENT, mpi_files.KUBEXEC))
WEAKER_THAN: tuple[str, ...] = ("flyte-kfmpi",)


def read(source: Source) -> Job:
    """Read the launcher's variables and files, or what little a worker has."""
    return mpi_roles.read_v1(source)
