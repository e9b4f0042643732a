"""Under load each GPU stays clear of the temperature at which it slows itself down."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Fact, Gpu, State, Watched
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-temperature"
NEEDS_LOAD = True
_NEAR_C = 5


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """Its own margin where the card tells that, else what is left to its slowdown threshold."""
    seen = {one.index: one for one in findings_of_gpus.watched(subject)}
    margins = {gpu.index: _margin(gpu, seen.get(gpu.index)) for gpu in findings_of_gpus.gpus(subject)}
    known = {index: margin for index, margin in margins.items() if margin is not None}
    unknown = Fact(State.UNKNOWN, why="neither margin nor threshold is told")
    asked = [(index, unknown if margin is None else Fact(State.KNOWN, margin)) for index, margin in margins.items()]
    least = min(known.values(), default=0)
    when = "under load" if seen else "at rest"
    good = f"at least {least:g} \u00b0C to go {when} until they slow down"
    yield from findings_of_gpus.summed(NAME, asked, (_trouble(*one, when) for one in known.items()), good)


def _margin(gpu: Gpu, seen: Watched | None) -> float | None:
    margin = seen.least("margin_c") if seen is not None else gpu.value("margin_c")
    if margin is not None:
        return float(margin)
    hottest = seen.most("temperature_c") if seen is not None else gpu.value("temperature_c")
    threshold = gpu.value("slowdown_c")
    return None if hottest is None or threshold is None else float(threshold - hottest)


def _trouble(index: int, margin: float, when: str) -> Trouble | None:
    if margin >= _NEAR_C:
        return None
    return Trouble(
        gpu=index,
        text=f"is {margin:g} \u00b0C {when} from the temperature at which it slows down",
        status=Status.WARN,
        measured=margin,
        expected=_NEAR_C,
        unit="\u00b0C",
        action="see the cooling of that machine",
    )
