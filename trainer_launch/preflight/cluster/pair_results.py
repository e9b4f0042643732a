"""The rounds of pair tests, and what they come to: which pair failed, and which node or link is faulty. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model.findings import Basis, Fault, Finding, Measure, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight import fault_isolation, gpu_judgement
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.nodes import Cluster, Node, Send, Settings
from trainer_launch.preflight.fault_isolation import Faulty, Link, Pair, Trial
from trainer_launch.preflight.thresholds import MBYTE, SHARE_OF_PLAIN_SOCKETS, Thresholds

NAME = "pairs"
FULL_JOB = "full-job"
FACT = "pair tests"  # a node's own words, among its facts
SOCKET, GLOO, NCCL = "socket", "gloo", "nccl"
# Without accelerators, other work on a machine is seen, too.
RATIOS = {SOCKET: SHARE_OF_PLAIN_SOCKETS, GLOO: SHARE_OF_PLAIN_SOCKETS, NCCL: 0.75}
_ENOUGH = 4  # pairs that can be compared with each other
_SHOWN = 6
_ACTION_NODE = "put the job on other machines than that one, and see its network card, cable and switch port"
_ACTION_SOCKETS = "see what the nodes' own facts say of their pair tests (check facts), or leave --pair-test away"
_ACTION_LINK = "see the switches, cables, routes and network policies between the two"
_ACTION_SLOW = "see the network card, cable and switch port for errors and their negotiated speed"


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
    for node in faulty.nodes:
        yield _of_node(node, (), names, by_node.get(node, []), standard)
    for node, rails in faulty.rails:
        its = [test for test in by_node.get(node, []) if test.rail in rails]
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
    one, other = (names[end] for end in link.ends)
    how, how_slow = "fails", ""
    if not standard.is_hard(bad):
        how, how_slow = "is slow", f": {_rates(bad)}, the median of all pairs is {_shown(standard.of_pairs)}"
    text = (
        f"the link between {one} and {other}{_on(link.rails)} {how} in {link.failed} of {link.tests} tests, "
        f"while both pass with other nodes{how_slow}"
    )
    subject, compared = f"{one} - {other}{_on(link.rails)}", standard.compared(bad, standard.of_pairs)
    return _blamed(bad, names, standard, text, subject=subject, **compared)


def _unresolved(ends: Pair, names: Sequence[str], its: Sequence[Tested], standard: Standard) -> Finding:
    one, other = (names[end] for end in ends)
    how = "fail" if standard.is_hard(its) else "are slow"
    text = (
        f"{one} and {other} {how} with each other; whether it is one of them or the way between them cannot be "
        "told (unresolved)"
    )
    return _blamed(its, names, standard, text, subject=f"{one} - {other}")


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
    one, other = (names[end] for end in test.ends)
    where = f"{one} - {other}{'' if test.rail is None else _on([test.rail])}"
    if test.is_whole:
        return f"{where}: {_shown(test.rate)}"
    if all(test.whys):
        return f"{where}: {test.whys[0]}; the other node: {test.whys[1]}"
    well, ill = (other, one) if test.whys[0] else (one, other)
    return f"{where}: one way only: {well} saw nothing wrong, {ill} says: {''.join(test.whys)}"


def _rates(tests: Sequence[Tested]) -> str:
    return ", ".join(_shown(test.rate) for test in tests[:_SHOWN])


def _shown(rate: float) -> str:
    return f"{rate / MBYTE:.3g} MB/s"


# -- what a collective of all nodes at once came to --------------------------------------------


_GBYTE = 1e9


def together(names: Sequence[str], way: str | None, rails: int, seen: Sequence[msg.Seen] | None) -> Finding:
    """One sentence; without a result, why there is none."""
    if seen is None:
        why = "pairs of nodes fail already" if way is not None else "not all nodes have torch with gloo or NCCL"
        return full_job.skipped(f"all nodes were not tested together, since {why}", scope=Scope.JOB)
    failed = grouped((one.why, name) for name, one in zip(names, seen, strict=True) if one.why)
    who = f"{len(names)} nodes together ({way}{f', {rails} GPUs each' if rails > 1 else ''})"
    if not failed:
        rate = statistics.median(one.rate for one in seen) / _GBYTE
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


# -- by what means pairs are tested: the fastest that all nodes have, unless one was asked for ---


_NCCL_FACT = re.compile(r"nccl on (\d{1,4}) GPUs")


class Way(Struct, frozen=True):
    """How pairs are tested, and how all nodes together."""

    pairs: str = SOCKET
    rails: int = 1
    whole: str | None = None  # None: nothing can test them together
    trouble: str = ""  # why it is not what was asked for


def means_told(gloo: bool, gpus: int, why: str) -> str:
    """What a node can do, as its fact."""
    if gpus:
        return f"nccl on {gpus} GPUs"
    return "gloo" if gloo else f"only plain sockets: {why}"


def choose_means(wanted: str, facts: Sequence[str | None]) -> Way:
    """From what all nodes said of themselves; `wanted` is a way, or auto."""
    gpus = [_gpus(one) for one in facts]
    has_gloo = all(one is not None and (one == GLOO or _NCCL_FACT.fullmatch(one)) for one in facts)
    rails = min(*gpus, msg.MAX_RAILS) if gpus else 0
    if rails and wanted in ("auto", NCCL):
        return Way(NCCL, rails, NCCL)
    whole = GLOO if has_gloo else None
    if wanted == GLOO and has_gloo:
        return Way(GLOO, 1, whole)
    trouble = "" if wanted in ("auto", SOCKET) else f"{wanted} was asked for, and not all nodes have it"
    return Way(SOCKET, 1, whole, trouble)


def _gpus(fact: str | None) -> int:
    found = _NCCL_FACT.fullmatch(fact or "")
    return int(found[1]) if found is not None else 0


# -- the rounds of pair tests ------------------------------------------------------------------


_REPORT_S = 2.0  # from a test's limit until its ends have reported
_PATIENCE = {SOCKET: 1, GLOO: 2, NCCL: 4}  # times a test's time, for who has to set more up
_WHOLE = 8
_NO_REPORT = msg.Seen("no report", 0)


@check(NAME, Where.CLUSTER)
def pairs(cluster: Cluster) -> list[Finding]:
    """Every tested pair of nodes exchanges data unharmed, fast enough and about as fast as the others."""
    return [] if cluster.rounds is None else cluster.rounds.findings()


@check(FULL_JOB, Where.CLUSTER)
def full_job(cluster: Cluster) -> list[Finding]:
    """A collective of all nodes at once comes out right: some faults show at that scale only."""
    return [] if cluster.rounds is None else cluster.rounds.of_all()


class Rounds:
    """All rounds of one cluster preflight; nodes are numbered in its order."""

    def __init__(self, settings: Settings, nodes: Sequence[Node]) -> None:
        self._settings = settings
        self._nodes = nodes
        self._numbers = {node.rank: number for number, node in enumerate(nodes)}
        self._way = choose_means(settings.pair_test, [node.facts.get(FACT) for node in nodes])
        self._model = _model(nodes) if self._way.pairs == NCCL else ""
        self._thresholds = self._with_reference()
        self._chosen: tuple[Pair, ...] = ()
        self._whole: list[msg.Seen] | None = None  # of all nodes together
        self._is_whole = False  # that is going on
        self._wants_whole = settings.is_deep and settings.with_full
        self._results: dict[int, msg.Result] = {}
        self._round = 0
        self._untried = fault_isolation.Trial(n_nodes=len(nodes), is_deep=settings.is_deep)
        self._trials = [self._untried] * self._way.rails
        self._rounds: list[list[Tested]] = []
        self.until_s = 0.0
        self.is_over = False

    def begin(self, now_s: float) -> Iterator[Send]:
        """The next round, if one is of use."""
        self._chosen = fault_isolation.next_round(*self._trials)
        self._results = {}
        self._round = self._trials[0].rounds
        limit_s = self._settings.test_s * _PATIENCE[self._way.pairs]
        self.until_s = now_s + limit_s + _REPORT_S
        for ends in self._chosen:
            yield from self._order(self._around(ends), self._way.pairs, limit_s)
        if self._chosen:
            return
        self._is_whole = (
            self._wants_whole and self._way.whole is not None and not any(one.fault for one in self._told())
        )
        self.is_over = not self._is_whole
        if self._is_whole:
            self.until_s = now_s + self._settings.test_s * _WHOLE + _REPORT_S
            everybody = tuple(range(len(self._nodes)))
            yield from self._order(everybody, self._way.whole or "", self._settings.test_s * _WHOLE)

    def _around(self, ends: Pair) -> Sequence[int]:
        """Who listens first: on a ring each node does once, for the next one, and connects once."""
        n_nodes = len(self._nodes)
        return ends[::-1] if ends == (0, n_nodes - 1) and n_nodes > 2 else ends

    def _order(self, members: Sequence[int], way: str, limit_s: float) -> Iterator[Send]:
        """The members' parts in one test: the first one listens, and is found under its name."""
        first, last = self._nodes[members[0]], members[-1]
        token = f"{self._settings.salt}-{self._round}-{members[0]}-{last}"
        for rank, number in enumerate(members):
            peer = self._nodes[number].peer
            if peer is not None:
                about = (self._round, rank, len(members), self._host(first), first.port, token)
                yield Send(peer, msg.Test(*about, limit_s, way, self._way.rails, self._is_whole, first.address))

    def _host(self, node: Node) -> str:
        """By name, as the job will; where none is known, where its connection came from."""
        place = self._settings.names.place(node.rank)
        return node.address if place is None else place.host

    def take(self, rank: int, result: msg.Result) -> None:
        """What one end says; words of an earlier round are too late."""
        if result.round == self._round and rank in self._numbers:
            self._results.setdefault(self._numbers[rank], result)

    def is_due(self, now_s: float, lost: Collection[int]) -> bool:
        """Whether the round has ended."""
        n_busy = len(self._nodes) if self._is_whole else 2 * len(self._chosen)
        if now_s < self.until_s and len(self._results) + len(lost) < n_busy:
            return False
        gone = {self._numbers[key] for key in lost if key in self._numbers}
        busy = set(range(n_busy)) if self._is_whole else {end for ends in self._chosen for end in ends}
        return now_s >= self.until_s or busy <= self._results.keys() | gone

    def next(self, now_s: float) -> Iterator[Send]:
        """Judge the round, and begin the next one."""
        if self._is_whole:
            seen = [self._seen(number) for number in range(len(self._nodes))]
            self._whole = [max(its) for its in seen]  # a reason, where there is one on any rail
            self.is_over = True
            return
        self._rounds.append([test for ends in self._chosen for test in self._tested(ends)])
        standard = Standard(self._thresholds, self._tests())
        for rail in range(self._way.rails):
            its = [[test for test in tests if (test.rail or 0) == rail] for tests in self._rounds]
            self._trials[rail] = judged(self._untried, its, standard)
        yield from self.begin(now_s)

    def _tests(self) -> list[Tested]:
        return [test for tests in self._rounds for test in tests]

    def _tested(self, ends: Pair) -> Iterator[Tested]:
        one, other = (self._seen(end) for end in ends)
        for rail, (here, there) in enumerate(zip(one, other, strict=True)):
            rates = [seen.rate for seen in (here, there) if not seen.why]
            number = rail if self._way.rails > 1 else None
            yield Tested(ends, (here.why, there.why), min(rates, default=0), number)

    def _seen(self, number: int) -> tuple[msg.Seen, ...]:
        n_rails = self._way.rails
        result = self._results.get(number)
        seen = () if result is None else result.seen
        return (*seen, *[_NO_REPORT] * n_rails)[:n_rails]

    # -- what it came to ----------------------------------------------------------------------

    def _told(self) -> list[Finding]:
        seen = self.seen()
        return list(findings(seen.names, seen.faulty, seen.tests, self._thresholds))

    def findings(self) -> list[Finding]:
        """What was found, when it is over."""
        found = self._told()
        if self._way.trouble:
            text = f"pairs were tested over plain sockets: {self._way.trouble}"
            found.append(pairs.warned(text, scope=Scope.JOB, action=_ACTION_SOCKETS))
        rates = [one.value for one in self.measured()]
        found += gpu_judgement.of_pairs(rates, self._model, self._settings.table) if rates else []
        return found

    def of_all(self) -> list[Finding]:
        """What all nodes together came to, where that was asked for."""
        if not self._wants_whole:
            return []
        names = [node.name for node in self._nodes]
        return [together(names, self._way.whole, self._way.rails, self._whole)]

    def seen(self) -> PairTests:
        """All tests, and what they come to."""
        return PairTests(
            tuple(node.name for node in self._nodes), tuple(self._tests()), fault_isolation.verdict(*self._trials)
        )

    def measured(self) -> list[Measure]:
        """The rates of pairs of GPUs."""
        whole = [test for test in self._tests() if test.is_whole and self._model]
        return [Measure("pair", test.rate / 1e9, "GB/s", self._model, None) for test in whole]

    def _with_reference(self) -> Thresholds:
        """By comparison, plain sockets and gloo scatter more; of GPUs it is known what they should reach."""
        asked = self._settings.thresholds
        reference = self._settings.table.of(Measure("pair", 0.0, "GB/s", self._model, None))
        return replace(
            asked,
            ratio=RATIOS[self._way.pairs] if asked.ratio is None else asked.ratio,
            expected=0.0 if reference is None else gpu_judgement.SHARE_OF_PAIRS * reference.value * 1e9,
        )


def _model(nodes: Sequence[Node]) -> str:
    """Of the GPUs of all nodes, if it is one."""
    models = {one.model for node in nodes for one in node.measures}
    return models.pop() if len(models) == 1 else ""
