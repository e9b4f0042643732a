"""The rounds of pair tests: who is to test with whom, and what both ends say. No effects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from trainer_launch.model.findings import Finding
from trainer_launch.preflight import fault_isolation, gpu_judgement
from trainer_launch.preflight.cluster import full_collective, pair_results, transport
from trainer_launch.preflight.cluster import protocol as msg
from trainer_launch.preflight.cluster.heatmap_data import Seen
from trainer_launch.preflight.cluster.pair_results import Tested
from trainer_launch.preflight.cluster.state import Key, Node, Send, Settings
from trainer_launch.preflight.fault_isolation import Pair
from trainer_launch.preflight.measurements import Measure

_REPORT_S = 2.0  # from a test's limit until its ends have reported
_PATIENCE = {
    transport.SOCKET: 1,
    transport.GLOO: 2,
    transport.NCCL: 4,
}  # times a test's time, for who has to set more up
_WHOLE = 8
_NO_REPORT = msg.Seen("no report", 0)


class Bouts:
    """All rounds of one cluster preflight; nodes are numbered in its order."""

    def __init__(self, settings: Settings, nodes: Sequence[Node]) -> None:
        self._settings = settings
        self._nodes = nodes
        self._numbers = {node.key: number for number, node in enumerate(nodes)}
        self._way = transport.choose(settings.pair_test, [node.facts.get(transport.FACT) for node in nodes])
        self._model = _model(nodes) if self._way.pairs == transport.NCCL else ""
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
        self._is_whole = self._wants_whole and self._way.whole is not None and not self._has_failed()
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
                host, port = self._host(first), first.port
                yield Send(
                    peer,
                    msg.Test(
                        self._round,
                        rank,
                        len(members),
                        host,
                        port,
                        token,
                        limit_s,
                        way,
                        self._way.rails,
                        self._is_whole,
                    ),
                )

    def _host(self, node: Node) -> str:
        """By name, as the job will; where none is known, where its connection came from."""
        place = self._settings.names.place(node.key) if isinstance(node.key, int) else None
        return node.address if place is None else place.host

    def take(self, key: Key, result: msg.Result) -> None:
        """What one end says; words of an earlier round are too late."""
        if result.round == self._round and key in self._numbers:
            self._results.setdefault(self._numbers[key], result)

    def is_due(self, now_s: float, lost: Collection[Key]) -> bool:
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
        standard = pair_results.Standard(self._thresholds, self._tests())
        for rail in range(self._way.rails):
            its = [[test for test in tests if (test.rail or 0) == rail] for tests in self._rounds]
            self._trials[rail] = pair_results.judged(self._untried, its, standard)
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
        return list(pair_results.findings(seen.names, seen.guilty, seen.tests, self._thresholds))

    def _has_failed(self) -> bool:
        return any(finding.fault is not None for finding in self._told())

    def findings(self) -> list[Finding]:
        """What was found, when it is over."""
        found = self._told()
        if self._way.trouble:
            found.append(pair_results.not_as_asked(self._way.trouble))
        rates = [one.value for one in self.measured()]
        found += gpu_judgement.of_pairs(rates, self._model, self._settings.table) if rates else []
        if self._wants_whole:
            names = [node.name for node in self._nodes]
            found.append(full_collective.finding(names, self._way.whole, self._way.rails, self._whole))
        return found

    def seen(self) -> Seen:
        """All tests, and what they come to."""
        return Seen(
            tuple(node.name for node in self._nodes), tuple(self._tests()), fault_isolation.verdict(*self._trials)
        )

    def measured(self) -> list[Measure]:
        """The rates of pairs of GPUs."""
        whole = [test for test in self._tests() if test.is_whole]
        return [Measure("pair", test.rate / 1e9, "GB/s", self._model, None) for test in whole if self._model]

    def _with_reference(self) -> pair_results.Thresholds:
        """By comparison, plain sockets and gloo scatter more; of GPUs it is known what they should reach."""
        asked = self._settings.thresholds
        reference = self._settings.table.of(Measure("pair", 0.0, "GB/s", self._model, None))
        return replace(
            asked,
            ratio=pair_results.RATIOS[self._way.pairs] if asked.ratio is None else asked.ratio,
            expected=0.0 if reference is None else gpu_judgement.SHARE_OF_PAIRS * reference.value * 1e9,
        )


def _model(nodes: Sequence[Node]) -> str:
    """Of the GPUs of all nodes, if it is one."""
    models = {one.model for node in nodes for one in node.measures}
    return models.pop() if len(models) == 1 else ""
