"""Which pairs of nodes to test next, and which nodes, rails and links are faulty. Pure.

The model: a pair test fails when one of its ends is faulty or the link between them is. A round is a set of
disjoint pairs that are tested at the same time; rounds are the cost, tests are free.

1. The ring's edges first, as every ring all-reduce uses them: the even ones, the odd ones, and with an odd number
   of nodes the one that closes the ring. Who passes any test is cleared. All pass: two rounds, and that is all;
   a deep trial goes on with the edges of both trees that NCCL reduces along: three rounds more.
2. Every other node is a suspect. It is tested with cleared nodes that it was not tested with before, until it
   passes or has failed with two of them. While nobody is cleared, suspects are tested with each other.
3. A failed pair of two cleared nodes is tested twice more: it is the link, always or now and then.

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
MAX_ROUNDS = 12
_OF_TREES = 4  # more, at most, in a deep trial


class Trial(Struct, frozen=True, kw_only=True):
    """What is known so far of nodes 0 to `n_nodes` - 1."""

    n_nodes: int
    is_deep: bool = False  # the trees' edges, too
    rounds: int = 0
    results: Mapping[Pair, Sequence[int]] = field(default_factory=dict)  # passed, failed


class Link(Struct, frozen=True, kw_only=True):
    """A pair of healthy nodes that fails; `failed` of `tests`."""

    ends: Pair
    failed: int
    tests: int
    rails: tuple[int, ...] = ()  # where it is not all of them


class Faulty(Struct, frozen=True, kw_only=True):
    """Who is at fault, and what could not be decided."""

    nodes: tuple[int, ...] = ()
    rails: tuple[tuple[int, tuple[int, ...]], ...] = ()  # nodes of which only some rails are at fault, and which
    links: tuple[Link, ...] = ()
    unresolved: tuple[Pair, ...] = ()  # failed pairs that neither a node nor a link named here explains
    rounds: int = 0


def pair(node: int, other: int) -> Pair:
    """Two nodes in the order that results have them."""
    return (node, other) if node < other else (other, node)


def next_round(*trials: Trial) -> tuple[Pair, ...]:
    """The pairs to test at the same time, each node at most once; none: all is known that can be."""
    planned = _planned(trials[0].n_nodes, trials[0].is_deep)
    n_rounds = trials[0].rounds
    if n_rounds < len(planned):
        return planned[n_rounds]
    if n_rounds >= MAX_ROUNDS + (_OF_TREES if trials[0].is_deep else 0):
        return ()
    chosen: list[Pair] = []
    busy: set[int] = set()
    for trial in trials:
        for ends in _useful(trial, _Standing(trial, planned)):
            if not busy.intersection(ends):
                chosen.append(ends)
                busy.update(ends)
    return tuple(chosen)


def verdict(*trials: Trial) -> Faulty:
    """Who is at fault, by the results so far."""
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


def _of_rail(trial: Trial) -> Faulty:
    standing = _Standing(trial, _planned(trial.n_nodes, trial.is_deep))
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
    return Faulty(
        nodes=tuple(sorted(standing.accused)), links=tuple(links), unresolved=tuple(unresolved), rounds=trial.rounds
    )


class _Standing:
    """Each node's standing: cleared, accused, or a suspect."""

    def __init__(self, trial: Trial, planned: list[tuple[Pair, ...]]) -> None:
        self.cleared = {node for ends, (n_passed, _) in trial.results.items() if n_passed for node in ends}
        ring = {ends for chosen in planned for ends in chosen}
        met: Counter[int] = Counter()  # cleared partners that a node has failed with
        off_ring: Counter[int] = Counter()  # those that the plan has not led to
        for ends, (_, n_failed) in trial.results.items():
            for node, partner in (ends, ends[::-1]):
                if n_failed and partner in self.cleared:
                    met[node] += 1
                    off_ring[node] += ends not in ring
        rest = [node for node in range(trial.n_nodes) if node not in self.cleared]
        # Where hardly anybody is cleared, all that are must have been met.
        everybody = max(WITNESSES, len(self.cleared))
        self.accused = {node for node in rest if off_ring[node] >= WITNESSES or met[node] >= everybody}
        self.suspects = [node for node in rest if node not in self.accused]


@lru_cache(maxsize=8)
def _planned(n: int, is_deep: bool) -> list[tuple[Pair, ...]]:
    """The rounds that are held whatever they show: the ring's edges, and perhaps the trees', each node once."""
    return _ring_rounds(n) + (rounds(n) if is_deep else [])


def _ring_rounds(n: int) -> list[tuple[Pair, ...]]:
    if n < 2:
        return []
    edges = [pair(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
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
    for ends in combinations(waiting, 2):
        if busy.isdisjoint(ends) and pair(*ends) not in trial.results:
            yield pair(*ends)


# -- NCCL's trees ------------------------------------------------------------------------------


def double_tree(n_nodes: int) -> frozenset[Pair]:
    """The edges of both trees of nodes 0 to `n_nodes` - 1."""
    parents = [_parent(node, n_nodes) for node in range(1, n_nodes)]
    first = [(node, parent) for node, parent in enumerate(parents, 1)]
    if n_nodes % 2:
        second = [((node + 1) % n_nodes, (parent + 1) % n_nodes) for node, parent in first]
    else:
        second = [(n_nodes - 1 - node, n_nodes - 1 - parent) for node, parent in first]
    return frozenset(pair(*edge) for edge in (*first, *second))


def _parent(node: int, n_nodes: int) -> int:
    """Of any node but 0: the lowest bit that is set goes one up, or away where that leads too far."""
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < n_nodes else node ^ bit


def rounds(n_nodes: int) -> list[tuple[Pair, ...]]:
    """Both trees' edges but those of the ring, each node once in a round: three rounds, or four."""
    edges = [ends for ends in double_tree(n_nodes) if ends[1] - ends[0] not in (1, n_nodes - 1)]
    used: defaultdict[int, set[int]] = defaultdict(set)  # rounds by node
    chosen: defaultdict[int, list[Pair]] = defaultdict(list)
    # The long ones, which meet at the roots, come first: then no more rounds are needed than a node has edges.
    for ends in sorted(edges, key=lambda ends: (ends[0] - ends[1], -ends[0])):
        taken = used[ends[0]] | used[ends[1]]
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        chosen[number].append(ends)
        for node in ends:
            used[node].add(number)
    return [tuple(sorted(chosen[number])) for number in sorted(chosen)]
