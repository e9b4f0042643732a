"""Flyte's MPI and Horovod tasks: an MPIJob of either operator, with Flyte's own variables."""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.contracts import flyte_env, mpi_files, mpi_roles
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "flyte-kfmpi"


def _fits(source: Source) -> bool:
    return flyte_env.is_flyte(source) and (mpi_roles.is_v2beta1(source) or mpi_roles.is_v1(source))


MARKS = Marks(when=_fits, shows=(mpi_roles.ROLE, mpi_roles.AGENT, mpi_files.KUBEXEC, *flyte_env.MARKS))


def read(source: Source) -> Job:
    """Read the MPIJob, and what Flyte adds."""
    v2beta1 = mpi_roles.is_v2beta1(source)
    job = mpi_roles.read_v2beta1(source) if v2beta1 else mpi_roles.read_v1(source)
    return replace(job, details={**job.details, **flyte_env.details(source)})
