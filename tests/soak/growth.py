"""Whether what was measured again and again in one process stays the same: lines through points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """By least squares, without the warm-up; None where there are too few points to tell."""
    kept = points[int(len(points) * WARM_UP) :]
    if len(kept) < MIN_SAMPLES or kept[-1][0] - kept[0][0] < MIN_S:
        return None
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean_v = sum(v for _, v in kept) / len(kept)
    spread = sum((t - mean_t) ** 2 for t, _ in kept)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in kept) / spread
    first = mean_v + slope * (kept[0][0] - mean_t)
    return Line(slope * HOUR_S, first, kept[-1][0] - kept[0][0], len(kept))
