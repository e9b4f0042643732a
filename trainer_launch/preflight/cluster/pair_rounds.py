"""The rounds of pair tests: by which means, which pairs at a time, and how their results are gathered."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.findings import Finding, Measure, Scope
from trainer_launch.preflight import fault_isolation, gpu_judgement
from trainer_launch.preflight.cluster import pair_results
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.nodes import ClusterSettings, Node
from trainer_launch.preflight.cluster.pair_results import PairTests, Standard, Tested
from trainer_launch.preflight.fault_isolation import Pair
from trainer_launch.preflight.thresholds import SHARE_OF_PLAIN_SOCKETS, Thresholds

FACT = "pair tests"  # a node's own words, among its facts
SOCKET, GLOO, NCCL = "socket", "gloo", "nccl"
# Without accelerators, other work on a machine is seen, too.
_RATIOS = {SOCKET: SHARE_OF_PLAIN_SOCKETS, GLOO: SHARE_OF_PLAIN_SOCKETS, NCCL: 0.75}
_TEST_S = 5.0
_PATIENCE = {SOCKET: 1, GLOO: 2, NCCL: 4}  # times a test's time, for who has to set more up
_WHOLE_PATIENCE = 8
_REPORT_S = 2.0  # from a test's limit until its ends have reported
_NO_REPORT = msg.Seen("no report", 0)
_NCCL_FACT = re.compile(r"nccl on (\d{1,4}) GPUs")
_ACTION = "see what the nodes' own facts say of their pair tests (check facts), or leave --pair-test away"


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
    """The fastest means that all nodes have by their facts, unless one is `wanted`; else that is auto."""
    matches = [_NCCL_FACT.fullmatch(fact or "") for fact in facts]
    gpus = [0 if match is None else int(match[1]) for match in matches]
    has_gloo = all(fact == GLOO or match is not None for fact, match in zip(facts, matches, strict=True))
    rails = min(*gpus, msg.MAX_RAILS) if gpus else 0
    if rails and wanted in ("auto", NCCL):
        return Way(NCCL, rails, NCCL)
    whole = GLOO if has_gloo else None
    if wanted == GLOO and has_gloo:
        return Way(GLOO, 1, whole)
    trouble = "" if wanted in ("auto", SOCKET) else f"{wanted} was asked for, and not all nodes have it"
    return Way(SOCKET, 1, whole, trouble)


class Rounds:
    """All rounds of one cluster preflight; nodes are numbered in its order."""

    def __init__(
        self, settings: ClusterSettings, nodes: Sequence[Node], send: Callable[[int, msg.FromServer], None]
    ) -> None:
        self._settings, self._nodes, self._send = settings, nodes, send
        self._numbers = {node.rank: number for number, node in enumerate(nodes)}
        self._way = choose_means(settings.pair_test, [node.record.facts.get(FACT) for node in nodes])
        models = {measure.model for node in nodes for measure in node.record.measures}
        self._model = models.pop() if len(models) == 1 and self._way.pairs == NCCL else ""
        self._thresholds = self._with_reference()
        self._chosen: tuple[Pair, ...] = ()
        self._busy: set[int] = set()  # numbers of the nodes that have a part in this round
        self._results: dict[int, msg.Result] = {}
        self._round = 0
        self._is_whole = False  # all nodes are tested together
        self._together: list[msg.Seen] | None = None  # what that came to
        self._wants_whole = settings.is_deep and settings.with_full
        self._untried = fault_isolation.Trial(n_nodes=len(nodes), is_deep=settings.is_deep)
        self._trials = [self._untried] * self._way.rails
        self._rounds: list[list[Tested]] = []
        self._until_s = 0.0
        self.is_over = False

    def begin(self, now_s: float) -> None:
        """Order the next round, if one is of use; after the last, a deep preflight tests all nodes together."""
        way = self._way
        self._chosen = fault_isolation.next_round(*self._trials)
        self._results, self._round = {}, self._trials[0].rounds
        if self._chosen:
            self._order(list(map(self._around, self._chosen)), way.pairs, now_s, _TEST_S * _PATIENCE[way.pairs])
        elif self._wants_whole and way.whole is not None and not any(found.fault for found in self._of_pairs()):
            self._is_whole = True
            self._order([range(len(self._nodes))], way.whole, now_s, _TEST_S * _WHOLE_PATIENCE)
        else:
            self.is_over = True

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
                    self._send(peer, msg.Test(*about, self._way.rails, self._is_whole, first.address))

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
            self._together = [max(self._seen(number)) for number in range(len(self._nodes))]  # a reason, if any
            self.is_over = True
            return
        self._rounds.append([test for ends in self._chosen for test in self._tested(ends)])
        standard = Standard(self._thresholds, self._tests())
        for rail in range(self._way.rails):
            its = [[test for test in tests if (test.rail or 0) == rail] for tests in self._rounds]
            self._trials[rail] = pair_results.judged(self._untried, its, standard)
        self.begin(now_s)

    def _tests(self) -> list[Tested]:
        return [test for tests in self._rounds for test in tests]

    def _tested(self, ends: Pair) -> Iterator[Tested]:
        for rail, (here, there) in enumerate(zip(*map(self._seen, ends), strict=True)):
            rates = [seen.rate for seen in (here, there) if not seen.why]
            number = rail if self._way.rails > 1 else None
            yield Tested(ends, (here.why, there.why), min(rates, default=0), number)

    def _seen(self, number: int) -> tuple[msg.Seen, ...]:
        result, n_rails = self._results.get(number), self._way.rails
        return (*(() if result is None else result.seen), *[_NO_REPORT] * n_rails)[:n_rails]

    # -- what it came to ----------------------------------------------------------------------

    def seen(self) -> PairTests:
        """All tests, and what they come to."""
        names = tuple(node.name for node in self._nodes)
        return PairTests(names, tuple(self._tests()), fault_isolation.verdict(*self._trials))

    def _of_pairs(self) -> list[Finding]:
        seen = self.seen()
        return list(pair_results.findings(seen.names, seen.faulty, seen.tests, self._thresholds))

    def findings(self) -> list[Finding]:
        """What was found of pairs, when it is over."""
        found = self._of_pairs()
        if self._way.trouble:
            text = f"pairs were tested over plain sockets: {self._way.trouble}"
            found.append(pair_results.pairs.warned(text, scope=Scope.JOB, action=_ACTION))
        rates = [measure.value for measure in self.measured()]
        return found + (gpu_judgement.of_pairs(rates, self._model, self._settings.table) if rates else [])

    def of_all(self) -> list[Finding]:
        """What all nodes together came to, where that was asked for."""
        names = [node.name for node in self._nodes]
        whole = pair_results.together(names, self._way.whole, self._way.rails, self._together)
        return [whole] if self._wants_whole else []

    def measured(self) -> list[Measure]:
        """The rates of pairs of GPUs."""
        good = [test for test in self._tests() if test.is_whole and self._model]
        return [Measure("pair", test.rate / 1e9, "GB/s", self._model, None) for test in good]

    def _with_reference(self) -> Thresholds:
        """By comparison, plain sockets and gloo scatter more; of GPUs it is known what they should reach."""
        asked = self._settings.thresholds
        reference = self._settings.table.of(Measure("pair", 0.0, "GB/s", self._model, None))
        return replace(
            asked,
            ratio=_RATIOS[self._way.pairs] if asked.ratio is None else asked.ratio,
            expected=0.0 if reference is None else gpu_judgement.SHARE_OF_PAIRS * reference.value * 1e9,
        )
