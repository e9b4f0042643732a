"""A node's part in the cluster preflight: report, test pairs, receive the verdict. Node 0 holds it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from trainer_launch import contracts
from trainer_launch.host.files import read_secret
from trainer_launch.host.machine import machine_name
from trainer_launch.membership.quarantine import NO_MACHINE
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError
from trainer_launch.model.findings import Finding, Scope
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import counted
from trainer_launch.planning.task import ports_of
from trainer_launch.planning.torch import job_name
from trainer_launch.preflight import container_checks, registry, thresholds
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import node_facts, pairs, present_nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer
from trainer_launch.preflight.cluster.node_link import ClusterVerdict, NodeLink, look_out
from trainer_launch.preflight.cluster.pair_tests import Collectives, bench
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings, label, names_of

_COMPARISONS = (node_facts.FACTS, node_facts.CLOCK, pairs.NAME)
_PORT_S = 3.0  # for the port to become free
_SAY_AGAIN_S = 10.0
_POLL_S = 2.0
_HOST = re.compile(r"node [0-9]+ \(([^()]+)\)")
_SINGLE_NODE = "the job has one node"
_UNKNOWN_PLACE = "the number of nodes, the node rank or the address of node 0 is unknown"
_HIDDEN = "this operator publishes no DNS names for init containers; elsewhere, request it with --level"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # a variable of every pod
_log = logging.getLogger(__name__)


def obstacle(subject: Subject, settings: Settings, chosen: Collection[str], skipped: Collection[str]) -> str | None:
    """Why there is no cluster preflight; None: there is one."""
    topology = subject.topology
    if settings.level == "container":
        return "--level container checks this container only"
    if present_nodes.NAME in skipped or (chosen and not set(chosen) & set(registry.ids(Where.CLUSTER))):
        return "deselected with --only or --policy"
    if topology.pods == 1:
        return _SINGLE_NODE
    if topology.nodes is None or topology.node_rank is None or topology.coordinator is None:
        return _UNKNOWN_PLACE
    if subject.job.engine not in (None, "torchrun", "plain"):
        return "the nodes of this job do not connect to node 0"
    if subject.job.contract in container_checks.HIDING and "level" not in settings.model_fields_set:
        return _HIDDEN
    return None


def alone(subject: Subject, settings: Settings, obstacle: str) -> list[Finding]:
    """Findings about a preflight without other nodes: a warning where the job may have some all the same."""
    is_assumed = subject.job.contract == contracts.UNKNOWN.name and _IN_KUBERNETES in subject.env
    if obstacle == _SINGLE_NODE and is_assumed and "nodes" not in settings.model_fields_set:
        obstacle = "no platform's variables are set in this container, so the job was taken for one node"
    elif obstacle not in (_UNKNOWN_PLACE, _HIDDEN):
        return [present_nodes.all_present.skipped(obstacle)] if subject.has_peers else []
    text = f"this node was checked alone, and compared with no other: {obstacle}"
    if obstacle == _HIDDEN:
        return [present_nodes.all_present.unknown(text, scope=Scope.JOB)]
    action = "name this init container in envInjection.targets of the runtime; for a job of one node, set --nodes 1"
    return [present_nodes.all_present.warned(text, scope=Scope.JOB, action=action)]


class Gathering:
    """A node's part, while it goes on; `undo` ends it. `server` is node 0's, and its verdict is whole."""

    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        cluster: ClusterSettings,
        server: PreflightServer | None,
        undo: contextlib.ExitStack,
    ) -> None:
        rank, home, hostname = subject.topology.node_rank or 0, cluster.names.home, subject.host.hostname
        self.own, self.home = label(rank, hostname), label(0, home.host)  # for people
        self.server = server
        self._subject = subject
        self._secret = _secret(subject)
        self._collectives = _collectives(subject, settings, cluster.left_out)
        if self._collectives is not None:
            undo.callback(self._collectives.close)
        incarnation = secrets.token_hex(8)
        self.link = NodeLink(
            home if server is None else Endpoint("localhost", home.port),
            msg.Hello(msg.VERSION, cluster.job, rank, hostname, incarnation, machine=machine_of(subject)),
            deadline_s=settings.wait_timeout,
            port=None if server is not None or home.host.startswith("127.") else home.port,
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

    def finish(self, findings: Sequence[Finding]) -> ClusterVerdict:
        """Wait for all nodes, report this node's own `findings` and what it is; what was decided for all.

        The findings are told at once, too: all end with one verdict, also when some nodes never come.
        """
        self.link.send(msg.NodeReport(findings=node_facts.loud(findings), is_early=True))
        logged_s = -_SAY_AGAIN_S
        while True:
            match self.link.receive(_POLL_S):
                case None:
                    self.link.hurry()
                case ClusterVerdict() as verdict:
                    return verdict
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


@contextlib.contextmanager
def gathering(subject: Subject, settings: Settings, skipped: Collection[str]) -> Iterator[Gathering | NodeError]:
    """Take part until the block ends; a NodeError instead where the port for it cannot be opened.

    Raises:
        UsageError: the job's secret or --reference make no sense.
    """
    cluster = _cluster_settings(subject, settings, skipped)
    server = None
    with contextlib.ExitStack() as undo:
        if subject.topology.is_coordinator:
            server = PreflightServer(cluster, Endpoint("", cluster.names.home.port), _secret(subject))
            try:
                _start(server)
            except NodeError as problem:
                yield problem
                return
            undo.callback(server.stop)
        yield Gathering(subject, settings, cluster, server, undo)


def _secret(subject: Subject) -> bytes | None:
    return read_secret(path) if (path := subject.job.secret_file) else None


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
        names=names_of(subject.job, topology, home, subject.host.hostname),
        salt=secrets.token_hex(8),
        left_out=frozenset(left_out),
        table=thresholds.load_table(settings.reference),
        report_s=node_facts.report_s(subject),
    )


def _collectives(subject: Subject, settings: Settings, left_out: Collection[str]) -> Collectives | None:
    """The child that imports torch, where it may be of use: with too few CPUs, tests by NCCL take too long."""
    gpus = subject.host.gpus.cuda
    if pairs.NAME in left_out or not gpus or gpus > subject.host.cpus.usable:
        return None
    command = subject.command
    python = command.python if command is not None and command.python else (sys.executable,)
    return Collectives(python[:1], subject.test_env, ports_of(settings))


def _start(server: PreflightServer) -> None:
    """With hostNetwork another node of the job may hold the port, until it sees that node 0 is here."""
    until_s = time.monotonic() + _PORT_S
    while True:
        try:
            server.start()
            return
        except NodeError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(0.1)


def seats_of(cluster: ClusterSettings, own_rank: int) -> list[Endpoint]:
    """Where the job may be at work without node 0; nowhere, where it needs all nodes."""
    others = range(1, cluster.max_nodes if cluster.min_nodes < cluster.max_nodes else 1)
    places = [cluster.names.place(rank) for rank in others if rank != own_rank]
    return [place for place in places if place is not None]


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
            is_proven = finding.check not in (present_nodes.NAME, container_checks.dns.id)
            for host in _HOST.findall(finding.subject):
                hosts[host] = hosts.get(host) or (machines.get(host, "") if is_proven else "")
    shared = {machine for machine, count in Counter(machines.values()).items() if count > 1 and machine}
    return "".join(f"{host}\n" if of in shared else f"{host}\t{of or NO_MACHINE}\n" for host, of in hosts.items())
