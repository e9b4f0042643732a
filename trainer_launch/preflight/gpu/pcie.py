"""The way from the processor to each GPU is as wide and as fast under load as card and slot allow."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Watched
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-pcie"
NEEDS_LOAD = True
_MANY_REPLAYS = 80


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """A card that has nothing to do takes its link down, so only what is seen under load counts."""
    found = findings_of_gpus.watched(subject)
    asked = [(one.index, one.facts.get("pcie_width", findings_of_gpus.NOT_TOLD)) for one in found]
    yield from findings_of_gpus.summed(NAME, asked, map(_trouble, found), "PCIe as wide and as fast as it can be")


def _trouble(one: Watched) -> Trouble | None:
    width, widest = one.most("pcie_width"), one.most("pcie_width_max")
    speed, fastest = one.most("pcie_gen"), one.most("pcie_gen_max")
    if width and widest and width < widest:
        text = f"has {width:g} of {widest:g} PCIe lanes under load"
        action = "drain this node: have the card, its slot and its riser seen to"
        return Trouble(gpu=one.index, text=text, measured=width, expected=widest, unit="lanes", action=action)
    if speed and fastest and speed < fastest:
        text = f"is at PCIe generation {speed:g} under load, and could be at {fastest:g}"
        action = "see the BIOS of that machine, and the card's slot"
        return Trouble(
            gpu=one.index, text=text, status=Status.WARN, measured=speed, expected=fastest, action=action
        )
    replays = one.growth("pcie_replays") or 0
    if replays > _MANY_REPLAYS:
        text = f"had to send {replays:g} PCIe packets again during our tests"
        return Trouble(
            gpu=one.index, text=text, status=Status.WARN, measured=replays, expected=_MANY_REPLAYS, unit="replays"
        )
    return None
