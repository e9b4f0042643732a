"""GPU memory had errors that could not be corrected since the driver was loaded."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Gpu
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-ecc"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """Only errors since the last reset count: those of a card's whole life are told, not judged."""
    found = findings_of_gpus.gpus(subject)
    ever = sum(gpu.value("ecc_uncorrected_ever", 0) for gpu in found)
    good = f"no uncorrected memory error since the driver was loaded ({ever} in their lives)"
    yield from findings_of_gpus.told(NAME, found, "ecc_uncorrected", _trouble, good)


def _trouble(gpu: Gpu) -> Trouble | None:
    count = gpu.value("ecc_uncorrected")
    if not count:
        return None
    return Trouble(
        gpu=gpu.index,
        text=f"had {count} uncorrected memory errors since the driver was loaded ({gpu.uuid})",
        measured=count,
        expected=0,
        unit="errors",
        action="have the GPU reset before it is used; if the errors come back, have the card replaced",
    )
