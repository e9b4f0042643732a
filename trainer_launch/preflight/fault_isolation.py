"""The next pairs of nodes to test, and the nodes, rails and links that are faulty. Pure.

The model: a pair test fails when one of its ends is faulty or the link between them is. A round is a set of
disjoint pairs that are tested at the same time; rounds are the cost, tests are free.

1. The ring's edges first, as every ring all-reduce uses them: the even ones, the odd ones, and with an odd number
   of nodes the one that closes the ring. Who passes any test is cleared. All pass: two rounds, and that is all.
2. Every other node is a suspect. It is tested with cleared nodes that it was not tested with before, until it
   passes or has failed with two of them. While nobody is cleared, suspects are tested with each other.
3. A failed pair of two cleared nodes is tested twice more: it is the link, always or now and then.
4. Where a network is in parts, as two fabrics are, a healthy node fails with all of another part. So who would be
   accused is tested with another one of these, and suspects with those first that failed most. The more links fail,
   the more cleared nodes must have failed with who is accused. Where one of these tests passes, or many links fail,
   nobody is, and no more is tested.

Where nodes have several rails (a GPU and its network card each), all rails of a pair are tested at once, and each
rail has a trial of its own: who fails on all of them is a faulty node or link, else it is those rails.

Nobody is accused on one failure, for its neighbours' links, or by another suspect. What cannot be decided is said
to be unresolved: of two nodes whose only test fails, either may be the faulty one.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations
from typing import TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

Pair: TypeAlias = tuple[int, int]  # the lower index first

WITNESSES = 2  # cleared partners beside the plan that a node must have failed with before it is named
RETESTS = 2  # of a failed pair whose ends are both cleared
_CHANCE = 0.02  # of a node that is accused to be healthy, and its links to all witnesses at fault
_MANY = 0.125  # of the links between cleared nodes
MAX_ROUNDS = 12


class PairTrial(Struct, frozen=True, kw_only=True):
    """The results so far of nodes 0 to `n_nodes` - 1."""

    n_nodes: int
    rounds: int = 0
    results: Mapping[Pair, Sequence[int]] = field(default_factory=dict)  # passed, failed
    lost: frozenset[int] = frozenset()  # nodes that no test can have any more


class Link(Struct, frozen=True, kw_only=True):
    """A pair of healthy nodes that fails; `failed` of `tests`."""

    ends: Pair
    failed: int
    tests: int
    rails: tuple[int, ...] = ()  # where it is not all of them


class Faulty(Struct, frozen=True, kw_only=True):
    """The nodes, rails and links at fault, and the pairs that could not be decided."""

    nodes: tuple[int, ...] = ()
    rails: tuple[tuple[int, tuple[int, ...]], ...] = ()  # nodes of which only some rails are at fault, and which
    links: tuple[Link, ...] = ()
    unresolved: tuple[Pair, ...] = ()  # failed pairs that neither a node nor a link named here explains
    rounds: int = 0


def pair(node: int, other: int) -> Pair:
    """Two nodes in the order that results have them."""
    return (node, other) if node < other else (other, node)


def next_round(*trials: PairTrial) -> tuple[Pair, ...]:
    """The pairs to test at the same time, each node at most once; none: all is known that can be."""
    planned = _ring_rounds(trials[0].n_nodes)
    n_rounds = trials[0].rounds
    if n_rounds < len(planned):
        here = tuple(ends for ends in planned[n_rounds] if trials[0].lost.isdisjoint(ends))
        if here:
            return here
    if n_rounds >= MAX_ROUNDS:
        return ()
    chosen: list[Pair] = []
    busy: set[int] = set()
    for trial in trials:
        for ends in _useful(trial, _Standing(trial, planned)):
            if not busy.intersection(ends):
                chosen.append(ends)
                busy.update(ends)
    return tuple(chosen)


def verdict(*trials: PairTrial) -> Faulty:
    """The nodes, rails and links at fault, by the results so far."""
    each = [_of_rail(trial) for trial in trials]
    if len(each) == 1:
        return each[0]
    accused = _by_rail((node, rail) for rail, its in enumerate(each) for node in its.nodes)
    links = _by_rail((link.ends, rail) for rail, its in enumerate(each) for link in its.links)
    tests = {link.ends: link for its in each for link in its.links}
    return Faulty(
        nodes=tuple(node for node, rails in accused.items() if len(rails) == len(each)),
        rails=tuple((node, rails) for node, rails in accused.items() if len(rails) < len(each)),
        links=tuple(
            replace(tests[ends], rails=rails if len(rails) < len(each) else ()) for ends, rails in links.items()
        ),
        unresolved=tuple(sorted({ends for its in each for ends in its.unresolved})),
        rounds=trials[0].rounds,
    )


_Named = TypeVar("_Named", int, Pair)


def _by_rail(pairs: Iterable[tuple[_Named, int]]) -> dict[_Named, tuple[int, ...]]:
    rails: defaultdict[_Named, set[int]] = defaultdict(set)
    for what, rail in pairs:
        rails[what].add(rail)
    return {what: tuple(sorted(rails[what])) for what in sorted(rails)}


def _of_rail(trial: PairTrial) -> Faulty:
    standing = _Standing(trial, _ring_rounds(trial.n_nodes))
    failed = sorted(ends for ends, (_, n_failed) in trial.results.items() if n_failed)
    links, unresolved = [], []
    for ends in failed:
        if standing.accused.intersection(ends):
            continue
        n_passed, n_failed = trial.results[ends]
        if standing.cleared.issuperset(ends) and not standing.is_in_parts and n_passed + n_failed > RETESTS:
            links.append(Link(ends=ends, failed=n_failed, tests=n_passed + n_failed))
        else:
            unresolved.append(ends)
    return Faulty(
        nodes=tuple(sorted(standing.accused)), links=tuple(links), unresolved=tuple(unresolved), rounds=trial.rounds
    )


class _Standing:
    """Each node's standing: cleared, accused, or a suspect."""

    def __init__(self, trial: PairTrial, planned: list[tuple[Pair, ...]]) -> None:
        self.cleared = {node for ends, (n_passed, _) in trial.results.items() if n_passed for node in ends}
        ring = {ends for chosen in planned for ends in chosen}
        met: Counter[int] = Counter()  # cleared partners that a node has failed with
        self.failures: Counter[int] = Counter()  # its failed pairs
        off_ring: Counter[int] = Counter()  # those that the plan has not led to
        for ends, (_, n_failed) in trial.results.items():
            for node, partner in (ends, ends[::-1]):
                self.failures[node] += n_failed > 0
                if n_failed and partner in self.cleared:
                    met[node] += 1
                    off_ring[node] += ends not in ring
        rest = [node for node in range(trial.n_nodes) if node not in self.cleared]
        links = [counts for ends, counts in trial.results.items() if self.cleared.issuperset(ends)]
        n_broken = sum(n_failed > 1 > n_passed for n_passed, n_failed in links)
        share = n_broken / max(1, len(links))
        # Nobody who fails with everybody passes with another one of these.
        have_passed = any(off_ring[node] >= WITNESSES for node in self.cleared)
        self.is_in_parts = have_passed or (n_broken > 2 and share > _MANY)
        # Where hardly anybody is cleared, all that are must have been met.
        everybody = max(WITNESSES, len(self.cleared))
        accused = (
            node
            for node in rest
            if met[node] >= everybody or (off_ring[node] >= WITNESSES and share ** off_ring[node] < _CHANCE)
        )
        self.accused = set() if self.is_in_parts else set(accused)
        have_met = {node for ends in trial.results if self.accused.issuperset(ends) for node in ends}
        self.suspects = [node for node in rest if node not in self.accused | trial.lost]
        self.unmet = [*self.suspects, *sorted(self.accused - have_met - trial.lost)]  # nobody like them


@lru_cache(maxsize=8)
def _ring_rounds(n: int) -> list[tuple[Pair, ...]]:
    """The rounds that are held whatever they show: the ring's edges, each node once."""
    if n < 2:
        return []
    edges = [pair(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
    closing = edges[n - 1 :] if n % 2 else []
    edges = edges[: len(edges) - len(closing)]
    return [tuple(chosen) for chosen in (edges[0::2], edges[1::2], closing) if chosen]


def _useful(trial: PairTrial, standing: _Standing) -> tuple[Pair, ...]:
    """Tests that may change the verdict, the ones that decide soonest first."""
    if standing.is_in_parts:
        return ()
    chosen = _confrontations(trial, standing)
    busy = {*trial.lost, *chain(*chosen)}
    for ends in chain(_retests(trial, standing), _first_meetings(trial, standing, busy)):
        if not busy.intersection(ends):
            chosen.append(ends)
            busy.update(ends)
    return tuple(chosen)


def _confrontations(trial: PairTrial, standing: _Standing) -> list[Pair]:
    """Each suspect with a cleared node that it has not met, wherever that sits on the ring."""
    chosen: list[Pair] = []
    free = deque(sorted(standing.cleared - trial.lost, key=lambda node: -standing.failures[node]))
    for suspect in standing.suspects:
        for _ in range(len(free)):
            partner = free.popleft()
            if pair(suspect, partner) not in trial.results:
                chosen.append(pair(suspect, partner))
                break
            free.append(partner)
    return chosen


def _retests(trial: PairTrial, standing: _Standing) -> Iterable[Pair]:
    """Failed pairs of two cleared nodes that were not tested often enough to blame the link.

    Of two nodes, the only pair has a second chance, as in a larger job each node has with another one.
    """
    return sorted(
        ends
        for ends, (n_passed, n_failed) in trial.results.items()
        if n_failed
        and n_passed + n_failed <= (RETESTS if standing.cleared.issuperset(ends) else trial.n_nodes == 2)
    )


def _first_meetings(trial: PairTrial, standing: _Standing, busy: set[int]) -> Iterator[Pair]:
    """Suspects with each other, for whom there is no cleared node: a pair that passes clears both."""
    waiting = [node for node in standing.unmet if node not in busy]
    for ends in combinations(waiting, 2):
        if busy.isdisjoint(ends) and pair(*ends) not in trial.results:
            yield pair(*ends)
