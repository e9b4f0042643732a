"""The cluster preflight over real sockets, all nodes in this process: connections, clocks and ports."""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.ports import free_port
from tests.preflight.world import subject
from tests.waiting import eventually
from trainer_launch.host import network
from trainer_launch.host.network import allow_connections, spare_files
from trainer_launch.membership import candidates
from trainer_launch.membership import protocol as coordinating
from trainer_launch.membership.client import Client
from trainer_launch.membership.client import Disconnected as RunDisconnected
from trainer_launch.membership.server import Coordinator as Coordinator
from trainer_launch.membership.state import CoordinatorSettings as Coordinating
from trainer_launch.model import Endpoint, Gpus, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.settings import Settings
from trainer_launch.preflight.cluster import node_side as meeting
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer
from trainer_launch.preflight.cluster.node_side import Gathering, NodeLink
from trainer_launch.preflight.cluster.pair_tests import Listener
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

JOB = "job"
LATEST_S = 30.0


def well(test: msg.Test, listener: Listener) -> msg.Result:
    return msg.Result(test.round, (msg.RailResult("", 10**9),) * test.rails)


class Job:
    """A job whose node 0 listens on a free port."""

    def __init__(self, nodes: int, deadline_s: float = 20.0, secret: bytes | None = None) -> None:
        self.port = free_port()
        self.home = Endpoint("127.0.0.1", self.port)
        self.settings = ClusterSettings(
            job=JOB, min_nodes=nodes, max_nodes=nodes, deadline_s=deadline_s, places=(self.home,), salt="s"
        )
        self.deadline_s = deadline_s
        self.secret = secret
        self.undo = contextlib.ExitStack()

    def hold(self) -> PreflightServer:
        server = PreflightServer(self.settings, Endpoint("", self.port), self.secret)
        server.start()
        self.undo.callback(server.stop)
        return server

    def call(
        self,
        rank: int,
        *,
        clock: Callable[[], float] = time.time,
        bench: Callable[[msg.Test, Listener], msg.Result] = well,
        secret: bytes | None = None,
        deadline_s: float | None = None,
    ) -> NodeLink:
        said = msg.Hello(msg.VERSION, JOB, rank, f"host-{rank}", secrets.token_hex(8))
        caller = NodeLink(
            self.home,
            said,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            port=None,
            secret=secret or self.secret,
            clock=clock,
            bench=bench,
        )
        self.undo.callback(caller.close)
        return caller


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as undo:

        def made(*args: object, **kwargs: object) -> Job:
            one = Job(*args, **kwargs)  # type: ignore[arg-type]
            undo.callback(one.undo.close)
            return one

        yield made


def verdict(caller: NodeLink, facts: dict[str, str] | None = None) -> tuple[Finding, ...]:
    """Take part as the command does, to the end."""
    until_s = time.monotonic() + LATEST_S
    while time.monotonic() < until_s:
        news = caller.receive(until_s - time.monotonic())
        if isinstance(news, msg.Decided):
            return news.findings
        if isinstance(news, msg.Complete):
            caller.send(msg.NodeReport(facts or {"torch": "2"}, *caller.offset))
    raise AssertionError("no verdict came")


def verdicts(*callers: NodeLink) -> list[tuple[Finding, ...]]:
    found: dict[int, tuple[Finding, ...]] = {}
    threads = [
        threading.Thread(target=lambda n=n, c=c: found.update({n: verdict(c)})) for n, c in enumerate(callers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATEST_S)
    return [found[number] for number in range(len(callers))]


def failed(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.status is Status.FAIL]


def test_all_nodes_meet_and_are_told_the_same(job: Callable[..., Job]) -> None:
    one = job(4)
    one.hold()
    told = verdicts(*(one.call(rank) for rank in range(4)))
    assert len(set(told)) == 1
    assert {finding.status for finding in told[0]} == {Status.PASS}


def test_the_port_is_free_at_once_after_each_end(job: Callable[..., Job]) -> None:
    one = job(2)
    for _ in range(2):
        server = one.hold()
        callers = [one.call(0), one.call(1)]
        verdicts(*callers)
        server.stop()
        for caller in callers:
            caller.close()
        assert free_port_is(one.port)
    server = one.hold()
    waiting = one.call(0)
    assert waiting.receive(5) is not None
    server.stop()  # in the middle
    waiting.close()
    assert free_port_is(one.port)


def free_port_is(port: int) -> bool:
    with socket.create_server(("", port)):
        return True


def test_a_mistake_of_this_program_is_told_as_one_and_blames_no_node(job: Callable[..., Job]) -> None:
    one = job(2)
    server = one.hold()
    hear = server.preflight.hear

    def stumble(peer: int, address: str, message: msg.Message, now_s: float) -> None:
        if isinstance(message, msg.NodeReport):
            raise IndexError("list index out of range")
        hear(peer, address, message, now_s)

    server.preflight.hear = stumble  # type: ignore[method-assign]
    callers = [one.call(rank) for rank in range(2)]
    for (found,) in verdicts(*callers):
        assert (found.status, found.subject) == (Status.UNKNOWN, "")
        assert "IndexError: list index out of range" in found.text
    assert server.preflight.findings


def test_room_is_made_for_a_large_job_as_far_as_the_hard_limit_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert allow_connections(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        assert allow_connections(1500)
        assert spare_files() >= 1500
        assert not allow_connections(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_a_port_range_a_node_listens_on_no_port_beside_it_and_says_so_when_there_is_none() -> None:
    low = free_port()
    among = PortRange(low, low)
    listener = Listener(None, among)
    try:
        assert listener.port == low
        with pytest.raises(NodeError, match=f"port {low} is taken on this node"):
            Listener(None, among)
    finally:
        listener.close()


def test_when_node_0_ends_in_the_middle_the_others_say_so(job: Callable[..., Job]) -> None:
    one = job(3, deadline_s=4.0)
    server = one.hold()
    callers = [one.call(1), one.call(2, deadline_s=2.0)]
    for caller in callers:
        assert isinstance(caller.receive(5), msg.PreflightWaiting)
    server.stop()
    for findings in verdicts(*callers):
        [found] = failed(findings)
        assert found.text.endswith("Connection refused")


def test_a_node_without_the_secret_is_refused_and_the_others_miss_it(job: Callable[..., Job]) -> None:
    one = job(2, deadline_s=2.0, secret=b"right")
    one.hold()
    stranger, member = one.call(1, secret=b"wrong"), one.call(0)
    told = verdicts(stranger, member)
    assert "its secret differs from the job's" in failed(told[0])[0].text
    assert failed(told[1])


@pytest.mark.parametrize("is_right_in_time", [True, False])
def test_a_name_that_still_leads_to_another_jobs_pod_ends_nothing_until_it_leads_home(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, is_right_in_time: bool
) -> None:
    """A cache of DNS gives the address of a pod that is gone, and another job's node 0 has got it."""
    resolve = socket.getaddrinfo

    def cached(host: str, *args: object, **kwargs: object) -> object:
        return resolve("127.0.0.1" if host == "node-0.cached" else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", cached)
    one = job(1, deadline_s=60.0 if is_right_in_time else 5.0)
    one.home = Endpoint("node-0.cached", one.port)
    right, one.settings = one.settings, replace(one.settings, job="another", deadline_s=60.0)
    other = one.hold()
    caller = one.call(0)
    assert eventually(lambda: "not job" in caller.stage and caller.stage, "it is refused")
    if is_right_in_time:
        other.stop()
        one.settings = right
        one.hold()
    (found, *_) = verdict(caller)
    assert found.fault is (None if is_right_in_time else Fault.JOB), found.text
    assert ("this is the preflight of job another" in found.text) is not is_right_in_time


def test_a_skewed_clock_is_measured_and_named(job: Callable[..., Job]) -> None:
    one = job(4)
    one.hold()
    callers = [one.call(rank) for rank in range(3)]
    told = verdicts(*callers, one.call(3, clock=lambda: time.time() + 45))
    (found,) = failed(told[0])
    assert (found.check, found.subject) == ("clock", "node 3 (host-3)")
    assert found.measured == pytest.approx(45, abs=0.5)
    assert "ahead" in found.text


def test_a_pod_that_is_made_again_finds_its_job_at_work_and_passes(job: Callable[..., Job]) -> None:
    one = job(2)
    settings = Coordinating(job=JOB, min_nodes=2, max_nodes=2, max_restarts=0)
    said: list[str] = []
    coordinator = Coordinator(settings, Endpoint("", one.port), log=lambda text, level: said.append(text))
    coordinator.start()
    one.undo.callback(coordinator.stop)
    (findings,) = verdicts(one.call(1))
    assert [finding.status for finding in findings] == [Status.PASS]
    assert "already running" in findings[0].text
    assert said == []


def test_a_question_for_the_status_during_the_preflight_is_answered_and_not_complained_about(
    job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = job(2)
    one.hold()
    with pytest.raises(NodeError, match="node 0 is still in preflight"):
        candidates.ask(one.home, JOB)
    assert "dropped a connection" not in caplog.text


def test_node_0_made_again_passes_when_the_others_are_at_work_and_they_go_on_trying(
    job: Callable[..., Job],
) -> None:
    one = job(2)
    one.hold()
    hello = coordinating.Hello(coordinating.VERSION, JOB, 1, "host-1", "x", generation=3)
    client = Client(one.home, hello)
    one.undo.callback(client.close)
    (findings,) = verdicts(one.call(0))
    assert [finding.status for finding in findings] == [Status.PASS]
    assert not isinstance(client.receive(0.2), coordinating.Refused | RunDisconnected)


def test_a_resolver_that_hangs_holds_up_no_verdict(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hangs(*args: object, **kwargs: object) -> object:
        answers.wait(LATEST_S)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    one = job(2, deadline_s=1.5)
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    began_s = time.monotonic()
    (findings,) = verdicts(one.call(1))
    took_s = time.monotonic() - began_s
    answers.set()
    assert took_s < LATEST_S / 3
    assert "the resolver did not answer in time" in findings[0].text


def test_a_node_whose_own_part_hangs_says_so_after_the_deadline(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_SILENCE_S", 0.2)
    monkeypatch.setattr(meeting, "_LATE_S", 0.1)
    released = threading.Event()
    monkeypatch.setattr(NodeLink, "_use_connection", lambda caller: released.wait(LATEST_S))
    caller = job(2, deadline_s=0.5).call(1)
    caller.hurry()
    assert caller.receive(0.01) is None  # not before the deadline

    def hurried() -> object:
        caller.hurry()
        return caller.receive(0.01)

    news = eventually(hurried, "the verdict")
    released.set()
    assert isinstance(news, msg.Decided)
    assert "host-1 could not ask node 0 within" in news.findings[0].text


@pytest.mark.parametrize(
    ("resolves_to", "address", "dialed"),
    [
        pytest.param(["10.0.0.7", "fd00::7"], "10.0.0.7", "10.0.0.7", id="its name leads there"),
        pytest.param(["10.9.9.9"], "10.0.0.7", "node-1", id="its name leads elsewhere, as the job will"),
        pytest.param([], "10.0.0.7", "10.0.0.7", id="its name leads nowhere"),
        pytest.param([], "", "node-1", id="nobody has seen it"),
    ],
)
def test_a_pair_test_goes_by_name_unless_the_name_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, resolves_to: list[str], address: str, dialed: str
) -> None:
    def lookup(*args: object, **kwargs: object) -> object:
        if not resolves_to:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(0, 0, 0, "", (found, 1)) for found in resolves_to]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    test = msg.Test(0, 1, "node-1", 1, "t", 1.0, address=address)
    assert meeting._findable(test).host == dialed
    assert meeting._findable(replace(test, rank=0)).host == "node-1", "who listens asks nobody"


@pytest.mark.parametrize("may_share", [True, False])
def test_a_node_on_its_hosts_network_leaves_the_port_to_node_0_that_may_be_there(
    may_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(network, "may_share", lambda host: may_share)
    on_cpus = subject(
        host={"gpus": Gpus(count=0, reason="none")}, topology={"coordinator": Endpoint("job-node-0-0.job", port)}
    )
    with Gathering(on_cpus, Settings({}), ()).undo:
        if may_share:
            assert free_port_is(port)
        else:
            with pytest.raises(OSError, match="Address already in use"):
                free_port_is(port)
