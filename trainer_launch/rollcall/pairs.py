"""What the tests of pairs of nodes come to: which pair counts as failed, and who is said to be at fault. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer_launch.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.localise import Guilty, Link, Pair
from trainer_launch.rollcall.compare import listed

NAME = "pairs"
MBYTE = 1_000_000
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
    ratio: float = 0.3  # of the median of all pairs: below it a pair is told, and does not stop the job


@dataclass(frozen=True, slots=True)
class Tested:
    """One test of a pair, as both its ends saw it: the lower index first."""

    ends: Pair
    whys: tuple[str, str]  # "": it went well
    rate: int  # bytes per second, the slowest that was seen

    @property
    def is_whole(self) -> bool:
        """Whether all data came through, at whatever speed."""
        return not any(self.whys)


def slowest_allowed(thresholds: Thresholds, tests: Sequence[Tested]) -> float:
    """Bytes per second below which a pair is too slow for anything, or by far slower than the others."""
    rates = [test.rate for test in tests if test.is_whole]
    if len(rates) < _ENOUGH:
        return thresholds.floor
    middle = statistics.median(rates)
    spread = _MAD_TO_SIGMA * statistics.median(abs(rate - middle) for rate in rates)
    return max(thresholds.floor, min(thresholds.ratio * middle, middle - _SIGMAS * spread))


def is_bad(test: Tested, allowed: float) -> bool:
    """Whether the pair failed, or is too slow."""
    return not test.is_whole or test.rate < allowed


def findings(
    names: Sequence[str], guilty: Guilty, tests: Sequence[Tested], thresholds: Thresholds
) -> Iterator[Finding]:
    """Nodes, then links, then what could not be decided; or that all is well."""
    by_node: dict[int, list[Tested]] = {}
    for test in tests:
        for end in test.ends:
            by_node.setdefault(end, []).append(test)
    for node in guilty.nodes:
        yield _of_node(node, names, by_node.get(node, []), tests, thresholds)
    for link in guilty.links:
        yield _of_link(link, names, [test for test in tests if test.ends == link.ends], tests, thresholds)
    for ends in guilty.unresolved:
        yield _unresolved(ends, names, [test for test in tests if test.ends == ends], thresholds)
    if tests and not (guilty.nodes or guilty.links or guilty.unresolved):
        yield _well(tests, guilty.rounds)


def _of_node(
    node: int, names: Sequence[str], its: Sequence[Tested], tests: Sequence[Tested], thresholds: Thresholds
) -> Finding:
    bad = [test for test in its if is_bad(test, slowest_allowed(thresholds, tests))]
    partners = listed([names[_other(test, node)] for test in bad])
    hard = _is_hard(bad, thresholds)
    text = (
        f"{names[node]} fails in {len(bad)} of {len(its)} pair tests, with {partners}, "
        "who pass with others: the fault is at this node"
        if hard
        else f"{names[node]} is slow with all its partners ({partners}): {_rates(bad)}, the median of all pairs is "
        f"{_shown(_median(tests))}"
    )
    return Finding(
        check=NAME,
        status=Status.FAIL if hard else Status.WARN,
        fault=Fault.NODE if hard else None,
        subject=names[node],
        text=text,
        measured=_best(bad),
        expected=_shown_expected(tests, thresholds),
        unit="MB/s",
        basis=Basis.BOTH if hard else Basis.PEER,
        evidence=tuple(_evidence(test, names) for test in bad[:_SHOWN]),
        action=_ACTION_NODE if hard else _ACTION_SLOW,
    )


def _of_link(
    link: Link, names: Sequence[str], its: Sequence[Tested], tests: Sequence[Tested], thresholds: Thresholds
) -> Finding:
    bad = [test for test in its if is_bad(test, slowest_allowed(thresholds, tests))]
    hard = _is_hard(bad, thresholds)
    one, other = (names[end] for end in link.ends)
    how = "fails" if hard else "is slow"
    return Finding(
        check=NAME,
        status=Status.FAIL if hard else Status.WARN,
        fault=Fault.NODE if hard else None,
        scope=Scope.LINK,
        subject=f"{one} - {other}",
        text=f"the way between {one} and {other} {how} in {link.failed} of {link.tests} tests, while both are well "
        f"with others{'' if hard else f': {_rates(bad)}, the median of all pairs is {_shown(_median(tests))}'}",
        measured=_best(bad),
        expected=_shown_expected(tests, thresholds),
        unit="MB/s",
        basis=Basis.BOTH if hard else Basis.PEER,
        evidence=tuple(_evidence(test, names) for test in bad[:_SHOWN]),
        action=_ACTION_LINK,
    )


def _unresolved(ends: Pair, names: Sequence[str], its: Sequence[Tested], thresholds: Thresholds) -> Finding:
    hard = _is_hard(its, thresholds)
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


def _well(tests: Sequence[Tested], rounds: int) -> Finding:
    slowest = min(test.rate for test in tests)
    return Finding(
        check=NAME,
        status=Status.PASS,
        scope=Scope.JOB,
        text=f"{len(tests)} pair tests in {rounds} rounds passed, from {_shown(slowest)} to "
        f"{_shown(max(test.rate for test in tests))}, median {_shown(_median(tests))}",
        measured=round(slowest / MBYTE, 1),
        unit="MB/s",
    )


def _is_hard(tests: Iterable[Tested], thresholds: Thresholds) -> bool:
    """Whether it is more than slowness by comparison, which only warns."""
    return any(not test.is_whole or test.rate < thresholds.floor for test in tests)


def _evidence(test: Tested, names: Sequence[str]) -> str:
    one, other = (names[end] for end in test.ends)
    if test.is_whole:
        return f"{one} - {other}: {_shown(test.rate)}"
    if all(test.whys):
        return f"{one} - {other}: {test.whys[0]}; the other end: {test.whys[1]}"
    well, ill = (other, one) if test.whys[0] else (one, other)
    return f"{one} - {other}: one way only: {well} saw nothing wrong, {ill} says: {''.join(test.whys)}"


def _other(test: Tested, node: int) -> int:
    return test.ends[1] if test.ends[0] == node else test.ends[0]


def _median(tests: Sequence[Tested]) -> float:
    return statistics.median([test.rate for test in tests if test.is_whole] or [0])


def _best(tests: Sequence[Tested]) -> float | None:
    return round(max(test.rate for test in tests) / MBYTE, 1) if tests else None


def _shown_expected(tests: Sequence[Tested], thresholds: Thresholds) -> float:
    return round(max(thresholds.floor, thresholds.ratio * _median(tests)) / MBYTE, 1)


def _rates(tests: Sequence[Tested]) -> str:
    return ", ".join(_shown(test.rate) for test in tests[:_SHOWN])


def _shown(rate: float) -> str:
    return f"{rate / MBYTE:.3g} MB/s"
