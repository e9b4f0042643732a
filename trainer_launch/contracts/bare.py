"""No platform: nothing but flags, and torchrun's own variables where somebody set them. Always fits, last."""

from __future__ import annotations

from trainer_launch.contracts import torchrun_env
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "unknown"
MARKS = Marks()


def read(source: Source) -> Job:
    """Read what torchrun would read."""
    return torchrun_env.by_hand(source)
