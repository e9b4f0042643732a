"""Node 0's part in the cluster preflight: gather reports, have pairs tested, judge once, tell all nodes.

`ClusterPreflight` has neither sockets nor a clock: messages and times come as arguments of its calls.
`PreflightServer` is the thread around it that waits for a line, a connection or a deadline.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum

from msgspec.structs import replace

from trainer_launch.membership.protocol import StatusQuery, refused_version
from trainer_launch.membership.server import Connection, ServerConnections
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MessageError
from trainer_launch.model.findings import Fault, Finding, Measure, Scope, worst_first
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster import pairs, present_nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.pairs import Rounds
from trainer_launch.preflight.cluster.present_nodes import (
    LEASE_S,
    Cluster,
    ClusterSettings,
    JobNode,
    PairTests,
    label,
)

TICK_S = 0.25
NEWS_S = 2.0  # between two words to those who wait, which show that this node lives
NOT_YET = msg.Refused("node 0 is still in preflight; its coordinator starts afterwards", retry=True)
_TOO_LATE = msg.Refused("the cluster preflight is over; the other nodes continue", retry=True)
_GATHER_S = 2.0  # after the last that came, in a job that may have more nodes than it needs
_SHOWN = 8
_COME_BACK_S = 4.0  # for a node that was lost after all were there
_SILENCE_S = 20.0  # until the kernel ends a connection whose other end does not answer
_log = logging.getLogger(__name__)


class PreflightPhase(Enum):
    """How far the cluster preflight is."""

    CALLING = "calling"
    REPORTING = "reporting"
    TESTING = "testing"
    OVER = "over"


def judge(cluster: Cluster) -> list[Finding]:
    """The findings about the reports of all nodes and the tests of pairs. Pure."""
    checks = [check for check in registry.at(Where.CLUSTER) if check.id not in cluster.settings.left_out]
    runs = dict.fromkeys(check.run for check in checks)
    return [finding for run in runs for finding in run(cluster)]


class ClusterPreflight:
    """The cluster preflight of one job.

    `send` takes a connection's number and a message, or None to end the connection. `tick` is called every
    `TICK_S`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        now_s: float,
        send: Callable[[int, msg.FromServer | None], None],
    ) -> None:
        self._settings, self._send = settings, send
        self._until_s = now_s + settings.deadline_s  # for all to come, later for all to report
        self._news_at_s = now_s + NEWS_S
        self._last_came_s = now_s
        self._nodes: dict[int, JobNode] = {}  # by rank, all that have come
        self._peers: dict[int, JobNode] = {}  # by connection, those that are here
        self._lost: set[int] = set()  # ranks that were here
        self._unreported: set[int] = set()  # ranks whose report is awaited
        self._at_work = ""  # a host whose job runs already
        self._collisions: dict[int, set[str]] = {}
        self._rounds: Rounds | None = None
        self.phase = PreflightPhase.CALLING
        self.findings: tuple[Finding, ...] = ()  # when it is over

    def hear(self, peer: int, address: str, message: msg.Message, now_s: float) -> None:
        """A message, from the connection with this number."""
        if self.phase is PreflightPhase.OVER:
            return self._send(peer, None)
        node = self._peers.get(peer)
        if node is not None:
            node.heard_s = now_s
        match message:
            case msg.Hello(listens=None):
                self._meet_worker(peer, message)
            case msg.Hello():
                self._greet(peer, address, message, now_s)
            case msg.NodeReport() if node is not None and node.report.is_early:
                node.report = message
                if not message.is_early:
                    self._unreported.discard(node.rank)
            case msg.Result() if node is not None and self._rounds is not None:
                self._rounds.take(node.rank, message)
        return self._go_on(now_s)

    def lose(self, peer: int, now_s: float) -> None:
        """A connection has ended."""
        self._lose(peer, "it closed the connection", now_s)
        self._go_on(now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed: nodes that wait learn that we live; a node that is silent for too long is lost."""
        if now_s >= self._news_at_s:
            # After this process was stopped, nodes' lines may wait unread.
            was_away = now_s > self._news_at_s + LEASE_S / 2
            self._news_at_s = now_s + NEWS_S
            missing = self._missing() if self.phase is PreflightPhase.CALLING else []
            news = self._news(now_s, tuple(map(self._name, missing[:_SHOWN])))
            for peer, node in list(self._peers.items()):
                if was_away:
                    node.heard_s = now_s
                if now_s - node.heard_s > LEASE_S:
                    self._send(peer, None)
                    self._lose(peer, f"no message from it for {LEASE_S:g} s", now_s)
                else:
                    self._send(peer, news)
        self._go_on(now_s)

    def break_off(self, defect: str) -> None:
        """After a defect of this program: what nodes have found themselves stands, all else is unknown."""
        action = "no node is faulty; report this bug with the log of node 0"
        unknown = present_nodes.all_present.unknown(defect, scope=Scope.JOB, action=action)
        self._decide([unknown], present_nodes.own_findings(self._peers.values()))

    @property
    def names(self) -> list[str]:
        """The nodes that came, for people."""
        return [self._nodes[rank].name for rank in sorted(self._nodes)]

    @property
    def machines(self) -> dict[str, str]:
        """The machine of each host that came, as far as it is known."""
        return {node.hello.host: node.hello.machine for node in self._nodes.values()}

    @property
    def pair_tests(self) -> PairTests:
        """How pairs were tested so far."""
        return PairTests() if self._rounds is None else self._rounds.tests

    def measured(self) -> list[Measure]:
        """The measures of all nodes."""
        of_nodes = (measure for node in self._nodes.values() for measure in node.report.measures)
        return [*of_nodes, *self.pair_tests.measures]

    def _meet_worker(self, peer: int, hello: msg.Hello) -> None:
        """A node that looks for a coordinator: its job runs already, or it is of another one."""
        is_ours = hello.job == self._settings.job
        self._send(peer, NOT_YET if is_ours else self._another_job(hello.job))
        self._send(peer, None)
        self._at_work = hello.host if is_ours else self._at_work

    def _greet(self, peer: int, address: str, hello: msg.Hello, now_s: float) -> None:
        rank = self._settings.max_nodes if hello.node_rank is None else hello.node_rank
        old = self._nodes.get(rank)
        if (refused := self._refusal(rank, hello, old)) is not None:
            self._send(peer, refused)
            return self._send(peer, None)
        if old is not None and old.peer is not None:
            self._peers.pop(old.peer, None)
            self._send(old.peer, None)
        self._lost.discard(rank)
        self._collisions.pop(rank, None)  # the other one was an old pod of this node, and is gone
        at = Endpoint(address, hello.listens or 0)
        self._nodes[rank] = self._peers[peer] = JobNode(hello, rank, at, peer, now_s)
        self._unreported.add(rank)
        self._last_came_s = now_s
        return self._send(
            peer, self._news(now_s) if self.phase is PreflightPhase.CALLING else msg.Complete(self._settings.salt)
        )

    def _refusal(self, rank: int, hello: msg.Hello, old: JobNode | None) -> msg.Refused | None:
        """Why a node is turned away, if it is: for good where it does not belong to this job."""
        if (refused := refused_version("node 0", msg.VERSION, hello.version)) is not None:
            return refused
        if hello.job != self._settings.job:
            return self._another_job(hello.job)
        if rank >= self._settings.max_nodes:
            ranks = f"this job has nodes 0 to {self._settings.max_nodes - 1}"
            return msg.Refused(f"node rank {hello.node_rank} is invalid: {ranks}", retry=False)
        if old is not None and old.peer is not None and old.hello.host != hello.host:
            self._collisions.setdefault(old.rank, {old.hello.host}).add(hello.host)
            text = f"{old.name} is there already, so {hello.host} cannot be node {old.rank} as well"
            return msg.Refused(text, retry=True)
        is_back = old is not None and old.hello.incarnation == hello.incarnation
        is_in_time = self.phase is PreflightPhase.CALLING or (is_back and self.phase is PreflightPhase.REPORTING)
        return None if is_in_time else _TOO_LATE

    def _another_job(self, name: str) -> msg.Refused:
        return msg.Refused(f"this is the preflight of job {self._settings.job}, not {name}", retry=False)

    def _lose(self, peer: int, how: str, now_s: float) -> None:
        node = self._peers.pop(peer, None)
        if node is not None:
            node.peer, node.lost, node.lost_s = None, how, now_s
            self._lost.add(node.rank)

    def _news(self, now_s: float, missing: tuple[str, ...] = ()) -> msg.PreflightWaiting:
        is_calling = self.phase is PreflightPhase.CALLING
        left_s = max(0.0, self._until_s - now_s) if is_calling else self._settings.report_s
        present = len(self._peers)
        return msg.PreflightWaiting(present, max(present, self._settings.min_nodes), missing, left_s)

    def _missing(self) -> list[int]:
        here = {node.rank for node in self._peers.values()}
        return [rank for rank in range(self._settings.min_nodes) if rank not in here]

    def _name(self, rank: int) -> str:
        """A node for people, whether it ever came or not."""
        return self._nodes[rank].name if rank in self._nodes else label(rank, self._settings.host(rank))

    def _go_on(self, now_s: float) -> None:
        if self.phase is PreflightPhase.CALLING:
            self._call(now_s)
        elif self.phase is PreflightPhase.REPORTING:
            self._await_reports(now_s)
        elif (
            self._rounds is not None
            and self.phase is PreflightPhase.TESTING
            and self._rounds.is_due(now_s, self._lost)
        ):
            self._rounds.next(now_s, self._lost)
            if self._rounds.is_over:
                self._judge([node for node in self._nodes.values() if node.peer is None])

    def _call(self, now_s: float) -> None:
        settings, n_present = self._settings, len(self._peers)
        gathered = now_s >= min(self._last_came_s + _GATHER_S, self._until_s)
        if self._at_work and n_present:  # this node itself, at least
            self._decide([present_nodes.runs_already(self._at_work)])
        elif n_present >= settings.max_nodes or (n_present >= settings.min_nodes and gathered):
            self.phase = PreflightPhase.REPORTING
            self._until_s = now_s + settings.report_s
            self._nodes = {node.rank: node for node in sorted(self._peers.values(), key=lambda node: node.rank)}
            self._lost.clear()
            self._unreported = {node.rank for node in self._nodes.values() if node.report.is_early}
            complete = msg.Complete(settings.salt)
            for peer in list(self._peers):
                self._send(peer, complete)
        elif now_s >= self._until_s:
            missing = {rank: self._name(rank) for rank in self._missing()}
            lost = {rank: node.lost for rank, node in self._nodes.items()}
            self._decide(
                [present_nodes.absent(missing, lost, n_present, settings)],
                present_nodes.collided(self._collisions),
                present_nodes.own_findings(self._peers.values()),
            )

    def _await_reports(self, now_s: float) -> None:
        if self._unreported and not self._lost and now_s < self._until_s:
            return
        awaited = [node for node in self._nodes.values() if node.report.is_early or node.peer is None]
        patient_s = [self._until_s if node.peer else node.lost_s + _COME_BACK_S for node in awaited]
        if now_s < min(self._until_s, max(patient_s, default=now_s)):
            return
        if awaited or len(self._nodes) < 2 or pairs.pairs.id in self._settings.left_out:
            self._judge(awaited)
        else:
            self.phase = PreflightPhase.TESTING
            self._rounds = Rounds(self._settings, list(self._nodes.values()), self._send)
            self._rounds.begin(now_s)

    def _judge(self, lost: Sequence[JobNode]) -> None:
        cluster = Cluster(
            settings=self._settings,
            nodes=[node for node in self._nodes.values() if not node.report.is_early],
            n_present=len(self._nodes),
            collisions=self._collisions,
            pairs=None if self._rounds is None else self._rounds.tests,
        )
        self._decide(judge(cluster), list(map(present_nodes.midway, lost)))

    def _decide(self, *parts: list[Finding]) -> None:
        self.phase = PreflightPhase.OVER
        self.findings = tuple(self._placed(finding) for finding in worst_first(itertools.chain(*parts)))
        decided = msg.Decided(msg.fitted(self.findings))
        for peer in list(self._peers):
            self._send(peer, decided)

    def _placed(self, finding: Finding) -> Finding:
        """With the Kubernetes nodes of the pods at fault: they are what is drained, and outlive the pods' names."""
        if finding.fault is not Fault.NODE:
            return finding
        subjects = set(finding.subject.split(", "))
        machines = ((node.name, node.hello.machine) for node in self._nodes.values() if node.name in subjects)
        # Where it has no name, it is known by the pod's own and a boot ID.
        places = [f"{name} is on {machine}" for name, machine in machines if machine and " " not in machine]
        return replace(finding, evidence=(*places[:_SHOWN], *finding.evidence))


class PreflightServer(ServerConnections[msg.Message, msg.FromServer]):
    """The cluster preflight of one job, on the port that its nodes meet at; its verdict frees the port."""

    _hang_up_s = 2.0  # for the termination message

    def __init__(self, settings: ClusterSettings, endpoint: Endpoint, secret: bytes | None = None) -> None:
        super().__init__(
            *("cluster preflight", msg.parse, msg.render),
            endpoint=endpoint,
            nodes=settings.max_nodes,
            secret=secret,
            silence_s=_SILENCE_S,
            log=lambda text, level: _log.log(level, "%s", text),
        )
        self._settings = settings
        self._tick_at_s = 0.0

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        # To be read after its verdict.
        self.preflight = ClusterPreflight(self._settings, time.monotonic(), self._say)
        return super().start()

    def _is_over(self) -> bool:
        return self.preflight.phase is PreflightPhase.OVER

    def _end(self, defect: str) -> None:
        if defect:  # a thread that dies in silence would blame node 0
            self.preflight.break_off(defect)

    def _due_s(self) -> float:
        return self._tick_at_s

    def _tick(self, now_s: float) -> None:
        self._tick_at_s = now_s + TICK_S
        self.preflight.tick(now_s)

    def _say(self, peer: int, message: msg.FromServer | None) -> None:
        if message is None:
            self._close_after_flush(peer)
        else:
            self._send(peer, message)

    def _gone(self, connection: Connection, *, ended: bool) -> None:
        self._events.append(lambda now_s: self.preflight.lose(connection.peer, now_s))

    def _heard(self, connection: Connection, message: msg.Message) -> None:
        peer, address = connection.peer, connection.address
        if isinstance(message, StatusQuery):
            self._send(peer, NOT_YET)
            self._close_after_flush(peer)
            return
        if not connection.is_greeted:
            if not isinstance(message, msg.Hello):
                raise MessageError("did not identify itself first")
            # A node that looks for a coordinator is told to wait, whatever its version.
            is_here = message.listens is not None
            refused = refused_version("node 0", msg.VERSION, message.version) if is_here else None
            if self._refusal_of(connection, message, refused) is not None:
                return
            self._greeted(connection)
        if isinstance(message, msg.Time):
            now = time.time()
            self._send(peer, msg.TimeIs(message.sent, now, time.time()))
        self._events.append(lambda now_s: self.preflight.hear(peer, address, message, now_s))
