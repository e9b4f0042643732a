"""`--chaos 'seed=7 rate=1/30s'`: faults by chance, the same ones for the same seed on every machine. Pure.

Each fault has a generator of its own, made from the seed and the fault's number: of Python's random module only
`Random(text).random()` is used, which is promised to stay as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import parse_number, shown
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.grammar import Fault, When

DEFAULT_KINDS = ("kill worker", "stop worker", "kill pod", "term pod")  # what every machine can do
LASTS = ("stop worker", "partition", "slow link", "fill shm")  # drawn with an end, or they would end the job
NOT_BY_CHANCE = ("delay dns", "add node")
MAX_NODE = 10_000
_LASTS_S = (1.0, 9.0)  # at least, and how much more at most
_SLOW = 1e6  # bytes per second of a slow link
_LEAST_GAP_S = 0.05  # 20 a second on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """How faults are drawn."""

    seed: int
    gap_s: float  # on average between two of them
    kinds: tuple[str, ...] = DEFAULT_KINDS
    for_s: float | None = None  # none comes later than this; None: as long as the job runs
    nodes: tuple[int, ...] = ()  # whom they may hit; () until `over` has told it

    def over(self, nodes: Iterable[int]) -> Chaos:
        """The same for a job of these nodes, where nothing else was asked for.

        Raises:
            UsageError: one was asked for that the job has not.
        """
        there = tuple(nodes)
        strange = [node for node in self.nodes if node not in there]
        if strange:
            raise UsageError(f"--chaos: nodes has {strange[0]}; the job has {_counted(there)}")
        return replace(self, nodes=self.nodes or there)


def parse(text: str, where: str = "--chaos") -> Chaos:
    """Understand `seed=N rate=N/TIME [kinds=A,B] [for=TIME] [nodes=N,N|N-N]`.

    Raises:
        UsageError: it does not fit.
    """
    if len(text) > grammar.MAX_TEXT:
        raise UsageError(f"{where} is longer than {grammar.MAX_TEXT} characters: {shown(text)}")
    said, fields = f"{where} {shown(text)}", {}
    for word in grammar.split(text, where):
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals:
            near = "" if key in _KEYS else did_you_mean(key, [f"{name}=" for name in _KEYS])
            hint = near or f"expected {', '.join(_KEYS)}"
            raise UsageError(f"{said}: unknown key {shown(word)}; {hint}")
        field, read, expected = _KEYS[key]
        if field in fields:
            raise UsageError(f"{said}: {key} is given twice")
        fields[field] = read(value)
        if fields[field] is None:
            raise UsageError(f"{said}: invalid value {shown(value)} for {key}=: expected {expected}")
    for key, example in (("seed", "7"), ("rate", "1/30s")):
        if _KEYS[key][0] not in fields:
            raise UsageError(f"{said} has no {key}; add {key}={example}")
    return Chaos(**fields)


def draw(chaos: Chaos, number: int, after_s: float) -> Fault | None:
    """The fault with this number, counted from 0; it comes some time after the one before. None: no more."""
    chance = random.Random(f"{chaos.seed}/{number}").random
    at_s = round(after_s + max(0.001, -chaos.gap_s * math.log(1.0 - chance())), 3)
    if at_s > min(chaos.for_s or grammar.MAX_S, grammar.MAX_S) or not chaos.nodes:
        return None
    kind = chaos.kinds[int(chance() * len(chaos.kinds))]
    node = chaos.nodes[int(chance() * len(chaos.nodes))]
    lasts_s = round(_LASTS_S[0] + _LASTS_S[1] * chance(), 1) if kind in LASTS else None
    rate = _SLOW if kind == "slow link" else None
    fault = Fault(kind=kind, when=When(at_s=at_s), node=node, for_s=lasts_s, bytes_per_s=rate)
    return replace(fault, text=grammar.render(fault))


def replay(faults: Iterable[Fault]) -> str:
    """What makes the same faults come again, for the command line: one `--fault` on a line for each."""
    return "\n".join(f"--fault {_for_shell(fault.text)}" for fault in faults)


def _for_shell(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


# -- values -----------------------------------------------------------------------------------


def _seed(text: str) -> int | None:
    return parse_number(text, 0, 10**12 - 1)


def _gap(text: str) -> float | None:
    """The time between two faults, of `1/30s`."""
    count_text, _, time = text.partition("/")
    time = time if time[:1].isdigit() else f"1{time}"  # 2/m
    count, seconds = parse_number(count_text, 1, 1_000), grammar.parse_duration(time, least_s=0.001)
    gap_s = None if count is None or seconds is None else seconds / count
    return gap_s if gap_s is not None and gap_s >= _LEAST_GAP_S else None


def _kinds(text: str) -> tuple[str, ...] | None:
    kinds = tuple(" ".join(word.replace("-", " ").split()) for word in text.split(","))
    fit = all(kind in grammar.KINDS and kind not in NOT_BY_CHANCE for kind in kinds)
    return kinds if fit and len(set(kinds)) == len(kinds) else None


def _lasting(text: str) -> float | None:
    return grammar.parse_duration(text, least_s=0.001)


def _nodes(text: str) -> tuple[int, ...] | None:
    """Of `0,2` or `1-3`."""
    found: list[int] = []
    for part in text.split(","):
        low_text, dash, high_text = part.partition("-")
        low = parse_number(low_text, 0, MAX_NODE)
        high = parse_number(high_text, 0, MAX_NODE) if dash else low
        if low is None or high is None or high < low or len(found) > MAX_NODE:
            return None
        found += range(low, high + 1)
    return tuple(found) if len(set(found)) == len(found) else None


_MAY = ", ".join(kind.replace(" ", "-") for kind in grammar.KINDS if kind not in NOT_BY_CHANCE)
_KEYS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "seed": ("seed", _seed, "a whole number"),
    "rate": ("gap_s", _gap, f"a number in a time, such as 1/30s; {1 / _LEAST_GAP_S:.0f}/s at most"),
    "kinds": ("kinds", _kinds, f"some of {_MAY}, separated by commas"),
    "for": ("for_s", _lasting, grammar.DURATION),
    "nodes": ("nodes", _nodes, "indices of nodes, such as 0,2 or 1-3, each once"),
}


def _counted(nodes: tuple[int, ...]) -> str:
    return f"nodes 0 to {len(nodes) - 1}" if len(nodes) > 1 else "one node, 0"
