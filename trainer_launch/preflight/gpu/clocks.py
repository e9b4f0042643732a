"""Under load no GPU is slowed down by heat or by its power supply; its own power limit is nothing unusual."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Fact, State, Watched
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-clocks"
NEEDS_LOAD = True
# Bits of nvmlClocksEventReasons. Others are normal: idle, clocks that were set, the power limit, those of others.
_BAD = {
    0x08: "the hardware (power or heat)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply (power brake)",
}
_POWER_CAP = 0x04


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """Look at the reasons that were seen while the card was not idle."""
    found = findings_of_gpus.watched(subject)
    asked = [(one.index, _state(one)) for one in found]
    capped = sum(1 for one in found if one.reasons.get(_POWER_CAP))
    good = f"not slowed down under load{f'; {capped} at their power limit, as is usual' if capped else ''}"
    yield from findings_of_gpus.summed(NAME, asked, map(_trouble, found), good)


def _state(one: Watched) -> Fact:
    found = one.facts.get("clock_reasons", findings_of_gpus.NOT_TOLD)
    return found if one.busy or not found.is_known else Fact(State.UNKNOWN, why="it was idle whenever we looked")


def _trouble(one: Watched) -> Trouble | None:
    bad = [bit for bit in _BAD if one.reasons.get(bit)]
    if not bad:
        return None
    times = max(one.reasons[bit] for bit in bad)
    causes = " and ".join(_BAD[bit] for bit in bad)
    return Trouble(
        gpu=one.index,
        text=f"is slowed down under load by {causes}, in {times} of {one.busy} looks",
        measured=" ".join(f"{bit:#x}" for bit in bad),
        action="drain this node: see the cooling and the power supply of that machine",
    )
