"""Node 0's part in the cluster preflight: who is present or missing, what they say, who is tested with whom. Pure.

Its only input are events, its only output replies, and time arrives with the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from trainer_launch.membership.protocol import Hello
from trainer_launch.model.findings import Finding, Measure
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster import nodes, present_nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.pair_results import PairTests, Rounds

NEWS_S = 2.0  # between two words to those who wait, which show that this node lives
_SHOWN = 8
_SOUGHT = 32  # nodes whose tokens all look for in shared folders
_COME_BACK_S = 4.0  # for who was lost after all were there


class Phase(Enum):
    """How far the cluster preflight is."""

    CALLING = "calling"
    RECORDING = "recording"
    TESTING = "testing"
    OVER = "over"


class ClusterPreflight:
    """The cluster preflight of one job."""

    def __init__(self, settings: nodes.Settings, now_s: float) -> None:
        self._settings = settings
        self._until_s = now_s + settings.deadline_s
        self._look_at_s = self._until_s - min(settings.look_s, settings.deadline_s / 3)
        self._news_at_s = now_s + NEWS_S
        self._last_came_s = now_s
        self._nodes: dict[int, nodes.Node] = {}
        self._peers: dict[int, nodes.Node] = {}
        self._lost: set[int] = set()  # that were here
        self._n_recorded = 0
        self._at_work = ""  # a host whose job runs already
        self._collisions: dict[int, set[str]] = {}
        self._looked: dict[int, nodes.Stuck] = {}
        self._looking: tuple[int, ...] | None = None
        self._record_until_s = 0.0
        self._rounds: Rounds | None = None
        self.seen = PairTests()  # the pair tests, when it is over
        self._steps = dict(zip(Phase, (self._call, self._record, self._test), strict=False))
        self.phase = Phase.CALLING
        self.findings: tuple[Finding, ...] = ()  # when it is over

    def step(self, event: nodes.Event, now_s: float) -> list[nodes.Reply]:
        """What an event leads to."""
        if self.phase is Phase.OVER:
            return [nodes.Drop(event.peer)] if isinstance(event, nodes.Said) else []
        return list(self._step(event, now_s))

    def break_off(self, mistake: Exception) -> list[nodes.Reply]:
        """After a mistake of this program: what nodes have found themselves stands, all else is unknown."""
        own = present_nodes.grouped({node.name: node.findings for node in self._present()})
        return list(self._decide([present_nodes.broken(mistake)], own))

    def due_s(self) -> float | None:
        """When to come again with a Tick."""
        if self.phase is Phase.OVER:
            return None
        times = [self._news_at_s]
        if self.phase is Phase.CALLING:
            times.append(self._until_s if self._looking is not None else self._look_at_s)
            if len(self._peers) >= self._settings.min_nodes:
                times.append(self._last_came_s + self._settings.gather_s)
        elif self.phase is Phase.RECORDING:
            times.append(self._record_until_s)
        elif self._rounds is not None:
            times.append(self._rounds.until_s)
        return min(times)

    def _step(self, event: nodes.Event, now_s: float) -> Iterator[nodes.Reply]:
        match event:
            case nodes.Said(peer, address, message):
                if peer in self._peers:
                    self._peers[peer].heard_s = now_s
                yield from self._hear(peer, address, message, now_s)
            case nodes.Gone(peer):
                self._lose(peer, "it closed the connection", now_s)
            case nodes.Looked(found):
                self._looked = dict(zip(self._looking or (), found, strict=False))
            case nodes.Tick():
                yield from self._tell_news(now_s)
        if self.phase is not Phase.OVER:
            yield from self._steps[self.phase](now_s)

    # -- who is there -------------------------------------------------------------------------

    def _hear(self, peer: int, address: str, message: msg.Message, now_s: float) -> Iterator[nodes.Reply]:
        node = self._peers.get(peer)
        match message:
            case Hello():
                yield nodes.Send(peer, nodes.not_now(message, self._settings))
                yield nodes.Drop(peer)
                self._at_work = message.host if message.job == self._settings.job else self._at_work
            case msg.Present():
                yield from self._greet(peer, address, message, now_s)
            case msg.Record() if node is not None:
                node.facts, node.offset = dict(message.facts), (message.offset_s, message.error_s)
                node.findings = present_nodes.told(message.findings)
                node.measures, node.checksums = message.measures, message.checksums
                node.tokens = dict(message.tokens)
                self._n_recorded += not node.has_record
                node.has_record = True
            case msg.Found() if node is not None and not node.has_record:
                node.findings = present_nodes.told(message.findings)
            case msg.Result() if node is not None and self._rounds is not None:
                self._rounds.take(node.rank, message)

    def _greet(self, peer: int, address: str, said: msg.Present, now_s: float) -> Iterator[nodes.Reply]:
        rank = said.node_rank
        old = self._nodes.get(rank)
        if (refusal := self._refusal(said, old)) is not None:
            yield nodes.Send(peer, refusal)
            yield nodes.Drop(peer)
            return
        if old is not None and old.peer is not None:
            self._peers.pop(old.peer, None)
            yield nodes.Drop(old.peer)
        self._n_recorded -= old is not None and old.has_record
        self._lost.discard(rank)
        self._nodes[rank] = node = nodes.Node(rank, said.host, said.incarnation, address, said.port, peer, now_s)
        self._peers[peer] = node
        self._last_came_s = now_s
        if self.phase is Phase.CALLING:
            yield nodes.Send(peer, self._news(now_s, ()))
        else:
            yield nodes.Send(peer, self._complete())

    def _refusal(self, said: msg.Present, old: nodes.Node | None) -> msg.Refused | None:
        if (for_good := nodes.turned_away(said, self._settings)) is not None:
            return for_good
        if old is not None and old.peer is not None and old.host != said.host:
            self._collisions.setdefault(old.rank, {old.host}).add(said.host)
            return msg.Refused(
                f"{old.name} is there already, so {said.host} cannot be node {old.rank} as well", True
            )
        is_back = old is not None and old.incarnation == said.incarnation
        if self.phase is not Phase.CALLING and not (is_back and self.phase is Phase.RECORDING):
            return msg.Refused("the cluster preflight is over; the other nodes continue", retry=True)
        return None

    def _lose(self, peer: int, how: str, now_s: float) -> None:
        node = self._peers.pop(peer, None)
        if node is not None and node.peer == peer:
            node.peer, node.lost, node.lost_s = None, how, now_s
            self._lost.add(node.rank)

    def _present(self) -> list[nodes.Node]:
        return [node for node in self._nodes.values() if node.peer is not None]

    def _tell_news(self, now_s: float) -> Iterator[nodes.Reply]:
        """From time to time: who waits learns that we live, who is silent for too long is lost."""
        if now_s < self._news_at_s:
            return
        was_away = (
            now_s > self._news_at_s + nodes.LEASE_S / 2
        )  # this process was stopped: their lines may wait unread
        self._news_at_s = now_s + NEWS_S
        missing = self._missing() if self.phase is Phase.CALLING else []
        news = self._news(now_s, tuple(self._name(rank) for rank in missing[:_SHOWN]))
        for node in self._present():
            if was_away:
                node.heard_s = now_s
            if node.peer is not None and now_s - node.heard_s > nodes.LEASE_S:
                yield nodes.Drop(node.peer)
                self._lose(node.peer, f"it has said nothing for {nodes.LEASE_S:g} s", now_s)
            elif node.peer is not None:
                yield nodes.Send(node.peer, news)

    def _news(self, now_s: float, missing: tuple[str, ...]) -> msg.Waiting:
        is_calling = self.phase is Phase.CALLING
        left_s = max(0.0, self._until_s - now_s) if is_calling else self._settings.record_s
        present = len(self._peers)
        return msg.Waiting(present, max(present, self._settings.min_nodes), missing, left_s)

    # -- how it goes on -----------------------------------------------------------------------

    def _call(self, now_s: float) -> Iterator[nodes.Reply]:
        settings, n_present = self._settings, len(self._peers)
        gathered = now_s >= min(self._last_came_s + settings.gather_s, self._until_s)
        if self._at_work and n_present:  # this node itself, at least
            yield from self._decide([present_nodes.runs_already(self._at_work)])
        elif n_present >= settings.max_nodes or (n_present >= settings.min_nodes and gathered):
            self.phase = Phase.RECORDING
            self._record_until_s = now_s + settings.record_s
            self._nodes = {node.rank: node for node in sorted(self._present(), key=lambda node: node.rank)}
            self._lost.clear()
            for node in self._present():
                yield nodes.Send(node.peer or 0, self._complete())
        elif now_s >= self._until_s:
            missing = self._missing()
            yield from self._decide(
                present_nodes.absent(missing, self._nodes, self._looked, settings, n_present, self._name),
                present_nodes.collided(self._collisions),
                present_nodes.grouped({node.name: node.findings for node in self._present()}),
            )
        elif now_s >= self._look_at_s and self._looking is None:
            self._looking = tuple(self._missing()[: present_nodes.MAX_LOOKED])
            limit_s = max(0.2, self._until_s - now_s - 0.4)
            yield nodes.Look(
                tuple(nodes.place_of(rank, self._nodes, settings.names) for rank in self._looking), limit_s
            )

    def _complete(self) -> msg.Complete:
        """All look for the tokens of the same nodes; incarnations are random, and so is the choice."""
        tokens = sorted(node.incarnation for node in self._nodes.values())[:_SOUGHT]
        return msg.Complete(self._settings.salt, tuple(tokens if self._settings.storage else ()))

    def _missing(self) -> list[int]:
        return nodes.missing_ranks(self._nodes, self._settings.min_nodes)

    def _name(self, rank: int) -> str:
        return present_nodes.named(rank, self._nodes.get(rank), self._settings.names)

    def _record(self, now_s: float) -> Iterator[nodes.Reply]:
        if self._n_recorded < len(self._nodes) and not self._lost and now_s < self._record_until_s:
            return
        present = list(self._nodes.values())
        waited = [node for node in present if not node.has_record or node.peer is None]
        patient_s = [self._record_until_s if node.peer else node.lost_s + _COME_BACK_S for node in waited]
        if now_s < min(self._record_until_s, max(patient_s, default=now_s)):
            return
        if waited or len(present) < 2:
            yield from self._decide(self._compared(), [present_nodes.midway(node) for node in waited])
            return
        if not self._settings.with_pairs:
            yield from self._decide(self._compared(), self._midway())
            return
        self.phase = Phase.TESTING
        self._rounds = Rounds(self._settings, present)
        yield from self._rounds.begin(now_s)

    def _test(self, now_s: float) -> Iterator[nodes.Reply]:
        rounds = self._rounds
        if rounds is None or not rounds.is_due(now_s, self._lost):
            return
        yield from rounds.next(now_s)
        if rounds.is_over:
            self.seen = rounds.seen()
            yield from self._decide(self._compared(), self._midway())

    def _midway(self) -> list[Finding]:
        return [present_nodes.midway(node) for node in self._nodes.values() if node.peer is None]

    def _compared(self) -> list[Finding]:
        cluster = nodes.Cluster(
            settings=self._settings,
            nodes=[node for node in self._nodes.values() if node.has_record],
            n_present=len(self._nodes),
            collisions=self._collisions,
            rounds=self._rounds,
        )
        runs = dict.fromkeys(check.run for check in registry.at(Where.CLUSTER))
        return [finding for run in runs for finding in run(cluster)]

    @property
    def names(self) -> list[str]:
        """The nodes that came, for people."""
        return [self._nodes[rank].name for rank in sorted(self._nodes)]

    def measured(self) -> list[Measure]:
        """What all nodes have measured."""
        of_pairs = [] if self._rounds is None else self._rounds.measured()
        return [*(one for node in self._nodes.values() for one in node.measures), *of_pairs]

    def _decide(self, *found: list[Finding]) -> Iterator[nodes.Reply]:
        self.phase = Phase.OVER
        whole = [finding for part in found for finding in part]
        self.findings = tuple(msg.worst_first(whole))
        decided = msg.Decided(msg.dump_findings(self.findings))
        for node in self._present():
            yield nodes.Send(node.peer or 0, decided)
        yield nodes.Over()
