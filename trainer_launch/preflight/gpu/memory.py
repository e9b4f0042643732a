"""GPU memory is free: somebody who died a moment ago may hold it for a while, others for ever."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding
from trainer_launch.model.units import in_units
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.devices import FACTS_S, MOST_HELD_BYTES, SETTLE_S
from trainer_launch.preflight.gpu.facts import Gpu, visible
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-memory"


def limit_s(subject: Subject) -> float:
    """It waits for memory to be given back."""
    return findings_of_gpus.FACTS_LIMIT_S + SETTLE_S + FACTS_S


def check(subject: Subject) -> Iterator[Finding]:
    """Before any context of ours; a container does not see others' processes, but their memory."""
    cards = subject.cards
    settled = () if cards is None else visible(cards.settled().gpus, cards.shown)
    found = [gpu for gpu in settled if not gpu.lost]
    most = max((gpu.value("memory_used", 0) for gpu in found), default=0)
    yield from findings_of_gpus.told(NAME, found, "memory_used", _trouble, f"at most {in_units(most)} in use")


def _trouble(gpu: Gpu) -> Trouble | None:
    used = gpu.value("memory_used")
    if used <= MOST_HELD_BYTES:
        return None
    return Trouble(
        gpu=gpu.index,
        text=f"has {in_units(used)} of its {in_units(gpu.value('memory_total', 0))} in use before the job starts",
        measured=used,
        expected=MOST_HELD_BYTES,
        unit="bytes",
        action="see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod",
    )
