"""The driver itself says that a GPU is to be reset, or is gone."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Fact, Gpu, State
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-recovery"
# As nvmlGpuRecoveryAction has them.
_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "that peer-to-peer traffic be drained",
    4: "to be drained, then reset",
    5: "that its IMEX domain be recovered",
    6: "a reset of its bus",
    7: "a reboot of the system",
}


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """Read the recovery action, which drivers have from 570 on."""
    found = () if subject.cards is None else subject.cards.gpus
    asked = [(gpu.index, Fact(State.KNOWN, 0) if gpu.lost else gpu.fact("recovery")) for gpu in found]
    yield from findings_of_gpus.summed(NAME, asked, map(_trouble, found), "the driver asks for no recovery")


def _trouble(gpu: Gpu) -> Trouble | None:
    if gpu.lost:
        return Trouble(gpu=gpu.index, text=f"does not answer: {gpu.lost}", measured=gpu.lost)
    number = gpu.value("recovery", 0)
    if not number:
        return None
    action = _ACTIONS.get(number, f"recovery action {number}")
    return Trouble(
        gpu=gpu.index,
        text=f"needs {action}, says the driver ({gpu.uuid})",
        measured=number,
        expected=0,
        action=f"drain this node: it needs {action}",
    )
