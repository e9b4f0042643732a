"""A job of simulated nodes around a ClusterPreflight: no sockets, and a clock that jumps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from trainer_launch.model import Endpoint
from trainer_launch.model.findings import Fault, Finding, Measure, Scope, Status
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import TICK_S, ClusterPreflight, PreflightPhase
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

JOB = "job"
HOME = Endpoint("job-node-0-0.job", 29500)
PLACES = (HOME, *(Endpoint(f"job-node-0-{rank}.job", HOME.port) for rank in range(1, 4096)))

Outcome = Callable[[int, int], "tuple[str, int]"]  # of node and partner: why it failed, or "", and the rate


def well(node: int, partner: int) -> tuple[str, int]:
    return "", 1_000_000_000


class Simulation:
    """Nodes that answer at once, unless told otherwise."""

    def __init__(self, nodes: int, *, outcome: Outcome = well, **settings: object) -> None:
        values: dict[str, object] = {"min_nodes": nodes, "max_nodes": nodes, "deadline_s": 120.0, **settings}
        self.settings = ClusterSettings(job=JOB, places=PLACES, salt="salt", **values)  # type: ignore[arg-type]
        self.now_s = 1000.0
        self.hall = ClusterPreflight(self.settings, self.now_s, self._sent)
        self._unread: deque[tuple[int, msg.Message]] = deque()
        self._delivers = False
        self.outcome = outcome
        self.on_rail: Callable[[int, int, int], tuple[str, int] | None] = lambda node, partner, rail: None
        self.tests: list[tuple[int, int, msg.Test]] = []
        self.facts: Mapping[int, Mapping[str, str]] = {}
        self.offsets: Mapping[int, float] = {}
        self.own: Mapping[int, Sequence[Finding]] = {}
        self.measures: Mapping[int, Sequence[Measure]] = {}
        self.mute: set[int] = set()  # send no record and no result
        self.told: dict[int, list[msg.Message]] = {}
        self.rounds = 0

    def come(self, *ranks: int, host: str = "") -> None:
        for rank in ranks:
            self.say(rank, present(rank, host=host))

    def say(self, rank: int, message: msg.Message, peer: int | None = None) -> None:
        self.hall.hear(rank if peer is None else peer, "10.0.0.1", message, self.now_s)
        self._deliver()

    def leave(self, rank: int) -> None:
        self.hall.lose(rank, self.now_s)
        self._deliver()

    def wait(self, seconds: float, silent: Iterable[int] = ()) -> None:
        """Let time pass; all but the silent ones go on saying that they live."""
        end_s = self.now_s + seconds
        quiet = set(silent)
        for number in range(int(seconds / TICK_S)):
            if self.is_over:
                break
            self.now_s += TICK_S
            for rank in set(self.told) - quiet if number % 8 == 0 else ():
                self.say(rank, msg.Renew())
            self.hall.tick(self.now_s)
            self._deliver()
        self.now_s = end_s

    def _sent(self, peer: int, message: msg.Message | None) -> None:
        if message is not None:
            self.told.setdefault(peer, []).append(message)
            self._unread.append((peer, message))

    def _deliver(self) -> None:
        if not self._delivers:  # else an answer has led to this message
            self._delivers = True
            while self._unread:
                self.answer(*self._unread.popleft())
            self._delivers = False

    def answer(self, rank: int, message: msg.Message) -> None:
        if rank in self.mute:
            return
        if isinstance(message, msg.Complete):
            facts = {"torch": "2.9.0", **self.facts.get(rank, {})}
            own = msg.fitted(self.own.get(rank, ()))
            measures = tuple(self.measures.get(rank, ()))
            self.say(rank, msg.NodeReport(facts, self.offsets.get(rank, 0.0), 0.001, own, measures))
        elif isinstance(message, msg.Test):
            self.rounds = max(self.rounds, message.round + 1)
            one, other = map(int, message.token.split("-")[-2:])
            partner = other if rank == one else one
            self.tests.append((rank, partner, message))
            rails = range(message.rails)
            seen = [self.on_rail(rank, partner, rail) or self.outcome(rank, partner) for rail in rails]
            self.say(rank, msg.Result(message.round, tuple(msg.RailResult(*one) for one in seen)))

    @property
    def is_over(self) -> bool:
        return self.hall.phase is PreflightPhase.OVER

    def loud(self) -> list[Finding]:
        return [found for found in self.hall.findings if found.status in (Status.FAIL, Status.WARN)]

    def verdicts(self) -> dict[int, tuple[Finding, ...]]:
        """What each node was told at the end."""
        return {
            rank: message.findings
            for rank, messages in self.told.items()
            for message in messages
            if isinstance(message, msg.Decided)
        }


def present(
    rank: int, *, host: str = "", incarnation: str = "a", job: str = JOB, version: int = msg.VERSION
) -> msg.Hello:
    return msg.Hello(version, job, rank, host or f"job-node-0-{rank}", f"{rank}-{incarnation}", listens=29500)


def failure(check: str = "shm", text: str = "/dev/shm is too small") -> Finding:
    return Finding(check=check, status=Status.FAIL, fault=Fault.JOB, scope=Scope.NODE, text=text)
