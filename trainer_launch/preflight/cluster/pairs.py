"""Tests of pairs of nodes: what nodes can test with, the rounds, and which node, rail or link is faulty.

Without sockets and clock: `pair_tests.py` makes the tests.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from trainer_launch.model.findings import Basis, Fault, Finding, Measure, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight import fault_isolation, gpu_checks
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import CLIQUE
from trainer_launch.preflight.cluster.present_nodes import (
    Cluster,
    ClusterSettings,
    JobNode,
    PairTest,
    PairTests,
    listed,
)
from trainer_launch.preflight.fault_isolation import Link, Pair, PairTrial
from trainer_launch.preflight.thresholds import FLOOR, MBYTE

FACT = "pair tests"  # what a node can test with, among its facts
SOCKET, NCCL = "socket", "nccl"
_NCCL_FACT = re.compile(r"nccl on (\d{1,4}) GPUs")
_ENOUGH = 4  # pairs that can be compared with each other
_SHOWN = 6
_ACTION_NODE = "run the job without that machine, and check its network card, cable and switch port"
_ACTION_LINK = "check the switches, cables, routes and network policies between the two"
_ACTION_SLOW = "check the network card, cable and switch port for errors, and their negotiated speed"
_ACTION_REFERENCE = (
    "is NCCL on plain sockets, or is there less than one NIC for each GPU? Where that is meant, save it with "
    "--report FILE.json and pass that as --reference"
)
# Of the median of all: who is below warns. Without accelerators, other work on a machine is seen, too.
_SHARES = {SOCKET: 0.3, NCCL: 0.75}
_SHARE_OF_REFERENCE = 0.75
_OVERSUBSCRIBED = 0.1  # of that, who is alone behind a switch that other racks' traffic shares has more
_TEST_S = 5.0
_PATIENCE = {SOCKET: 1, NCCL: 4}  # times a test's time, for who has to set more up
_REPORT_S = 2.0  # from a test's limit until its ends have reported
_NO_REPORT = msg.RailResult("no report", 0)
_DAMAGED = "the data arrives damaged"  # as both kinds of children have it


class Rounds:
    """All rounds of one cluster preflight; nodes have numbers. `tests` has what they came to so far."""

    def __init__(
        self, settings: ClusterSettings, nodes: Sequence[JobNode], send: Callable[[int, msg.FromServer], None]
    ) -> None:
        self._settings, self._nodes, self._send = settings, nodes, send
        self._numbers = {node.rank: number for number, node in enumerate(nodes)}
        n_rails = rails_of([node.report.facts.get(FACT) for node in nodes])
        models = {measure.model for node in nodes for measure in node.report.measures}
        model = models.pop() if len(models) == 1 and n_rails else ""
        reference = settings.table.of(Measure("pair", 0.0, "GB/s", model, None))
        self.tests = PairTests(
            names=tuple(node.name for node in nodes),
            way=NCCL if n_rails else SOCKET,
            n_rails=n_rails or 1,
            model=model,
            reference=0.0 if reference is None else reference.value,
        )
        self._places = [_place(node, self.tests.way) for node in nodes]
        self._trials = [PairTrial(n_nodes=len(nodes))] * self.tests.n_rails
        self._chosen: tuple[Pair, ...] = ()
        self._busy: set[int] = set()  # numbers of the nodes that have a part in this round
        self._results: dict[int, msg.Result] = {}
        self._round = 0
        self._until_s = 0.0
        self.is_over = False

    def begin(self, now_s: float) -> None:
        """Order the next round, if there is a test that may change the verdict."""
        self._chosen = fault_isolation.next_round(*self._trials)
        self._results, self._round = {}, self._trials[0].rounds
        self.is_over = not self._chosen
        limit_s = _TEST_S * _PATIENCE[self.tests.way]
        self._until_s = now_s + limit_s + _REPORT_S
        self._busy = {number for ends in self._chosen for number in ends}
        for ends in self._chosen:
            # On a ring each node listens once, for the next one, and connects once.
            closes_ring = len(self._nodes) > 2 and ends == (0, len(self._nodes) - 1)
            listener, dialer = ends[::-1] if closes_ring else ends
            first = self._nodes[listener]
            host = self._settings.host(first.rank) or first.at.host  # by name, as the job will
            token = f"{self._settings.salt}-{self._round}-{listener}-{dialer}"
            for rank, number in enumerate((listener, dialer)):
                peer = self._nodes[number].peer
                if peer is not None:
                    how = (limit_s, self.tests.way, self.tests.n_rails)
                    self._send(peer, msg.Test(self._round, rank, host, first.at.port, token, *how, first.at.host))

    def take(self, rank: int, result: msg.Result) -> None:
        """Note the result of one end; a result of an earlier round is too late."""
        if result.round == self._round and rank in self._numbers:
            self._results.setdefault(self._numbers[rank], result)

    def is_due(self, now_s: float, lost: Collection[int]) -> bool:
        """Whether the round has ended; `lost` are ranks."""
        if now_s >= self._until_s or len(self._results) + len(lost) < len(self._busy):
            return now_s >= self._until_s
        return self._busy <= self._results.keys() | self._gone(lost)

    def next(self, now_s: float, lost: Collection[int] = ()) -> None:
        """Judge the round, and begin the next one; with a node that is lost, a test says nothing of a network."""
        gone = self._gone(lost)
        new = [test for ends in self._chosen if gone.isdisjoint(ends) for test in self._tested(ends)]
        self.tests = replace(self.tests, tests=(*self.tests.tests, *new))
        # Early rounds have little to compare with: all are judged anew by what is known now.
        standard = Standard(self.tests)
        results: list[dict[Pair, list[int]]] = [{} for _ in self._trials]
        for test in self.tests.tests:
            results[test.rail or 0].setdefault(test.ends, [0, 0])[standard.is_bad(test)] += 1
        self._trials = [
            replace(trial, rounds=self._round + 1, results=its, lost=gone)
            for trial, its in zip(self._trials, results, strict=True)
        ]
        self.tests = replace(self.tests, faulty=fault_isolation.verdict(*self._trials))
        self.begin(now_s)

    def _gone(self, lost: Collection[int]) -> frozenset[int]:
        """The numbers of the nodes that are lost, whose ranks are given."""
        return frozenset(self._numbers[rank] for rank in lost if rank in self._numbers)

    def _tested(self, ends: Pair) -> Iterator[PairTest]:
        n_rails, (first, second) = self.tests.n_rails, (self._places[number] for number in ends)
        reported = [self._results[number].rails if number in self._results else () for number in ends]
        whole = ((*rails, *[_NO_REPORT] * n_rails)[:n_rails] for rails in reported)
        for rail, (here, there) in enumerate(zip(*whole, strict=True)):
            rates = [end.rate for end in (here, there) if not end.why]
            its_rail = rail if n_rails > 1 else None
            yield PairTest(ends, (here.why, there.why), min(rates, default=0), its_rail, first == second)


def _place(node: JobNode, way: str) -> str:
    """The NVLink fabric or the machine of a node, within which it is faster than beyond."""
    cliques = (f"{name} {its}" for name, its in node.report.facts.items() if name.startswith(CLIQUE))
    clique = next(cliques, "") if way == NCCL else ""
    return clique or node.machine


def means_fact(gpus: int, why: str) -> str:
    """The fact of a node that says what it can test with."""
    return f"nccl on {gpus} GPUs" if gpus else f"only plain sockets: {why}"


def rails_of(facts: Sequence[str | None]) -> int:
    """The rails of NCCL where all nodes have it by their facts; 0: plain sockets."""
    matches = [_NCCL_FACT.fullmatch(fact or "") for fact in facts]
    return min([msg.MAX_RAILS, *(0 if match is None else int(match[1]) for match in matches)])


@check("pairs", Where.CLUSTER)
def pairs(cluster: Cluster) -> Iterator[Finding]:
    """Every tested pair of nodes exchanges data without errors, fast enough and about as fast as the others."""
    if cluster.pairs is not None:
        yield from of_pairs(cluster.pairs)
        yield from below_reference(cluster.pairs)


def below_reference(tests: PairTests) -> Iterator[Finding]:
    """A warning about the job where pairs deliver, in GB/s for each GPU, less than the model's reference allows."""
    reference, middle = tests.reference, statistics.median([measure.value for measure in tests.measures] or [0])
    if not middle or middle >= _SHARE_OF_REFERENCE * reference:
        return
    text = f"{tests.model}: a pair of nodes delivers {middle:.3g} GB/s for each GPU in the median, "
    text += f"{middle / reference:.0%} of the reference {reference:g}"
    more = {"measured": round(middle, 2), "expected": round(reference, 2), "unit": "GB/s"}
    yield pairs.bad(None, text, scope=Scope.JOB, basis=Basis.ABSOLUTE, action=_ACTION_REFERENCE, **more)


class Standard:
    """The standard of pair tests: a floor for all, each other, and for each pair and node its best result.

    A node is slow only if its best is: its partners do better with others. A pair is, likewise: one slow test of
    three may be other work on a machine. And tests of suspects with nodes that are cleared must not move what all
    are compared with. Tests within a machine or an NVLink fabric are compared with each other only.
    """

    def __init__(self, tests: PairTests) -> None:
        self.names, self.share = tests.names, _SHARES[tests.way]
        self._expected = _SHARE_OF_REFERENCE * tests.reference * 1e9
        whole = [test for test in tests.tests if test.is_whole]
        of_pairs = grouped(((test.ends, test.rail, test.is_near), test.rate) for test in whole)
        of_nodes = grouped(((end, test.rail, test.is_near), test.rate) for test in whole for end in test.ends)
        self._bests, bests = ({at: max(its) for at, its in rates.items()} for rates in (of_pairs, of_nodes))
        firsts = grouped((near, rates[0]) for (_, _, near), rates in of_pairs.items())
        nodes = grouped((near, rate) for (_, _, near), rate in bests.items())
        self.of_pairs, self.of_nodes = (_each(statistics.median, rates) for rates in (firsts, nodes))
        self._slowest, allowed = (_each(self._slowest_allowed, rates) for rates in (firsts, nodes))
        self._slow = {at for at, rate in bests.items() if rate < allowed[at[2]]}

    def is_bad(self, test: PairTest) -> bool:
        """Whether the pair failed, or is too slow."""
        if not test.is_whole or self._bests[test.ends, test.rail, test.is_near] < self._slowest[test.is_near]:
            return True
        return any((end, test.rail, test.is_near) in self._slow for end in test.ends)

    def fails(self, tests: Iterable[PairTest], least: float = FLOOR) -> bool:
        """Whether one of these tests fails by itself; slowness by comparison alone only warns."""
        return any(not test.is_whole or test.rate < least for test in tests)

    def is_hard(self, tests: Iterable[PairTest], *, is_of_rails: bool) -> bool:
        """Whether these tests of a node fail by themselves, or are slower than its model has to be."""
        # Where pairs of this network do not reach what is expected, that proves nothing of a node.
        is_slow = min(self.of_pairs.values(), default=0) < self._expected
        share = 0.0 if is_slow else 1.0 if is_of_rails else _OVERSUBSCRIBED
        return self.fails(tests, max(FLOOR, share * self._expected))

    def _slowest_allowed(self, rates: Sequence[int]) -> float:
        """Bytes per second below which it is too slow for anything, or by far slower than the others."""
        if len(rates) < _ENOUGH:
            return FLOOR
        middle = statistics.median(rates)
        least = middle - gpu_checks.SIGMAS * gpu_checks.deviation(rates, middle)
        return max(FLOOR, min(self.share * middle, least))


def _each(made: Callable[[Sequence[int]], float], rates: Mapping[bool, Sequence[int]]) -> dict[bool, float]:
    """One figure of the near tests, one of the others."""
    return {near: made(its) for near, its in rates.items()}


def of_pairs(tests: PairTests) -> Iterator[Finding]:
    """Nodes, then links, then what could not be decided; or that all have passed."""
    standard, faulty = Standard(tests), tests.faulty
    by_node = grouped((end, test) for test in tests.tests for end in test.ends)
    for node, rails in (*((node, ()) for node in faulty.nodes), *faulty.rails):
        its = [test for test in by_node.get(node, []) if not rails or test.rail in rails]
        yield _of_node(node, rails, its, standard)
    by_ends = grouped((test.ends, test) for test in tests.tests)
    for link in faulty.links:
        its = [test for test in by_ends.get(link.ends, []) if not link.rails or test.rail in link.rails]
        yield _of_link(link, its, standard)
    unresolved = grouped((standard.fails(by_ends.get(ends, ())), ends) for ends in faulty.unresolved)
    for is_hard, several in unresolved.items():  # of a network that lets nothing through, all
        its = [test for ends in several for test in by_ends.get(ends, ())]
        yield _unresolved(several, its, standard, is_hard=is_hard)
    if tests.tests and not (faulty.nodes or faulty.rails or faulty.links or faulty.unresolved):
        yield _well(tests, standard)


def _of_node(
    node: int,
    rails: Sequence[int],  # of which only these are at fault
    its: Sequence[PairTest],
    standard: Standard,
) -> Finding:
    names = standard.names
    name = f"{names[node]}{_on(rails)}"
    bad = [test for test in its if standard.is_bad(test)]
    partners = listed(list(dict.fromkeys(names[sum(test.ends) - node] for test in bad)))
    hard, middle = standard.is_hard(bad, is_of_rails=bool(rails)), standard.of_nodes.get(bad[0].is_near, 0)
    text = (
        f"{name} fails in {len(bad)} of {len(its)} pair tests, with {partners}, "
        f"which pass with other nodes: the faulty part is this {'GPU or its network card' if rails else 'node'}"
        if hard
        else f"{name} is slow with all its partners ({partners}): {_rates(bad)}, while nodes reach "
        f"{_shown(middle)} in the median"
    )
    more = {"scope": Scope.RAIL if rails else Scope.NODE, "action": _ACTION_NODE if hard else _ACTION_SLOW}
    # All rails may be slow for what lies before the node: the switch of a rack with one node of this job.
    more["remedy"] = "DRAIN" if (hard and rails) or standard.fails(bad) else ""
    return _blamed(bad, standard, text, is_hard=hard, subject=name, middle=middle, **more)


def _of_link(link: Link, its: Sequence[PairTest], standard: Standard) -> Finding:
    bad = [test for test in its if standard.is_bad(test)]
    first, second = (standard.names[end] for end in link.ends)
    middle = standard.of_pairs.get(bad[0].is_near, 0)
    how, how_slow, fails = "fails", "", standard.fails(bad)  # switches may be shared, and so slower
    # Once in several tests it may be other work on a machine, unless that changes data.
    is_hard = fails and (link.failed > 1 or any(_DAMAGED in test.whys for test in bad))
    if not fails:
        how, how_slow = "is slow", f": {_rates(bad)}, the median of all pairs is {_shown(middle)}"
    text = (
        f"the link between {first} and {second}{_on(link.rails)} {how} in {link.failed} of {link.tests} tests"
        f"{', while both pass with other nodes' if len(standard.names) > 2 else ''}{how_slow}"
    )
    subject = f"{first} - {second}{_on(link.rails)}"
    return _blamed(bad, standard, text, is_hard=is_hard, subject=subject, middle=middle)


def _unresolved(several: Sequence[Pair], its: Sequence[PairTest], standard: Standard, *, is_hard: bool) -> Finding:
    names, how = [[standard.names[end] for end in ends] for ends in several], "fail" if is_hard else "are slow"
    text = f"{listed([' and '.join(two) for two in names])} {how} with each other; either one of the two is faulty "
    text += "or the path between them (unresolved)"
    return _blamed(its, standard, text, is_hard=is_hard, subject=", ".join(map(" - ".join, names)))


def _blamed(
    bad: Sequence[PairTest],
    standard: Standard,
    text: str,
    *,
    is_hard: bool,
    middle: float | None = None,  # of what `bad` are held against, if that explains them
    **more: Any,
) -> Finding:
    if middle is not None:
        more["measured"] = round(max(test.rate for test in bad) / MBYTE, 1) if bad else None
        more["expected"] = round(max(FLOOR, standard.share * middle) / MBYTE, 1)
        more |= {"unit": "MB/s", "basis": Basis.BOTH if is_hard else Basis.PEER}
    evidence = tuple(_evidence(test, standard.names) for test in bad[:_SHOWN])
    more = {"scope": Scope.LINK, "action": _ACTION_LINK} | more
    return pairs.bad(Fault.NODE if is_hard else None, text, evidence=evidence, **more)


def _on(rails: Sequence[int]) -> str:
    return f", rail {', '.join(map(str, rails))}" if rails else ""


def _well(tests: PairTests, standard: Standard) -> Finding:
    slowest, rails = min(test.rate for test in tests.tests), tests.n_rails
    text = (
        f"{counted(len(tests.tests) // rails, 'pair test')} in {counted(tests.faulty.rounds, 'round')} passed"
        f"{f' on each of {rails} rails' if rails > 1 else ''}, from {_shown(slowest)} to "
        f"{_shown(max(test.rate for test in tests.tests))}, "
        f"median {_shown(statistics.median(test.rate for test in tests.tests))}"
    )
    return pairs.passed(text, scope=Scope.JOB, measured=round(slowest / MBYTE, 1), unit="MB/s")


def _evidence(test: PairTest, names: Sequence[str]) -> str:
    first, second = (names[end] for end in test.ends)
    where = f"{first} - {second}{'' if test.rail is None else _on([test.rail])}"
    if test.is_whole:
        return f"{where}: {_shown(test.rate)}"
    if all(test.whys):
        return f"{where}: {test.whys[0]}; the other node: {test.whys[1]}"
    well, ill = (second, first) if test.whys[0] else (first, second)
    return f"{where}: in one direction only: {well} saw nothing wrong, {ill} says: {''.join(test.whys)}"


def _rates(tests: Sequence[PairTest]) -> str:
    return ", ".join(_shown(test.rate) for test in tests[:_SHOWN])


def _shown(rate: float) -> str:
    return f"{float(f'{rate / MBYTE:.3g}'):,g} MB/s"
