"""The rounds of pair tests: which pairs at a time, and how their results are gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from trainer_launch.model.findings import Measure
from trainer_launch.preflight import fault_isolation, gpu_judgement
from trainer_launch.preflight.cluster import pairs
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.nodes import ClusterSettings, JobNode, PairTest, PairTests
from trainer_launch.preflight.cluster.pairs import GLOO, NCCL, SOCKET
from trainer_launch.preflight.fault_isolation import Pair, Trial
from trainer_launch.preflight.thresholds import SHARE_OF_PLAIN_SOCKETS

# Without accelerators, other work on a machine is seen, too.
_RATIOS = {SOCKET: SHARE_OF_PLAIN_SOCKETS, GLOO: SHARE_OF_PLAIN_SOCKETS, NCCL: 0.75}
_TEST_S = 5.0
_PATIENCE = {SOCKET: 1, GLOO: 2, NCCL: 4}  # times a test's time, for who has to set more up
_WHOLE_PATIENCE = 8
_REPORT_S = 2.0  # from a test's limit until its ends have reported
_NO_REPORT = msg.RailResult("no report", 0)


class Rounds:
    """All rounds of one cluster preflight; nodes have numbers. `tests` has what they came to so far."""

    def __init__(
        self, settings: ClusterSettings, nodes: Sequence[JobNode], send: Callable[[int, msg.FromServer], None]
    ) -> None:
        self._settings, self._nodes, self._send = settings, nodes, send
        self._numbers = {node.rank: number for number, node in enumerate(nodes)}
        way = pairs.choose_means(settings.pair_test, [node.report.facts.get(pairs.FACT) for node in nodes])
        models = {measure.model for node in nodes for measure in node.report.measures}
        model = models.pop() if len(models) == 1 and way.pairs == NCCL else ""
        # By comparison, plain sockets and gloo scatter more; of GPUs it is known what they should reach.
        asked, reference = settings.thresholds, settings.table.of(Measure("pair", 0.0, "GB/s", model, None))
        thresholds = replace(
            asked,
            ratio=_RATIOS[way.pairs] if asked.ratio is None else asked.ratio,
            expected=0.0 if reference is None else gpu_judgement.SHARE_OF_PAIRS * reference.value * 1e9,
        )
        names = tuple(node.name for node in nodes)
        self.tests = PairTests(names=names, way=way, model=model, thresholds=thresholds)
        self._trials = [Trial(n_nodes=len(nodes), is_deep=settings.is_deep)] * way.rails
        self._chosen: tuple[Pair, ...] = ()
        self._busy: set[int] = set()  # numbers of the nodes that have a part in this round
        self._results: dict[int, msg.Result] = {}
        self._round = 0
        self._is_whole = False  # all nodes are tested together
        self._until_s = 0.0
        self.is_over = False

    def begin(self, now_s: float) -> None:
        """Order the next round, if one is of use; after the last, a deep preflight tests all nodes together."""
        way, settings = self.tests.way, self._settings
        self._chosen = fault_isolation.next_round(*self._trials)
        self._results, self._round = {}, self._trials[0].rounds
        if self._chosen:
            self._order(list(map(self._around, self._chosen)), way.pairs, now_s, _TEST_S * _PATIENCE[way.pairs])
        elif (
            settings.is_deep
            and pairs.FULL_JOB not in settings.left_out
            and way.whole is not None
            and self._are_well()
        ):
            self._is_whole = True
            self._order([range(len(self._nodes))], way.whole, now_s, _TEST_S * _WHOLE_PATIENCE)
        else:
            self.is_over = True

    def _are_well(self) -> bool:
        return not any(finding.fault for finding in pairs.of_pairs(self.tests))

    def _around(self, ends: Pair) -> Sequence[int]:
        """Who listens first: on a ring each node does once, for the next one, and connects once."""
        n_nodes = len(self._nodes)
        return ends[::-1] if ends == (0, n_nodes - 1) and n_nodes > 2 else ends

    def _order(self, groups: Sequence[Sequence[int]], way: str, now_s: float, limit_s: float) -> None:
        """A test for each group of nodes at the same time: its first node listens, and is found under its name."""
        self._until_s = now_s + limit_s + _REPORT_S
        self._busy = {number for members in groups for number in members}
        for members in groups:
            first, last = self._nodes[members[0]], members[-1]
            place = self._settings.names.place(first.rank)
            host = first.address if place is None else place.host  # by name, as the job will
            token = f"{self._settings.salt}-{self._round}-{members[0]}-{last}"
            for rank, number in enumerate(members):
                peer = self._nodes[number].peer
                if peer is not None:
                    about = (self._round, rank, len(members), host, first.port, token, limit_s, way)
                    self._send(peer, msg.Test(*about, self.tests.way.rails, self._is_whole, first.address))

    def take(self, rank: int, result: msg.Result) -> None:
        """What one end says; words of an earlier round are too late."""
        if result.round == self._round and rank in self._numbers:
            self._results.setdefault(self._numbers[rank], result)

    def is_due(self, now_s: float, lost: Collection[int]) -> bool:
        """Whether the round has ended; `lost` are ranks."""
        if now_s >= self._until_s or len(self._results) + len(lost) < len(self._busy):
            return now_s >= self._until_s
        gone = {self._numbers[rank] for rank in lost if rank in self._numbers}
        return self._busy <= self._results.keys() | gone

    def next(self, now_s: float) -> None:
        """Judge the round, and begin the next one."""
        if self._is_whole:
            together = tuple(max(self._result_of(number)) for number in range(len(self._nodes)))  # a reason, if any
            self.tests = replace(self.tests, together=together)
            self.is_over = True
            return
        tests = (*self.tests.tests, *(test for ends in self._chosen for test in self._tested(ends)))
        # Early rounds have little to compare with: all are judged anew by what is known now.
        standard = pairs.Standard(self.tests.thresholds, tests)
        results: list[dict[Pair, list[int]]] = [{} for _ in self._trials]
        for test in tests:
            results[test.rail or 0].setdefault(test.ends, [0, 0])[standard.is_bad(test)] += 1
        self._trials = [
            replace(trial, rounds=self._round + 1, results=its)
            for trial, its in zip(self._trials, results, strict=True)
        ]
        self.tests = replace(self.tests, tests=tests, faulty=fault_isolation.verdict(*self._trials))
        self.begin(now_s)

    def _tested(self, ends: Pair) -> Iterator[PairTest]:
        for rail, (here, there) in enumerate(zip(*map(self._result_of, ends), strict=True)):
            rates = [end.rate for end in (here, there) if not end.why]
            number = rail if self.tests.way.rails > 1 else None
            yield PairTest(ends, (here.why, there.why), min(rates, default=0), number)

    def _result_of(self, number: int) -> tuple[msg.RailResult, ...]:
        result, n_rails = self._results.get(number), self.tests.way.rails
        return (*(() if result is None else result.rails), *[_NO_REPORT] * n_rails)[:n_rails]
