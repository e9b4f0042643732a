"""Without persistence mode the driver unloads between processes: starts take seconds more, counters are lost."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.findings import Finding, Status
from trainer_launch.gpus.values import Gpu
from trainer_launch.preflight import gpu_words
from trainer_launch.preflight.gpu_words import Trouble
from trainer_launch.preflight.subject import Subject

NAME = "gpu-persistence"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return gpu_words.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """It is on."""
    yield from gpu_words.told(
        NAME, gpu_words.gpus(subject), "persistence", _trouble, "the driver stays loaded (persistence mode)"
    )


def _trouble(gpu: Gpu) -> Trouble | None:
    if gpu.value("persistence"):
        return None
    text = "is not in persistence mode"
    return Trouble(
        gpu=gpu.index,
        text=text,
        status=Status.WARN,
        action="run nvidia-persistenced on that machine; starts are slower without it",
    )
