"""The node's side of the cluster preflight: its link to node 0, its report, its ends of pair tests, the verdict."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from trainer_launch import contracts
from trainer_launch.host import network
from trainer_launch.host.files import read_secret
from trainer_launch.host.machine import machine_name
from trainer_launch.host.network import tune
from trainer_launch.membership import candidates, timeouts
from trainer_launch.membership.client import Lines, LostError, ReconnectingClient
from trainer_launch.membership.protocol import JobStatus
from trainer_launch.membership.quarantine import NO_MACHINE
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.findings import Finding, Scope
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import counted
from trainer_launch.model.value_parsers import is_address
from trainer_launch.planning.task import ports_of
from trainer_launch.planning.torch import job_name
from trainer_launch.preflight import container_checks, registry, thresholds
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import node_facts, pairs, present_nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer
from trainer_launch.preflight.cluster.pair_tests import Collectives, Listener, bench
from trainer_launch.preflight.cluster.present_nodes import LEASE_S, ClusterSettings, all_present, label, places_of

_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 3.0
_NAME_S = 2.0  # less than the resolver's own time to ask again
_ANSWER_S = 5.0
_LATE_S = 4.0  # that a verdict may come after the deadline
_SILENCE_S = 8.0  # of node 0, which says something every two seconds
_COME_BACK_S = 10.0  # for node 0, when it is lost after all were there
_GRACE_S = 2.0  # after the end that node 0 has named
_CLOCK_TRIES = 3
_NO_CLOCK_S = 1e6  # so much may be wrong with an offset that was not measured
_SILENT_KERNEL_S = 10.0
_SEAT_PAUSE_S = 1.0  # before each seat is asked
_SEAT_ANSWER_S = 1.0

_COMPARISONS = (node_facts.facts.id, node_facts.clock.id, pairs.pairs.id)
_SAY_AGAIN_S = 10.0
_POLL_S = 2.0
_HOST = re.compile(r"node [0-9]+ \(([^()]+)\)")
_SINGLE_NODE = "the job has one node"
_UNKNOWN_PLACE = "the number of nodes, the node rank or the address of node 0 is unknown"
_HIDDEN = "this operator publishes no DNS names for init containers; elsewhere, request it with --level"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # a variable of every pod
_log = logging.getLogger(__name__)


News: TypeAlias = msg.Complete | msg.PreflightWaiting | msg.Decided


class NodeLink(ReconnectingClient[msg.Message, msg.FromNode, News]):
    """A daemon thread that finds node 0, stays in touch, and tests pairs.

    `hello` says who this node is; its port and proof are filled in here.
    """

    def __init__(  # noqa: PLR0913
        self,
        home: Endpoint,
        hello: msg.Hello,
        *,
        deadline_s: float,
        port: int | None,
        ports: PortRange | None = None,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.time,
        bench: Callable[[msg.Test, Listener], msg.Result],
    ) -> None:
        super().__init__("node 0", msg.render, _PAUSE_S)
        self._home, self._hello, self._secret = home, hello, secret
        self._clock, self._bench = clock, bench
        self._other = f"what listens at {home} is not node 0's preflight"
        self._began_s = time.monotonic()
        self._deadline_at_s = self._began_s + deadline_s
        self._until_s = self._deadline_at_s
        self._refused: tuple[float, str] | None = None  # since when node 0 refuses this node for good, and why
        self.stage = "it has just started"
        self.waiting: msg.PreflightWaiting | None = None  # node 0's latest word
        # Node 0's clock minus ours, and how much it may be off.
        self.offset: tuple[float, float] = (0.0, _NO_CLOCK_S)
        self._listener = Listener(port, ports)
        self._thread.start()

    def hurry(self) -> None:
        """End without the thread where it hangs, in the resolver for example."""
        now_s = time.monotonic()
        if now_s > max(self._until_s, self._deadline_at_s, self._heard_s + _SILENCE_S) + _LATE_S:
            text = f"{self._hello.host} could not ask node 0 within {now_s - self._began_s:.0f} s: its resolver or "
            self.end((all_present.found("cut off", f"{text}network hangs ({self.stage})"),))

    def end(self, findings: tuple[Finding, ...]) -> None:
        """End with these findings as the verdict, whatever node 0 may say."""
        self._is_over = True
        self._tell(msg.Decided(findings))

    def close(self) -> None:
        """End all, and free the port."""
        super().close()
        self._listener.close()

    def _connect_once(self) -> bool:
        is_good = False
        try:
            self._use_connection()
            is_good = True
        except (LostError, NodeError) as problem:
            self._lose(str(problem))
        except OSError as problem:  # no descriptor for it
            self._lose(f"cannot communicate with node 0: {problem.strerror}")
        if not self._is_over and time.monotonic() >= self._until_s:
            self._give_up()
        return is_good

    def _next_pause_s(self, before_s: float) -> float:
        return min(2 * before_s, _LONGEST_PAUSE_S, max(_PAUSE_S, self._until_s - time.monotonic()))

    def _lose(self, why: str) -> None:
        """Go back to waiting for node 0; the time that it has promised ends with it."""
        self.stage, self.waiting = why, None
        self._until_s = min(self._until_s, max(self._deadline_at_s, time.monotonic() + _COME_BACK_S))

    def _give_up(self) -> None:
        if self._refused is not None:
            return self.end((all_present.found("refused", self._refused[1]),))
        name, waited_s = label(0, self._home.host), time.monotonic() - self._began_s
        text = f"{name} is missing after {waited_s:.0f} s: {self.stage}"
        return self.end((all_present.found("no node 0", text, subject=name),))

    def _use_connection(self) -> None:
        with self._connect() as sock:
            tune(sock, _SILENT_KERNEL_S)
            lines = Lines(sock, msg.parse, self._server, self._secret)
            self._greet(sock, lines)
            sock.settimeout(_ANSWER_S)
            self._talk(sock, lines, msg.Renew(), LEASE_S / 3, _SILENCE_S)

    def _connect(self) -> socket.socket:
        """Look the name up each time: a pod that is made again has another address."""
        left_s = max(0.1, min(_CONNECT_S, self._until_s - time.monotonic()))
        try:
            sock = network.connected(self._home, left_s)
        except TimeoutError:
            raise LostError(f"no answer from node 0 at {self._home} in time") from None
        except socket.gaierror as problem:
            raise LostError(f"no DNS record of node 0 ({self._home.host}): {problem.strerror}") from None
        except OSError as problem:
            why = problem.strerror or problem
            raise LostError(f"cannot connect to node 0 at {self._home}: {why}") from None
        if sock.getsockname() == sock.getpeername():  # as may be where the kernel has chosen this port
            sock.close()
            raise LostError(f"node 0 is on this machine, but does not listen at {self._home} yet")
        return sock

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message]) -> None:
        until_s = min(time.monotonic() + _ANSWER_S, max(self._until_s, time.monotonic() + 0.2))
        lines.challenged(until_s, self._other)
        sock.settimeout(_ANSWER_S)
        answer = self._introduced(lines, replace(self._hello, listens=self._listener.port), until_s)
        if isinstance(answer, msg.Refused) and not answer.retry:
            self._refuse(answer.reason)
        is_preflight = isinstance(answer, msg.PreflightWaiting | msg.Complete)
        for message in (answer, *(self._learn_time(lines, until_s) if is_preflight else ())):
            self._take(message)

    def _refuse(self, reason: str) -> None:
        """Believe it at once where there is no name that may still lead to another job's pod."""
        now_s, name = time.monotonic(), self._home.host
        since_s, _ = self._refused = (self._refused[0] if self._refused else now_s, reason)
        if is_address(name) or name == "localhost" or now_s >= since_s + timeouts.DNS_CACHE_S:
            self.end((all_present.found("refused", reason),))

    def _take(self, message: msg.Message) -> None:
        match message:
            case JobStatus():  # a coordinator's
                self.end((present_nodes.runs_already(None),))
            case msg.PreflightWaiting(_, _, _, left_s):
                self._refused = None
                self._until_s = max(self._until_s, time.monotonic() + left_s + _GRACE_S)
                self.stage, self.waiting = "it takes part in the cluster preflight", message
                self._tell(message)
            case msg.Complete():
                self._tell(message)
            case msg.Test() as test:

                def take_part() -> None:
                    self.send(self._bench(_findable(test), self._listener))

                threading.Thread(target=take_part, daemon=True).start()
            case msg.Decided(findings):
                self.end(findings)
            case msg.Refused(reason, _):
                raise LostError(f"node 0 refuses for now: {reason}")

    def _learn_time(self, lines: Lines[msg.Message], until_s: float) -> list[msg.Message]:
        """Four timestamps, as NTP has them; the fastest of some exchanges tells most. What else comes meanwhile."""
        others: list[msg.Message] = []
        self.offset = (0.0, _NO_CLOCK_S)
        for _ in range(_CLOCK_TRIES):
            lines.say(msg.render(msg.Time(self._clock())))
            while not isinstance(answer := lines.next(until_s), msg.TimeIs):
                others.append(answer)
                if isinstance(answer, msg.Decided):  # the last word
                    return others
            now = self._clock()
            round_trip_s = max(0.0, (now - answer.sent) - (answer.answered - answer.heard))
            if round_trip_s / 2 < self.offset[1]:
                self.offset = (((answer.heard - answer.sent) + (answer.answered - now)) / 2, round_trip_s / 2)
        return others


def _findable(test: msg.Test) -> msg.Test:
    """With an address for a name that leads there, or nowhere in time: whether it resolves is for the check dns."""
    if test.rank == 0 or not test.address:
        return test
    try:
        addresses = network.addresses_of(test.host, _NAME_S)
    except OSError:
        addresses = [test.address]
    return replace(test, host=test.address) if test.address in addresses else test


def look_out(
    seats: Sequence[Endpoint], job: str, secret: bytes | None, at_work: Callable[[str], None]
) -> threading.Event:
    """Ask in a thread one seat after the other whether the job runs already, until the event is set.

    `at_work` is called with the first host that says so; a standby of a job that has not begun answers, too.
    """
    over = threading.Event()

    def ask() -> None:
        for seat in itertools.cycle(seats):
            if over.wait(_SEAT_PAUSE_S):
                return
            try:
                status = candidates.ask(seat, job, secret, _SEAT_ANSWER_S)
            except NodeError:
                continue
            if status.generation > 0 and status.end is None:
                at_work(seat.host)
                return

    threading.Thread(target=ask, name="lookout", daemon=True).start()
    return over


def obstacle(subject: Subject, settings: Settings, chosen: Collection[str], skipped: Collection[str]) -> str | None:
    """Why there is no cluster preflight; None: there is one."""
    topology = subject.topology
    if settings.level == "container":
        return "--level container checks this container only"
    if all_present.id in skipped or (chosen and not set(chosen) & set(registry.ids(Where.CLUSTER))):
        return "deselected with --only or --policy"
    if topology.pods == 1:
        return _SINGLE_NODE
    if subject.job.engine not in (None, "torchrun", "plain"):
        return "the nodes of this job do not connect to node 0"
    if subject.job.contract in container_checks.HIDING and "level" not in settings.model_fields_set:
        return _HIDDEN
    if topology.nodes is None or topology.node_rank is None or topology.coordinator is None:
        return _UNKNOWN_PLACE
    return None


def alone(subject: Subject, settings: Settings, obstacle: str) -> list[Finding]:
    """Findings about a preflight without other nodes: a warning where the job may have some all the same."""
    is_assumed = subject.job.contract == contracts.UNKNOWN.name and _IN_KUBERNETES in subject.env
    if obstacle == _SINGLE_NODE and is_assumed and "nodes" not in settings.model_fields_set:
        obstacle = "no platform's variables are set in this container, so the job was taken for one node"
    elif obstacle not in (_UNKNOWN_PLACE, _HIDDEN):
        return [all_present.skipped(obstacle)] if subject.has_peers else []
    text = f"this node was checked alone, and compared with no other: {obstacle}"
    if obstacle == _HIDDEN:
        return [all_present.unknown(text, scope=Scope.JOB)]
    action = "set --nodes, --node-rank and --master-addr, if they can be known here"
    if subject.job.contract == contracts.UNKNOWN.name:
        action = (
            "name this init container in envInjection.targets of the runtime; for a job of one node, set --nodes 1"
        )
    return [all_present.bad(None, text, scope=Scope.JOB, action=action)]


class PortTakenError(NodeError):
    """Node 0 cannot open the port where the nodes meet."""


class Gathering:
    """A node's part from now on; `undo` ends it. `server` is node 0's, and its verdict is whole.

    Raises:
        PortTakenError: this is node 0, and the port where the nodes meet is not free.
        NodeError: no port of those allowed is free for pair tests.
        UsageError: the job's secret or --reference make no sense.
    """

    def __init__(self, subject: Subject, settings: Settings, skipped: Collection[str]) -> None:
        self._subject, cluster = subject, _cluster_settings(subject, settings, skipped)
        self._secret = read_secret(path) if (path := subject.job.secret_file) else None
        rank, home, hostname = subject.topology.node_rank or 0, cluster.places[0], subject.host.hostname
        self.own, self.home = label(rank, hostname), label(0, home.host)  # for people
        self.server: PreflightServer | None = None
        with contextlib.ExitStack() as undo:
            if subject.topology.is_coordinator:
                self.server = PreflightServer(cluster, Endpoint("", home.port), self._secret)
                try:
                    self.server.start()
                except NodeError as problem:
                    raise PortTakenError(str(problem)) from None
                undo.callback(self.server.stop)
            self._collectives = _collectives(subject, settings, cluster.left_out)
            if self._collectives is not None:
                undo.callback(self._collectives.close)
            incarnation = secrets.token_hex(8)
            # On one machine the job's port is node 0's.
            is_apart = self.server is None and subject.has_remote_peers and not network.may_share(home.host)
            self.link = NodeLink(
                home if self.server is None else Endpoint("localhost", home.port),
                msg.Hello(msg.VERSION, cluster.job, rank, hostname, incarnation, machine=machine_of(subject)),
                deadline_s=settings.wait_timeout,
                port=home.port if is_apart else None,
                ports=ports_of(settings),
                secret=self._secret,
                bench=functools.partial(bench, self._collectives),
            )
            undo.callback(self.link.close)
            seats = seats_of(cluster, rank)
            self._looking = look_out(
                seats, cluster.job, self._secret, lambda host: self.link.end((present_nodes.runs_already(host),))
            )
            undo.callback(self._looking.set)
            read_s = subject.left_s(node_facts.LEAST_S, node_facts.READ_S)
            self._read_slowly = node_facts.read_meanwhile(subject.command, read_s)
            self.undo = undo.pop_all()

    def finish(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Wait for all nodes, report this node's own `findings` and what it is; what was decided for all.

        The findings are told at once, too: all end with one verdict, also when some nodes never come.
        """
        self.link.send(msg.NodeReport(findings=node_facts.loud(findings), is_early=True))
        logged_s = -_SAY_AGAIN_S
        while True:
            match self.link.receive(_POLL_S):
                case None:
                    self.link.hurry()
                case msg.Decided(findings=decided):
                    return decided
                case msg.Complete(salt):
                    self._looking.set()
                    self.link.send(self._report(salt, findings))
                case msg.PreflightWaiting() as news if news.present < news.wanted:
                    if time.monotonic() - logged_s >= _SAY_AGAIN_S:
                        logged_s = time.monotonic()
                        _log.info("cluster preflight: %s", _waiting(news))

    def waiting(self) -> str:
        """For whom this node waits, in words."""
        news = self.link.waiting
        if news is None:
            return f"waiting for {self.home}: {self.link.stage}"
        if news.present < news.wanted:
            return f"waiting for nodes: {_waiting(news)}"
        return f"comparing and testing {counted(news.present, 'node')}"

    def _report(self, salt: str, findings: Sequence[Finding]) -> msg.NodeReport:
        facts = dict(self._read_slowly())
        if self._collectives is not None:
            facts[pairs.FACT] = self._collectives.ability()
        key = salt.encode() + (self._secret or b"")
        return node_facts.collect(self._subject, facts, findings, self.link.offset, key)


def _waiting(news: msg.PreflightWaiting) -> str:
    missing = f"; missing: {', '.join(news.missing)}" if news.missing else ""
    return f"{news.present} of {counted(news.wanted, 'node')} present, {news.left_s:.0f} s left{missing}"


def _cluster_settings(subject: Subject, settings: Settings, skipped: Collection[str]) -> ClusterSettings:
    topology = subject.topology
    home, nodes = topology.coordinator, topology.nodes
    if home is None or nodes is None or topology.node_rank is None:
        raise ValueError("there is no cluster preflight; `obstacle` gives the reason")
    left_out = (*skipped, *(() if settings.level == "standard" else _COMPARISONS))
    return ClusterSettings(
        job=job_name(topology, subject.host.hostname, home),
        min_nodes=nodes.min,
        max_nodes=nodes.max + topology.spares,
        deadline_s=settings.wait_timeout,
        places=places_of(subject.job, topology, home, subject.host.hostname),
        salt=secrets.token_hex(8),
        left_out=frozenset(left_out),
        table=thresholds.load_table(settings.reference),
        report_s=node_facts.report_s(subject),
    )


def _collectives(subject: Subject, settings: Settings, left_out: Collection[str]) -> Collectives | None:
    """The child that imports torch, where it may be of use: with too few CPUs, tests by NCCL take too long."""
    gpus = subject.host.gpus.cuda
    if pairs.pairs.id in left_out or not gpus or gpus > subject.host.cpus.usable:
        return None
    command = subject.command
    python = command.python if command is not None and command.python else (sys.executable,)
    return Collectives(python[:1], subject.test_env, ports_of(settings))


def seats_of(cluster: ClusterSettings, own_rank: int) -> list[Endpoint]:
    """Where the job may be at work without node 0; nowhere, where it needs all nodes."""
    others = cluster.places[: cluster.max_nodes if cluster.min_nodes < cluster.max_nodes else 0]
    return [place for rank, place in enumerate(others) if rank not in (0, own_rank)]


def machine_of(subject: Subject) -> str:
    """An identity of this node's machine, the same that `run` gives the coordinator."""
    return machine_name(subject.env, f"{subject.host.hostname}-{subject.topology.node_rank}")


def failing_nodes(findings: Sequence[Finding], machines: Mapping[str, str]) -> str:
    """The nodes that are at fault themselves, one on each line: the host name and its machine.

    Where nodes share a machine, the host name alone tells which of them it is. That a pod is missing, or a name
    does not resolve, says nothing of a machine.
    """
    hosts: dict[str, str] = {}
    for finding in findings:
        if finding.proves_a_fault:
            is_proven = finding.check not in (all_present.id, container_checks.dns.id)
            for host in _HOST.findall(finding.subject):
                hosts[host] = hosts.get(host) or (machines.get(host, "") if is_proven else "")
    shared = {machine for machine, count in Counter(machines.values()).items() if count > 1 and machine}
    return "".join(f"{host}\n" if of in shared else f"{host}\t{of or NO_MACHINE}\n" for host, of in hosts.items())
