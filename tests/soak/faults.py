"""What may happen to the pods of a soak, drawn by chance, and what of it may be seen afterwards. Pure.

The log of the faults is the oracle: whatever the pods, their budget and their workers show beyond what `expected`
makes of it is a defect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

NODES = 6
CHECKPOINT_STEPS = 5
KILLED, STOPPED = 137, 143
_SHORT, _LONG = (1.5, 8.0), (13.0, 22.0)  # seconds until the next one
_PAIRS = 0.25  # how many troubles are two faults at a time

Range = tuple[int, int]
NONE: Range = (0, 0)
ONE: Range = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault, and what it costs where nothing else happens."""

    victims: int = 1  # nodes that it happens to; 0: all, or all but the one that is spared
    code: int | None = None  # how a victim's pod ends, to be started again; None: no pod is started again
    charges: Range = NONE  # failures that the job's budget counts
    starts: Range = ONE  # of the job's workers
    seconds: tuple[float, float] = (0.0, 0.0)  # how long it lasts, or how long a pod stays away
    bound_s: float = (
        60.0  # a pod imports torch anew, on a busy machine; between two steps of the job, beyond those seconds
    )
    may_pair: bool = False  # whether another fault may come at the same time


TORCH = {
    "kill worker": Kind(charges=ONE, may_pair=True),
    "kill all workers": Kind(victims=0, charges=ONE, starts=(1, 2)),
    "kill worker while starting": Kind(victims=2, charges=(2, 2), starts=(1, 2)),
    "hang worker": Kind(charges=ONE),
    "pause worker": Kind(starts=NONE, seconds=(0.5, 3.0)),
    "kill store": Kind(charges=ONE, starts=(1, 2)),
    "kill fork server": Kind(starts=(0, 2), may_pair=True),
    "kill pod": Kind(code=KILLED, starts=(1, 3), seconds=(0.5, 8.0), may_pair=True),
    "move pod": Kind(code=KILLED, starts=(1, 3), seconds=(0.5, 8.0), may_pair=True),
    "term pod": Kind(code=STOPPED, starts=(1, 3), seconds=(0.5, 8.0), may_pair=True),
    "roll": Kind(victims=0, code=STOPPED, starts=(1, 3 * NODES), seconds=(0.5, 3.0), bound_s=120.0),
    "partition": Kind(starts=(0, 3), seconds=(0.5, 12.0), may_pair=True),
}
# A rank that hangs or is cut off may take the others' process group with it; these end a rank or its pod.
_LEAVE_STATE = {"kill worker", "pause worker", "kill fork server", "kill pod", "move pod", "term pod"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to whom."""

    kind: str
    nodes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """Faults that belong together, the second `delay_s` after the first, and the quiet time after them."""

    faults: tuple[Fault, ...]
    delay_s: float
    quiet_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a trouble costs, or has cost: lists are by node."""

    codes: tuple[tuple[int, ...], ...]  # ends of pods, each of which is a start more
    charges: Range
    starts: Range
    bound_s: float  # between two steps that are new


def draw(seed: int, spared: int, kinds: Mapping[str, Kind]) -> Iterator[Trouble]:
    """Troubles without end, each kind once before any comes again; the pod of node `spared` is never ended."""
    chance = random.Random(f"soak {seed} {spared}")
    while True:
        deck = list(kinds)
        chance.shuffle(deck)
        for kind in deck:
            fit = _fit(kind, kinds[kind], spared)
            if not fit:
                continue
            faults = [_fault(kind, kinds[kind], chance, fit)]
            if kinds[kind].may_pair and chance.random() < _PAIRS:
                other = chance.choice([name for name in kinds if kinds[name].may_pair])
                fit = [node for node in _fit(other, kinds[other], spared) if node not in faults[0].nodes]
                faults += [_fault(other, kinds[other], chance, fit)] if fit else []
            quiet = _LONG if chance.random() < 0.3 else _SHORT
            yield Trouble(tuple(faults), chance.choice((0.0, chance.uniform(0.0, 4.0))), chance.uniform(*quiet))


def _fit(name: str, kind: Kind, spared: int) -> list[int]:
    """Whom it may happen to."""
    if name == "kill store":
        return [0]
    return [node for node in range(NODES) if kind.code is None or node != spared]


def _fault(name: str, kind: Kind, chance: random.Random, fit: Sequence[int]) -> Fault:
    nodes = chance.sample(fit, kind.victims or len(fit))
    return Fault(name, tuple(nodes), round(chance.uniform(*kind.seconds), 2))


def expected(faults: Sequence[Fault], known: Mapping[str, Kind]) -> Cost:
    """What faults that came together may cost.

    Of several one may hide another's failure, or prevent it; none may be charged, or start workers, more often than
    all do one by one.
    """
    kinds = [known[fault.kind] for fault in faults]
    codes: list[tuple[int, ...]] = [() for _ in range(NODES)]
    for fault, kind in zip(faults, kinds, strict=True):
        for node in fault.nodes:
            codes[node] += () if kind.code is None else (kind.code,)
    charges = _together([kind.charges for kind in kinds])
    starts = _together([kind.starts for kind in kinds])
    if len(kinds) > 1:
        charges, starts = (0, charges[1]), (min(1, starts[0]), starts[1] + 1)
    bound_s = sum(kind.bound_s + fault.seconds for fault, kind in zip(faults, kinds, strict=True))
    return Cost(tuple(codes), charges, starts, bound_s)


def leave_state(faults: Sequence[Fault]) -> bool:
    """Whether a rank that trains has its state through all of these, and no node comes back with an older one."""
    return all(fault.kind in _LEAVE_STATE for fault in faults)


def _together(ranges: Sequence[Range]) -> Range:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen from a trouble to the next one."""

    codes: tuple[tuple[int, ...], ...]
    last_words: tuple[tuple[str, ...], ...]
    charges: int
    starts: int
    longest_s: float  # between two steps that are new


def wrong(cost: Cost, seen: Seen) -> list[str]:
    """What the faults do not explain, a sentence each."""
    found = []
    for node, (want, got) in enumerate(zip(cost.codes, seen.codes, strict=True)):
        if sorted(want) != sorted(got):
            found.append(f"pod {node} ended with {list(got)}, where the faults explain {list(want)}")
    for node, (codes, texts) in enumerate(zip(seen.codes, seen.last_words, strict=True)):
        found += [
            f"pod {node} ended with {code} and the termination message {text!r}"
            for code, text in zip(codes, texts, strict=True)
            if not are_right(code, text)
        ]
    for what, (low, high), count in (
        ("failures charged", cost.charges, seen.charges),
        ("starts of the workers", cost.starts, seen.starts),
    ):
        if not low <= count <= high:
            found.append(f"{count} {what}, where the faults explain {low} to {high}")
    if seen.longest_s > cost.bound_s:
        found.append(f"no new step for {seen.longest_s:.1f} s, where the bound is {cost.bound_s:.1f} s")
    return found


def are_right(code: int, text: str) -> bool:
    """Whether a pod's termination message fits its exit code; a killed one has none."""
    if code == KILLED:
        return text == ""
    reason = {0: "Succeeded", STOPPED: "Stopped"}.get(code)
    first = text.split("\n", 1)[0]
    return first.startswith(f"reason={reason} ") and f" exit={code} " in first and len(text.encode()) <= 4096
