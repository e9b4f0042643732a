"""Which pairs of nodes to test next, and which nodes and links are guilty. Pure; one trial for each rail.

The model: a pair test fails when one of its ends is faulty or the link between them is. A round is a set of
disjoint pairs that are tested at the same time; rounds are the cost, tests are free.

1. The ring's edges first, as every ring all-reduce uses them: the even ones, the odd ones, and with an odd number
   of nodes the one that closes the ring. Who passes any test is cleared. All pass: two rounds, and that is all.
2. Every other node is a suspect. It is tested with cleared nodes that are not its neighbours on the ring, until it
   passes or has failed with two of them. While nobody is cleared, suspects are tested with each other.
3. A failed pair of two cleared nodes is tested twice more: it is the link, always or now and then.

Nobody is accused on one failure, for its neighbours' links, or by another suspect. What cannot be decided is said
to be unresolved: of two nodes whose only test fails, either may be the guilty one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from types import MappingProxyType
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]  # the lower index first

WITNESSES = 2  # cleared partners off the ring that a node must have failed with before it is named
RETESTS = 2  # of a failed pair whose ends are both cleared
MAX_ROUNDS = 12


def _nothing() -> Mapping[Pair, tuple[int, int]]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is known so far of nodes 0 to `n_nodes` - 1."""

    n_nodes: int
    rounds: int = 0
    absent: frozenset[int] = frozenset()  # nodes that were found guilty before, by themselves
    results: Mapping[Pair, tuple[int, int]] = field(default_factory=_nothing)  # passed, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A pair of healthy nodes that fails; `failed` of `tests`."""

    ends: Pair
    failed: int
    tests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Guilty:
    """Who is at fault, and what could not be decided."""

    nodes: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    unresolved: tuple[Pair, ...] = ()  # failed pairs that neither a node nor a link named here explains
    rounds: int = 0


def pair(one: int, other: int) -> Pair:
    """Two nodes in the order that results have them."""
    return (one, other) if one < other else (other, one)


def record(trial: Trial, passed: Mapping[Pair, bool]) -> Trial:
    """Add the results of a round."""
    results = dict(trial.results)
    for ends, good in passed.items():
        n_passed, n_failed = results.get(ends, (0, 0))
        results[ends] = (n_passed + good, n_failed + (not good))
    return Trial(n_nodes=trial.n_nodes, rounds=trial.rounds + 1, absent=trial.absent, results=results)


def next_round(trial: Trial) -> tuple[Pair, ...]:
    """The pairs to test at the same time, each node at most once; none: all is known that can be."""
    members = [node for node in range(trial.n_nodes) if node not in trial.absent]
    ring = _ring_rounds(members)
    if trial.rounds < len(ring):
        return ring[trial.rounds]
    return () if trial.rounds >= MAX_ROUNDS else _useful(trial, _Standing(trial, members))


def verdict(trial: Trial) -> Guilty:
    """Who is at fault, by the results so far."""
    members = [node for node in range(trial.n_nodes) if node not in trial.absent]
    standing = _Standing(trial, members)
    failed = sorted(ends for ends, (_, n_failed) in trial.results.items() if n_failed)
    links, unresolved = [], []
    for ends in failed:
        if standing.accused.intersection(ends):
            continue
        n_passed, n_failed = trial.results[ends]
        if standing.cleared.issuperset(ends) and n_passed + n_failed > RETESTS:
            links.append(Link(ends=ends, failed=n_failed, tests=n_passed + n_failed))
        else:
            unresolved.append(ends)
    return Guilty(
        nodes=tuple(sorted(standing.accused)),
        links=tuple(links),
        unresolved=tuple(unresolved),
        rounds=trial.rounds,
    )


class _Standing:
    """Each node's standing: cleared, accused, or a suspect."""

    def __init__(self, trial: Trial, members: list[int]) -> None:
        self.cleared = {node for ends, (n_passed, _) in trial.results.items() if n_passed for node in ends}
        ring = {ends for chosen in _ring_rounds(members) for ends in chosen}
        met: Counter[int] = Counter()  # cleared partners that a node has failed with
        off_ring: Counter[int] = Counter()  # those that are no neighbours
        for ends, (_, n_failed) in trial.results.items():
            for node, partner in (ends, ends[::-1]):
                if n_failed and partner in self.cleared:
                    met[node] += 1
                    off_ring[node] += ends not in ring
        rest = [node for node in members if node not in self.cleared]
        # Where hardly anybody is cleared, all that are must have been met.
        everybody = max(WITNESSES, len(self.cleared))
        self.accused = {node for node in rest if off_ring[node] >= WITNESSES or met[node] >= everybody}
        self.suspects = [node for node in rest if node not in self.accused]


def _ring_rounds(members: list[int]) -> list[tuple[Pair, ...]]:
    """The ring's edges in rounds that use each node once."""
    n = len(members)
    if n < 2:
        return []
    edges = [pair(members[i], members[(i + 1) % n]) for i in range(n if n > 2 else 1)]
    closing = edges[n - 1 :] if n % 2 else []
    edges = edges[: len(edges) - len(closing)]
    return [tuple(chosen) for chosen in (edges[0::2], edges[1::2], closing) if chosen]


def _useful(trial: Trial, standing: _Standing) -> tuple[Pair, ...]:
    """Tests that may change the verdict, the ones that decide soonest first."""
    chosen = _confrontations(trial, standing)
    busy = {node for ends in chosen for node in ends}
    for ends in chain(_retests(trial, standing), _first_meetings(trial, standing, busy)):
        if not busy.intersection(ends):
            chosen.append(ends)
            busy.update(ends)
    return tuple(chosen)


def _confrontations(trial: Trial, standing: _Standing) -> list[Pair]:
    """Each suspect with a cleared node that it has not met, wherever that sits on the ring."""
    chosen: list[Pair] = []
    free = deque(sorted(standing.cleared))
    for suspect in standing.suspects:
        for _ in range(len(free)):
            partner = free.popleft()
            if pair(suspect, partner) not in trial.results:
                chosen.append(pair(suspect, partner))
                break
            free.append(partner)
    return chosen


def _retests(trial: Trial, standing: _Standing) -> Iterable[Pair]:
    """Failed pairs of two cleared nodes that were not tested often enough to blame the link."""
    return sorted(
        ends
        for ends, (n_passed, n_failed) in trial.results.items()
        if n_failed and n_passed + n_failed <= RETESTS and standing.cleared.issuperset(ends)
    )


def _first_meetings(trial: Trial, standing: _Standing, busy: set[int]) -> Iterator[Pair]:
    """Suspects with each other, for whom there is no cleared node: a pair that passes clears both."""
    waiting = [node for node in standing.suspects if node not in busy]
    for one, other in combinations(waiting, 2):
        if one not in busy and other not in busy and pair(one, other) not in trial.results:
            yield pair(one, other)
