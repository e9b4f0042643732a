"""Which faults come when: a frozen state and what happens to it, every fault once. Pure.

Times are seconds since the rehearsal began. Faults of chaos are drawn one by one, when their time comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer_launch.model.user_patterns import MAX_LINE, compiled
from trainer_launch.rehearsal.faults import chaos as chances
from trainer_launch.rehearsal.faults.chaos import Chaos
from trainer_launch.rehearsal.faults.fault import Fault


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Reached:
    """Some pod has reached a step."""

    step: int


@dataclass(frozen=True, slots=True)
class Said:
    """Some pod has said a line."""

    line: str


Event = Passed | Reached | Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What has yet to come."""

    waiting: tuple[Fault, ...]
    patterns: tuple[re.Pattern[str] | None, ...]  # one for each of `waiting`; None: it waits for no line
    chaos: Chaos | None = None
    drawn: Fault | None = None  # the next of chaos
    draws: int = 0


Step = tuple[Timeline, tuple[Fault, ...]]  # and the faults that come now


def begin(faults: Iterable[Fault], chaos: Chaos | None = None) -> Timeline:
    """Nothing has come yet."""
    waiting = tuple(faults)
    patterns = tuple(None if one.when.line is None else compiled(one.when.line) for one in waiting)
    return _drawn(Timeline(waiting=waiting, patterns=patterns, chaos=chaos), 0.0)


def due_s(state: Timeline) -> float | None:
    """When `Passed` has to be told at the latest; None: never."""
    times = [one.when.at_s for one in (*state.waiting, state.drawn) if one is not None]
    return min((at_s for at_s in times if at_s is not None), default=None)


def step(state: Timeline, event: Event) -> Step:
    """What comes of an event: the faults whose time, step or line this is, in the order they were given."""
    line = event.line[:MAX_LINE] if isinstance(event, Said) else ""
    come: list[Fault] = []
    rest: list[tuple[Fault, re.Pattern[str] | None]] = []
    for fault, pattern in zip(state.waiting, state.patterns, strict=True):
        if isinstance(event, Said):
            is_now = pattern is not None and pattern.search(line) is not None
        elif isinstance(event, Reached):
            is_now = fault.when.step is not None and event.step >= fault.when.step
        else:
            is_now = fault.when.at_s is not None and event.at_s >= fault.when.at_s
        if is_now:
            come.append(fault)
        else:
            rest.append((fault, pattern))
    if come:
        state = replace(state, waiting=tuple(one for one, _ in rest), patterns=tuple(one for _, one in rest))
    if isinstance(event, Passed):
        state, more = _chance(state, event.at_s)
        come += more
    return state, tuple(come)


def missed(state: Timeline) -> tuple[Fault, ...]:
    """What was asked for and never came; chaos asks for nothing."""
    return state.waiting


def _chance(state: Timeline, now_s: float) -> tuple[Timeline, list[Fault]]:
    come: list[Fault] = []
    while (fault := state.drawn) is not None and fault.when.at_s is not None and fault.when.at_s <= now_s:
        come.append(fault)
        state = _drawn(state, fault.when.at_s)
    return state, come


def _drawn(state: Timeline, after_s: float) -> Timeline:
    if state.chaos is None:
        return state
    fault = chances.draw(state.chaos, state.draws, after_s)
    return replace(state, drawn=fault, draws=state.draws + 1)
