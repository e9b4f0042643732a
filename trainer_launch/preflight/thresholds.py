"""--threshold as values: what is enough for GPUs and for pairs of nodes."""

from __future__ import annotations

from trainer_launch.model.errors import UsageError
from trainer_launch.preflight.cluster.pair_results import MBYTE, Thresholds
from trainer_launch.preflight.gpu_judgement import CHECKS, Shares

PAIR, PAIR_MBPS, PEERS = "pair", "pair-mbps", "peers"
NAMES = (*CHECKS, PEERS, PAIR, PAIR_MBPS)
_MAX = 1e9


def parse(text: str | None) -> tuple[Thresholds, Shares]:
    """The thresholds of pairs, and those of what GPUs measure.

    Raises:
        UsageError: it names something else, or no number.
    """
    numbers: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        numbers[name] = _positive(value)
        if name not in NAMES or numbers[name] < 0:
            raise UsageError(
                f"--threshold has {part[:60]!r}; expected NAME=NUMBER, as in gemm=0.85; the names are: "
                f"{', '.join(NAMES)}"
            )
    default = Thresholds()
    of_pairs = Thresholds(
        ratio=numbers.get(PAIR),
        floor=numbers[PAIR_MBPS] * MBYTE if PAIR_MBPS in numbers else default.floor,
    )
    return of_pairs, Shares({name: numbers[name] for name in CHECKS if name in numbers}, numbers.get(PEERS))


def _positive(text: str) -> float:
    """-1 for what is no number of this kind."""
    try:
        return float(text) if 0 <= float(text) < _MAX else -1.0
    except ValueError:
        return -1.0
