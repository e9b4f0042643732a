"""PyTorchJob of the v1 operator with an elasticPolicy."""

from __future__ import annotations

from trainer_launch.contracts.elastic_env import read_elastic
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "pytorchjob-v1-elastic"
# v1 pods never have a completion index; a Trainer v2 pod in which somebody set the endpoint by hand does.
MARKS = Marks(
    all_of=("PET_RDZV_ENDPOINT",),
    none_of=("JOB_COMPLETION_INDEX",),
    shows=("PET_NNODES", "PET_RDZV_BACKEND"),
)
WEAKER_THAN: tuple[str, ...] = ("flyte-elastic",)


def read(source: Source) -> Job:
    """Read the elastic variables."""
    return read_elastic(source, engine="torchrun")
