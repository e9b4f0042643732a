"""What tests of pairs of nodes come to: which pair failed, and which node, rail or link is faulty. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from trainer_launch.model.findings import Basis, Fault, Finding, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight import fault_isolation, gpu_judgement
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.nodes import Cluster
from trainer_launch.preflight.fault_isolation import Faulty, Link, Pair, Trial
from trainer_launch.preflight.thresholds import MBYTE, Thresholds

NAME = "pairs"
FULL_JOB = "full-job"
_ENOUGH = 4  # pairs that can be compared with each other
_SHOWN = 6
_ACTION_NODE = "put the job on other machines than that one, and see its network card, cable and switch port"
_ACTION_LINK = "see the switches, cables, routes and network policies between the two"
_ACTION_SLOW = "see the network card, cable and switch port for errors and their negotiated speed"


@check(NAME, Where.CLUSTER)
def pairs(cluster: Cluster) -> list[Finding]:
    """Every tested pair of nodes exchanges data unharmed, fast enough and about as fast as the others."""
    return [] if cluster.rounds is None else cluster.rounds.findings()


@check(FULL_JOB, Where.CLUSTER)
def full_job(cluster: Cluster) -> list[Finding]:
    """A collective of all nodes at once comes out right: some faults show at that scale only."""
    return [] if cluster.rounds is None else cluster.rounds.of_all()


class Tested(Struct, frozen=True):
    """One test of a pair on one rail, as both its ends saw it: the lower index first."""

    ends: Pair
    whys: tuple[str, str]  # "": it went well
    rate: int  # bytes per second, the slowest that was seen
    rail: int | None = None  # where there are several

    @property
    def is_whole(self) -> bool:
        """Whether all data came through, at whatever speed."""
        return not any(self.whys)


class PairTests(Struct, frozen=True):
    """All pair tests of a cluster preflight, and what they found faulty; nodes by their place in `names`."""

    names: tuple[str, ...] = ()
    tests: tuple[Tested, ...] = ()
    faulty: Faulty = field(default_factory=Faulty)


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

    def compared(self, bad: Sequence[Tested], middle: float) -> dict[str, Any]:
        """What a finding has of its figures."""
        return {
            "measured": round(max(test.rate for test in bad) / MBYTE, 1) if bad else None,
            "expected": round(max(self.thresholds.floor, self.thresholds.share * middle) / MBYTE, 1),
            "unit": "MB/s",
            "basis": Basis.BOTH if self.is_hard(bad) else Basis.PEER,
        }


def _slowest_allowed(thresholds: Thresholds, rates: Sequence[int]) -> float:
    """Bytes per second below which it is too slow for anything, or by far slower than the others."""
    if len(rates) < _ENOUGH:
        return thresholds.floor
    middle = statistics.median(rates)
    least = middle - gpu_judgement.SIGMAS * gpu_judgement.deviation(rates, middle)
    return max(thresholds.floor, min(thresholds.share * middle, least))


def judged(trial: Trial, rounds: Sequence[Sequence[Tested]], standard: Standard) -> Trial:
    """A trial with the results of all rounds; by what is known now, as early rounds have little to compare with."""
    for tests in rounds:
        trial = fault_isolation.record(trial, {test.ends: not standard.is_bad(test) for test in tests})
    return trial


def findings(
    names: Sequence[str], faulty: Faulty, tests: Sequence[Tested], thresholds: Thresholds
) -> Iterator[Finding]:
    """Nodes, then links, then what could not be decided; or that all have passed."""
    standard = Standard(thresholds, tests)
    by_node = grouped((end, test) for test in tests for end in test.ends)
    for node, rails in (*((node, ()) for node in faulty.nodes), *faulty.rails):
        its = [test for test in by_node.get(node, []) if not rails or test.rail in rails]
        yield _of_node(node, rails, names, its, standard)
    for link in faulty.links:
        its = [test for test in tests if test.ends == link.ends and (not link.rails or test.rail in link.rails)]
        yield _of_link(link, names, its, standard)
    for ends in faulty.unresolved:
        yield _unresolved(ends, names, [test for test in tests if test.ends == ends], standard)
    if tests and not (faulty.nodes or faulty.rails or faulty.links or faulty.unresolved):
        yield _well(tests, faulty.rounds, standard)


def _of_node(
    node: int,
    rails: Sequence[int],  # of which only these are at fault
    names: Sequence[str],
    its: Sequence[Tested],
    standard: Standard,
) -> Finding:
    name = f"{names[node]}{_on(rails)}"
    bad = [test for test in its if standard.is_bad(test)]
    partners = listed(list(dict.fromkeys(names[sum(test.ends) - node] for test in bad)))
    hard = standard.is_hard(bad)
    text = (
        f"{name} fails in {len(bad)} of {len(its)} pair tests, with {partners}, "
        f"which pass with other nodes: the faulty part is this {'GPU or its network card' if rails else 'node'}"
        if hard
        else f"{name} is slow with all its partners ({partners}): {_rates(bad)}, while nodes reach "
        f"{_shown(standard.of_nodes)} in the median"
    )
    scope, action = Scope.RAIL if rails else Scope.NODE, _ACTION_NODE if hard else _ACTION_SLOW
    compared = standard.compared(bad, standard.of_nodes)
    return _blamed(bad, names, standard, text, scope=scope, subject=name, action=action, **compared)


def _of_link(link: Link, names: Sequence[str], its: Sequence[Tested], standard: Standard) -> Finding:
    bad = [test for test in its if standard.is_bad(test)]
    first, second = (names[end] for end in link.ends)
    how, how_slow = "fails", ""
    if not standard.is_hard(bad):
        how, how_slow = "is slow", f": {_rates(bad)}, the median of all pairs is {_shown(standard.of_pairs)}"
    text = (
        f"the link between {first} and {second}{_on(link.rails)} {how} in {link.failed} of {link.tests} tests, "
        f"while both pass with other nodes{how_slow}"
    )
    subject, compared = f"{first} - {second}{_on(link.rails)}", standard.compared(bad, standard.of_pairs)
    return _blamed(bad, names, standard, text, subject=subject, **compared)


def _unresolved(ends: Pair, names: Sequence[str], its: Sequence[Tested], standard: Standard) -> Finding:
    first, second = (names[end] for end in ends)
    how = "fail" if standard.is_hard(its) else "are slow"
    text = (
        f"{first} and {second} {how} with each other; whether it is one of them or the way between them cannot be "
        "told (unresolved)"
    )
    return _blamed(its, names, standard, text, subject=f"{first} - {second}")


def _blamed(
    bad: Sequence[Tested],
    names: Sequence[str],
    standard: Standard,
    text: str,
    *,
    scope: Scope = Scope.LINK,
    action: str = _ACTION_LINK,
    **more: Any,
) -> Finding:
    evidence = tuple(_evidence(test, names) for test in bad[:_SHOWN])
    fault = Fault.NODE if standard.is_hard(bad) else None
    return pairs.bad(fault, text, scope=scope, evidence=evidence, action=action, **more)


def _on(rails: Sequence[int]) -> str:
    return f", rail {', '.join(map(str, rails))}" if rails else ""


def _well(tests: Sequence[Tested], rounds: int, standard: Standard) -> Finding:
    slowest = min(test.rate for test in tests)
    n_rails = len({test.rail for test in tests})
    text = (
        f"{counted(len(tests) // n_rails, 'pair test')} in {counted(rounds, 'round')} passed"
        f"{f' on each of {n_rails} rails' if n_rails > 1 else ''}, from {_shown(slowest)} to "
        f"{_shown(max(test.rate for test in tests))}, median {_shown(standard.of_pairs)}"
    )
    return pairs.passed(text, scope=Scope.JOB, measured=round(slowest / MBYTE, 1), unit="MB/s")


def _evidence(test: Tested, names: Sequence[str]) -> str:
    first, second = (names[end] for end in test.ends)
    where = f"{first} - {second}{'' if test.rail is None else _on([test.rail])}"
    if test.is_whole:
        return f"{where}: {_shown(test.rate)}"
    if all(test.whys):
        return f"{where}: {test.whys[0]}; the other node: {test.whys[1]}"
    well, ill = (second, first) if test.whys[0] else (first, second)
    return f"{where}: one way only: {well} saw nothing wrong, {ill} says: {''.join(test.whys)}"


def _rates(tests: Sequence[Tested]) -> str:
    return ", ".join(_shown(test.rate) for test in tests[:_SHOWN])


def _shown(rate: float) -> str:
    return f"{rate / MBYTE:.3g} MB/s"


def together(names: Sequence[str], way: str | None, rails: int, seen: Sequence[msg.Seen] | None) -> Finding:
    """One sentence; without a result, why there is none."""
    if seen is None:
        why = "pairs of nodes fail already" if way is not None else "not all nodes have torch with gloo or NCCL"
        return full_job.skipped(f"all nodes were not tested together, since {why}", scope=Scope.JOB)
    failed = grouped((rail.why, name) for name, rail in zip(names, seen, strict=True) if rail.why)
    who = f"{len(names)} nodes together ({way}{f', {rails} GPUs each' if rails > 1 else ''})"
    if not failed:
        rate = statistics.median(rail.rate for rail in seen) / 1e9
        text = f"all {who} reduce correctly, at {rate:.3g} GB/s"
        return full_job.passed(text, scope=Scope.JOB, measured=round(rate, 3), unit="GB/s")
    n_failed = sum(map(len, failed.values()))
    ordered = sorted(failed.items(), key=lambda group: (len(group[1]), group[0]))  # who differs tells most
    return full_job.failed(
        Fault.NODE,
        f"all pairs pass, but all {who} fail, as {n_failed} of them report: the fault shows at full scale only",
        scope=Scope.JOB,
        measured=n_failed,
        expected=0,
        unit="nodes",
        evidence=tuple(f"{listed(its)}: {why}" for why, its in ordered[:_SHOWN]),
        action="see limits of open files and connections, tables of switches and network cards, and NCCL's "
        "topology and tuning files; try with half of the nodes",
    )
