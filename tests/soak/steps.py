"""What the lines of `train.py` tell: whether the checkpoint held, and how long no new step was done. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHECKPOINT_STEPS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One line of what `train.py` writes."""

    at_s: float
    number: int
    workers: int
    start: str  # differs for each start of the workers


def parse(text: str) -> list[Step]:
    """Whole lines."""
    words = [line.split() for line in text.split("\n") if line]
    return [Step(float(at_s), int(number), int(workers), start) for at_s, number, workers, start in words]


def broken(steps: Sequence[Step]) -> list[str]:
    """Where a step was left out, or lost beyond the checkpoint, or two starts trained at a time."""
    found, over = [], set[str]()
    for a, b in itertools.pairwise(steps):
        if b.start == a.start:
            if b.number != a.number + 1:
                found.append(f"step {b.number} after step {a.number} of the same start")
            continue
        over.add(a.start)
        if b.start in over:
            found.append(f"start {b.start} went on at step {b.number} although {a.start} had begun")
        # The checkpoint is written before the line, and whoever is killed between them leaves no line.
        if b.number - 1 not in (_checkpoint(a.number), _checkpoint(a.number + 1)):
            found.append(f"step {b.number} after step {a.number} and a new start")
    return found


def _checkpoint(step: int) -> int:
    return step // CHECKPOINT_STEPS * CHECKPOINT_STEPS


def longest_s(steps: Sequence[Step], from_s: float, until_s: float) -> float:
    """The longest time in which no step was done beyond those done before."""
    news = [from_s, *(step.at_s for step in _new(steps) if from_s < step.at_s < until_s), until_s]
    return max(b - a for a, b in itertools.pairwise(news))


def _new(steps: Iterable[Step]) -> Iterable[Step]:
    highest = 0
    for step in steps:
        if step.number > highest:
            highest = step.number
            yield step


def count_starts(steps: Iterable[Step]) -> int:
    """How often workers have started and done a step."""
    return len({step.start for step in steps})
