"""The rounds of pair tests: who is to test with whom, and what both ends say. No effects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from trainer_launch import localise
from trainer_launch.localise import Pair
from trainer_launch.rollcall import protocol as msg
from trainer_launch.rollcall.pairs import Tested, is_bad, slowest_allowed
from trainer_launch.rollcall.picture import Seen
from trainer_launch.rollcall.state import Key, Node, Send, Settings

_REPORT_S = 2.0  # from a test's limit until its ends have reported


class Bouts:
    """All rounds of one roll call; nodes are numbered in its order."""

    def __init__(self, settings: Settings, nodes: Sequence[Node]) -> None:
        self._settings = settings
        self._nodes = nodes
        self._numbers = {node.key: number for number, node in enumerate(nodes)}
        self._chosen: tuple[Pair, ...] = ()
        self._results: dict[int, msg.Result] = {}
        self.trial = localise.Trial(n_nodes=len(nodes))
        self.tests: list[Tested] = []
        self.until_s = 0.0
        self.is_over = False

    def begin(self, now_s: float) -> Iterator[Send]:
        """The next round, if one is of use."""
        self._chosen = localise.next_round(self.trial)
        self._results = {}
        self.is_over = not self._chosen
        self.until_s = now_s + self._settings.test_s + _REPORT_S
        for one, other in self._chosen:
            token = f"{self._settings.salt}-{self.trial.rounds}-{one}-{other}"
            yield from self._order(one, other, token, dials=True)
            yield from self._order(other, one, token, dials=False)

    def _order(self, whom: int, other: int, token: str, *, dials: bool) -> Iterator[Send]:
        peer, partner = self._nodes[whom].peer, self._nodes[other]
        if peer is not None:
            host = self._host(partner)
            limit_s = self._settings.test_s
            yield Send(peer, msg.Test(self.trial.rounds, dials, host, partner.port, token, limit_s))

    def _host(self, node: Node) -> str:
        """By name, as the job will; where none is known, where its connection came from."""
        place = self._settings.names.place(node.key) if isinstance(node.key, int) else None
        return node.address if place is None else place.host

    def take(self, key: Key, result: msg.Result) -> None:
        """What one end says; words of an earlier round are too late."""
        if result.round == self.trial.rounds and key in self._numbers:
            self._results.setdefault(self._numbers[key], result)

    def is_due(self, now_s: float, lost: Collection[Key]) -> bool:
        """Whether the round has ended."""
        if now_s < self.until_s and len(self._results) + len(lost) < 2 * len(self._chosen):
            return False
        gone = {self._numbers[key] for key in lost if key in self._numbers}
        busy = {end for ends in self._chosen for end in ends}
        return now_s >= self.until_s or busy <= self._results.keys() | gone

    def next(self, now_s: float) -> Iterator[Send]:
        """Judge the round, and begin the next one."""
        done = [self._tested(ends) for ends in self._chosen]
        self.tests += done
        allowed = slowest_allowed(self._settings.thresholds, self.tests)
        good = {test.ends: not is_bad(test, allowed) for test in done}
        self.trial = localise.record(self.trial, good)
        yield from self.begin(now_s)

    def seen(self) -> Seen:
        """All tests, and what they come to."""
        return Seen(tuple(node.name for node in self._nodes), tuple(self.tests), localise.verdict(self.trial))

    def _tested(self, ends: Pair) -> Tested:
        one, other = (self._results.get(end) for end in ends)
        whys = tuple(
            "no report" if result is None else "" if result.good else result.why or "failed"
            for result in (one, other)
        )
        rates = [result.rate for result in (one, other) if result is not None and result.good]
        return Tested(ends, (whys[0], whys[1]), min(rates, default=0))
