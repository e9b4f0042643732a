"""Without persistence mode the driver unloads between processes: starts take seconds more, counters are lost."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Gpu
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-persistence"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """It is on."""
    yield from findings_of_gpus.told(
        NAME, findings_of_gpus.gpus(subject), "persistence", _trouble, "the driver stays loaded (persistence mode)"
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
