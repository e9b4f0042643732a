"""Flyte's multi-node Elastic: a PyTorchJob with an elasticPolicy, in which flytekit starts torch elastic itself."""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.contracts import flyte_env
from trainer_launch.contracts.elastic_env import read_elastic
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "flyte-elastic"
MARKS = Marks(
    all_of=("PET_RDZV_ENDPOINT",),
    none_of=("JOB_COMPLETION_INDEX",),
    when=flyte_env.is_flyte,
    shows=flyte_env.MARKS,
)


def read(source: Source) -> Job:
    """Read the elastic variables. The engine is plain: a second agent around flytekit's own would be wrong."""
    job = read_elastic(source, engine="plain")
    return replace(job, details={**job.details, **flyte_env.details(source)})
