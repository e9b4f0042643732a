"""What the tests of pairs of nodes come to: which pair counts as failed, and who is said to be at fault. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight import fault_isolation
from trainer_launch.preflight.cluster.comparison import listed
from trainer_launch.preflight.cluster.transport import GLOO, NCCL, SOCKET
from trainer_launch.preflight.fault_isolation import Guilty, Link, Pair, Trial

NAME = "pairs"
MBYTE = 1_000_000
RATIOS = {SOCKET: 0.3, GLOO: 0.3, NCCL: 0.75}  # without accelerators, other work on a machine is seen, too
_ENOUGH = 4  # pairs that can be compared with each other
_MAD_TO_SIGMA = 1.4826
_SIGMAS = 4.0
_SHOWN = 6
_ACTION_NODE = "put the job on other machines than that one, and see its network card, cable and switch port"
_ACTION_LINK = "see the switches, cables, routes and network policies between the two"
_ACTION_SLOW = "see the network card, cable and switch port for errors and their negotiated speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a pair is too slow."""

    floor: float = 10 * MBYTE  # bytes per second, for anything: a tenth of the slowest network that is still sold
    ratio: float | None = None  # of the median of all pairs: below it a pair is told, and does not stop the job
    expected: float = 0.0  # bytes per second: who is below this, too, stops it

    @property
    def share(self) -> float:
        """`ratio`, also where nobody has said it."""
        return RATIOS[SOCKET] if self.ratio is None else self.ratio


@dataclass(frozen=True, slots=True)
class Tested:
    """One test of a pair on one rail, as both its ends saw it: the lower index first."""

    ends: Pair
    whys: tuple[str, str]  # "": it went well
    rate: int  # bytes per second, the slowest that was seen
    rail: int | None = None  # where there are several

    @property
    def is_whole(self) -> bool:
        """Whether all data came through, at whatever speed."""
        return not any(self.whys)


class Standard:
    """What tests are held against: one floor for all, each other, and for each pair and node what it does best.

    A node is slow only if its best is: its partners do better with others. A pair is, likewise: one slow test of
    three may be other work on a machine. And tests of suspects with nodes that are cleared must not move what all
    are compared with.
    """

    def __init__(self, thresholds: Thresholds, tests: Iterable[Tested]) -> None:
        self.thresholds = thresholds
        firsts: dict[tuple[Pair, int | None], int] = {}
        bests: dict[tuple[int, int | None], int] = {}
        self._bests: dict[tuple[Pair, int | None], int] = {}
        for test in tests:
            if test.is_whole:
                firsts.setdefault((test.ends, test.rail), test.rate)
                self._bests[test.ends, test.rail] = max(test.rate, self._bests.get((test.ends, test.rail), 0))
                for end in test.ends:
                    bests[end, test.rail] = max(test.rate, bests.get((end, test.rail), 0))
        self.of_pairs, self.of_nodes = (statistics.median(rates.values() or [0]) for rates in (firsts, bests))
        self._slowest = _slowest_allowed(thresholds, list(firsts.values()))
        allowed = _slowest_allowed(thresholds, list(bests.values()))
        self._slow = {node for node, rate in bests.items() if rate < allowed}

    def is_bad(self, test: Tested) -> bool:
        """Whether the pair failed, or is too slow."""
        if not test.is_whole or self._bests.get((test.ends, test.rail), 0) < self._slowest:
            return True
        return any((end, test.rail) in self._slow for end in test.ends)

    def is_hard(self, tests: Iterable[Tested]) -> bool:
        """Whether it is more than slowness by comparison, which only warns."""
        wanted = max(self.thresholds.floor, self.thresholds.expected)
        return any(not test.is_whole or test.rate < wanted for test in tests)

    def expected(self, middle: float) -> float:
        """MB/s."""
        return round(max(self.thresholds.floor, self.thresholds.share * middle) / MBYTE, 1)


def _slowest_allowed(thresholds: Thresholds, rates: Sequence[int]) -> float:
    """Bytes per second below which it is too slow for anything, or by far slower than the others."""
    if len(rates) < _ENOUGH:
        return thresholds.floor
    middle = statistics.median(rates)
    spread = _MAD_TO_SIGMA * statistics.median(abs(rate - middle) for rate in rates)
    return max(thresholds.floor, min(thresholds.share * middle, middle - _SIGMAS * spread))


def judged(trial: Trial, rounds: Sequence[Sequence[Tested]], standard: Standard) -> Trial:
    """A trial with the results of all rounds; by what is known now, as early rounds have little to compare with."""
    for tests in rounds:
        trial = fault_isolation.record(trial, {test.ends: not standard.is_bad(test) for test in tests})
    return trial


def findings(
    names: Sequence[str], guilty: Guilty, tests: Sequence[Tested], thresholds: Thresholds
) -> Iterator[Finding]:
    """Nodes, then links, then what could not be decided; or that all is well."""
    standard = Standard(thresholds, tests)
    by_node: dict[int, list[Tested]] = {}
    for test in tests:
        for end in test.ends:
            by_node.setdefault(end, []).append(test)
    for node in guilty.nodes:
        yield _of_node(node, (), names, by_node.get(node, []), standard)
    for node, rails in guilty.rails:
        its = [test for test in by_node.get(node, []) if test.rail in rails]
        yield _of_node(node, rails, names, its, standard)
    for link in guilty.links:
        its = [test for test in tests if test.ends == link.ends and (not link.rails or test.rail in link.rails)]
        yield _of_link(link, names, its, standard)
    for ends in guilty.unresolved:
        yield _unresolved(ends, names, [test for test in tests if test.ends == ends], standard)
    if tests and not (guilty.nodes or guilty.rails or guilty.links or guilty.unresolved):
        yield _well(tests, guilty.rounds, standard)


def not_as_asked(why: str) -> Finding:
    """Another way than the one that was asked for."""
    text = f"pairs were tested over plain sockets: {why}"
    action = "see what the nodes' own facts say of their pair tests (check facts), or leave --pair-test away"
    return Finding(check=NAME, status=Status.WARN, scope=Scope.JOB, text=text, action=action)


def _of_node(
    node: int,
    rails: Sequence[int],  # of which only these are at fault
    names: Sequence[str],
    its: Sequence[Tested],
    standard: Standard,
) -> Finding:
    name = f"{names[node]}{_on(rails)}"
    bad = [test for test in its if standard.is_bad(test)]
    partners = listed(list(dict.fromkeys(names[_other(test, node)] for test in bad)))
    hard = standard.is_hard(bad)
    text = (
        f"{name} fails in {len(bad)} of {len(its)} pair tests, with {partners}, "
        f"which pass with other nodes: the faulty part is this {'GPU or its network card' if rails else 'node'}"
        if hard
        else f"{name} is slow with all its partners ({partners}): {_rates(bad)}, while nodes reach "
        f"{_shown(standard.of_nodes)} in the median"
    )
    return Finding(
        check=NAME,
        status=Status.FAIL if hard else Status.WARN,
        fault=Fault.NODE if hard else None,
        scope=Scope.RAIL if rails else Scope.NODE,
        subject=name,
        text=text,
        measured=_best(bad),
        expected=standard.expected(standard.of_nodes),
        unit="MB/s",
        basis=Basis.BOTH if hard else Basis.PEER,
        evidence=tuple(_evidence(test, names) for test in bad[:_SHOWN]),
        action=_ACTION_NODE if hard else _ACTION_SLOW,
    )


def _of_link(link: Link, names: Sequence[str], its: Sequence[Tested], standard: Standard) -> Finding:
    bad = [test for test in its if standard.is_bad(test)]
    hard = standard.is_hard(bad)
    one, other = (names[end] for end in link.ends)
    how = "fails" if hard else "is slow"
    how_slow = "" if hard else f": {_rates(bad)}, the median of all pairs is {_shown(standard.of_pairs)}"
    return Finding(
        check=NAME,
        status=Status.FAIL if hard else Status.WARN,
        fault=Fault.NODE if hard else None,
        scope=Scope.LINK,
        subject=f"{one} - {other}{_on(link.rails)}",
        text=f"the link between {one} and {other}{_on(link.rails)} {how} in {link.failed} of {link.tests} tests, "
        f"while both pass with other nodes{how_slow}",
        measured=_best(bad),
        expected=standard.expected(standard.of_pairs),
        unit="MB/s",
        basis=Basis.BOTH if hard else Basis.PEER,
        evidence=tuple(_evidence(test, names) for test in bad[:_SHOWN]),
        action=_ACTION_LINK,
    )


def _unresolved(ends: Pair, names: Sequence[str], its: Sequence[Tested], standard: Standard) -> Finding:
    hard = standard.is_hard(its)
    one, other = (names[end] for end in ends)
    return Finding(
        check=NAME,
        status=Status.FAIL if hard else Status.WARN,
        fault=Fault.NODE if hard else None,
        scope=Scope.LINK,
        subject=f"{one} - {other}",
        text=f"{one} and {other} {'fail' if hard else 'are slow'} with each other; whether it is one of them or "
        "the way between them cannot be told (unresolved)",
        evidence=tuple(_evidence(test, names) for test in its[:_SHOWN]),
        action=_ACTION_LINK,
    )


def _on(rails: Sequence[int]) -> str:
    return f", rail {', '.join(map(str, rails))}" if rails else ""


def _well(tests: Sequence[Tested], rounds: int, standard: Standard) -> Finding:
    slowest = min(test.rate for test in tests)
    n_rails = len({test.rail for test in tests})
    return Finding(
        check=NAME,
        status=Status.PASS,
        scope=Scope.JOB,
        text=f"{counted(len(tests) // n_rails, 'pair test')} in {counted(rounds, 'round')} passed"
        f"{f' on each of {n_rails} rails' if n_rails > 1 else ''}, from {_shown(slowest)} to "
        f"{_shown(max(test.rate for test in tests))}, median {_shown(standard.of_pairs)}",
        measured=round(slowest / MBYTE, 1),
        unit="MB/s",
    )


def _evidence(test: Tested, names: Sequence[str]) -> str:
    one, other = (names[end] for end in test.ends)
    where = f"{one} - {other}{'' if test.rail is None else _on([test.rail])}"
    if test.is_whole:
        return f"{where}: {_shown(test.rate)}"
    if all(test.whys):
        return f"{where}: {test.whys[0]}; the other node: {test.whys[1]}"
    well, ill = (other, one) if test.whys[0] else (one, other)
    return f"{where}: one way only: {well} saw nothing wrong, {ill} says: {''.join(test.whys)}"


def _other(test: Tested, node: int) -> int:
    return test.ends[1] if test.ends[0] == node else test.ends[0]


def _best(tests: Sequence[Tested]) -> float | None:
    return round(max(test.rate for test in tests) / MBYTE, 1) if tests else None


def _rates(tests: Sequence[Tested]) -> str:
    return ", ".join(_shown(test.rate) for test in tests[:_SHOWN])


def _shown(rate: float) -> str:
    return f"{rate / MBYTE:.3g} MB/s"
