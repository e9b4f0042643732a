"""Whether what was measured again and again in one process stays the same: lines through points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

WARM_UP = 0.5  # of a process's samples are left out: buffers fill, modules are loaded on first use
HOUR_S = 3600.0
MIN_SAMPLES, MIN_S = 12, 300.0

Points = Sequence[tuple[float, float]]  # seconds, value


@dataclass(frozen=True, slots=True)
class Line:
    """The straight line nearest to some points."""

    per_hour: float
    first: float  # its value at the first point
    seconds: float  # from the first point to the last
    samples: int


def fit(points: Points) -> Line | None:
    """The median of the slopes between any two, without the warm-up; None where there are too few points to tell.

    One step, such as modules that the first hang loads, counts for little unless it comes in the middle of them.
    """
    kept = points[int(len(points) * WARM_UP) :]
    if len(kept) < MIN_SAMPLES or kept[-1][0] - kept[0][0] < MIN_S:
        return None
    slope = median(
        (after - before) / (end_s - begin_s) for (begin_s, before), (end_s, after) in combinations(kept, 2)
    )
    first = median(value - slope * (at_s - kept[0][0]) for at_s, value in kept)
    return Line(slope * HOUR_S, first, kept[-1][0] - kept[0][0], len(kept))
