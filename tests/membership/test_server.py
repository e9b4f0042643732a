"""Real servers and clients on loopback."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import threading
import time
from queue import Queue

import pytest

from tests.membership.world import World
from tests.waiting import eventually
from trainer_launch.membership import candidates, membership, timeouts
from trainer_launch.membership import client as client_module
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.authentication import NO_SECRET, WRONG_SECRET, Channel
from trainer_launch.membership.client import Client, Connected, Disconnected, inquire
from trainer_launch.membership.server import Coordinator
from trainer_launch.membership.state import CoordinatorSettings, Looked
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.errors import NodeError

LONG_S = 60.0


class Cluster:
    """A server and its nodes; everything is closed at the end."""

    def __init__(self):
        self.said: list[str] = []
        self.open = contextlib.ExitStack()

    def say(self, text, _level):
        self.said.append(text)

    def serve(self, n=3, port=0, secret=None, judges=(), **fields):
        settings = CoordinatorSettings(
            **{"job": "job", "min_nodes": n, "max_nodes": n, "max_restarts": 3, **fields}
        )
        self.server = Coordinator(settings, Endpoint("127.0.0.1", port), secret, self.say, judges=judges)
        self.port = self.server.start()
        self.open.callback(self.server.stop)
        return self.server

    def node(self, rank, host=None, secret=None, job="job", say=lambda text: None, incarnation="a", **more):
        hello = msg.Hello(msg.VERSION, job, rank, host or f"pod-{rank}", f"{rank}-{incarnation}")
        client = Client(Endpoint("localhost", self.port), hello, secret, say, **more)
        self.open.callback(client.close)
        return client

    def join(self, client, rank, after=0, incarnation="a"):
        client.send(msg.Join(f"{rank}-{incarnation}", after))

    def running(self, n=3, **fields):
        self.serve(n, **fields)
        clients = [self.node(rank) for rank in range(n)]
        self.form(clients)
        return clients

    def form(self, clients, after=0):
        for rank, client in enumerate(clients):
            self.join(client, rank, after)
        formed = [await_(client, msg.Formed) for client in clients]
        clients[0].send(msg.Store(formed[0].generation, "127.0.0.1", 4000))
        gone = [await_(client, msg.Go) for client in clients]
        assert {go.generation for go in gone} == {formed[0].generation}
        return formed

    def raw(self):
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        self.open.callback(sock.close)
        return sock


@pytest.fixture
def cluster():
    made = Cluster()
    with made.open:
        yield made
    assert not [t.name for t in threading.enumerate() if t.name.startswith("coordinator")]


def await_(client, kind):
    """The next news of a kind."""
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        news = client.receive(end_s - time.monotonic())
        if isinstance(news, kind):
            return news
    raise AssertionError(f"no {kind.__name__} within {LONG_S} s")


def hear(sock, kind):
    """The next message of a kind on a bare socket."""
    with sock.makefile("rb") as lines:
        for line in lines:
            message = msg.parse(line)
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__}")


def is_closed(sock):
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_three_nodes_meet_run_and_finish(cluster):
    clients = cluster.running(3)
    for client in clients:
        client.send(msg.Done(1))
    for client in clients:
        await_(client, msg.Finished)


def test_a_closed_connection_is_known_at_once(cluster):
    clients = cluster.running(3, lease_s=10 * LONG_S)
    clients[1].close()
    for client in (clients[0], clients[2]):
        assert await_(client, msg.Restart).reason == "node 1 (pod-1) is gone"


def test_a_silent_node_is_lost_with_its_lease(cluster):
    cluster.serve(2, lease_s=0.6)
    zero = cluster.node(0)
    silent = cluster.raw()
    silent.sendall(msg.render(msg.Hello(msg.VERSION, "job", 1, "pod-1", "x")) + msg.render(msg.Join("x")))
    cluster.join(zero, 0)
    await_(zero, msg.Formed)
    assert "was silent for 0.6 s" in await_(zero, msg.Restart).reason
    assert is_closed(silent)


def test_a_coordinator_that_is_frozen_is_away_for_who_waits_for_its_word(cluster, monkeypatch):
    """The kernel takes connections and answers probes for it."""
    monkeypatch.setattr(timeouts, "UNHEARD_S", 0.2)
    server, thaws = cluster.serve(2), threading.Event()
    client = cluster.node(0)
    cluster.join(client, 0)
    await_(client, msg.Waiting)
    server._turn = thaws.wait
    try:
        assert "it answers no question" in await_(client, Disconnected).reason
    finally:
        thaws.set()


def test_a_node_that_has_connected_needs_no_other_descriptor(cluster, monkeypatch):
    """Where there was none, it connected and lost the connection again and again, and gave up never."""
    cluster.serve(1)
    monkeypatch.setattr(selectors, "DefaultSelector", none_left)
    client = cluster.node(0)
    cluster.join(client, 0)
    await_(client, msg.Formed)


def none_left():
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_coordinator_that_only_has_nothing_to_say_is_not_away(cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "UNHEARD_S", 0.05)
    asked: Queue[msg.Message] = Queue()
    monkeypatch.setattr(client_module, "inquire", lambda *where: asked.put(inquire(*where)))
    cluster.serve(2)
    clients = [cluster.node(0)]
    cluster.join(clients[0], 0)
    for _ in range(3):
        asked.get(timeout=LONG_S)
    clients.append(cluster.node(1))
    cluster.join(clients[1], 1)
    heard = []
    while not isinstance(news := clients[0].receive(LONG_S), msg.Formed):
        heard.append(type(news))
    assert Disconnected not in heard


def test_a_node_whose_loop_is_stuck_loses_its_lease_and_is_back_once_it_runs_again(cluster, monkeypatch):
    """Its connection's thread lives on, and must not speak for it."""
    clients = cluster.running(2, lease_s=0.6)
    monkeypatch.setattr(timeouts, "LOOK_S", 0.2)
    monkeypatch.setattr(timeouts, "STUCK_S", 1.0)
    assert "node 1 (pod-1) was silent" in await_(clients[0], msg.Restart).reason
    cluster.join(clients[0], 0, 1)
    assert clients[0].receive(2.0) is None or not cluster.said[-1].startswith("generation 2"), (
        "it does not come back"
    )
    assert await_(clients[1], Disconnected)
    await_(clients[1], Connected)
    cluster.join(clients[1], 1, 1)
    assert await_(clients[0], msg.Formed).generation == 2


def test_a_node_whose_loop_sleeps_is_woken_and_keeps_its_lease(cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "LOOK_S", 0.2)
    monkeypatch.setattr(timeouts, "STUCK_S", 1.0)
    cluster.serve(2, lease_s=0.6)
    woken = threading.Event()
    clients = [cluster.node(0), cluster.node(1, wake=woken.set)]
    cluster.form(clients)
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        woken.wait(5.0)
        woken.clear()
        assert clients[1].receive(0) is None
        assert clients[0].receive(0) is None


def test_a_slow_loris_and_half_open_connections_are_dropped(cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "GREET_S", 0.5)
    clients = cluster.running(2)
    slow = [cluster.raw() for _ in range(20)]
    for sock in slow:
        sock.sendall(b'{"kind":"hel')
    assert all(map(is_closed, slow))
    assert clients[0].receive(0) is None


def test_two_thousand_connects_keep_nobody_out(cluster):
    clients = cluster.running(2, lease_s=1.0)
    crowd = []
    for _ in range(2000):
        sock = socket.socket()
        sock.setblocking(False)
        crowd.append(sock)
        cluster.open.callback(sock.close)
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", cluster.port))
    clients[1].close()
    await_(clients[0], msg.Restart)
    back = cluster.node(1, incarnation="b")
    cluster.join(clients[0], 0, after=1)
    cluster.join(back, 1, incarnation="b")
    assert await_(back, msg.Formed).generation == 2


def test_without_descriptors_the_job_goes_on(cluster):
    clients = cluster.running(2, lease_s=1.0)
    late = cluster.open.enter_context(socket.socket())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):  # until there are none
            while True:
                taken.append(os.dup(late.fileno()))
        late.connect(("127.0.0.1", cluster.port))
        eventually(lambda: any("cannot take it" in text for text in cluster.said), "its complaint")
        assert clients[0].receive(1.5) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    late.settimeout(LONG_S)
    assert hear(late, msg.Challenge)


def test_who_does_not_read_is_dropped(cluster):
    cluster.serve(1, max_restarts=0)
    deaf = cluster.raw()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    say: list[msg.Message] = [msg.Hello(msg.VERSION, "job", 0, "pod-0", "x"), msg.Join("x")]
    say += [msg.Failed(1, 0, 1, None, "\U0001f525" * 2000), *[msg.Join("x", 1)] * 2000]  # each answered by 24 KB
    with contextlib.suppress(ConnectionError):
        deaf.sendall(b"".join(map(msg.render, say)))
    eventually(lambda: any("does not read" in text for text in cluster.said), "dropping it")


def test_the_secret_is_needed(cluster):
    cluster.serve(2, secret=b"right")
    good = cluster.node(0, secret=b"right")
    await_(good, Connected)
    for secret, reason in ((b"wrong", WRONG_SECRET), (None, NO_SECRET)):
        refused = await_(cluster.node(1, secret=secret), msg.Refused)
        assert (refused.reason, refused.retry) == (reason, False)
    strange = cluster.raw()
    hello = msg.Hello(msg.VERSION, "job", 1, "pod-1", "x", proof="\ud800")
    strange.sendall(msg.render(hello))
    assert hear(strange, msg.Refused).reason == WRONG_SECRET
    await_(cluster.node(1, secret=b"right"), Connected)


@pytest.mark.parametrize("secret", [b"right", b"wrong", None])
def test_a_node_of_another_job_is_told_so_whatever_its_secret(cluster, secret):
    cluster.serve(2, secret=b"right")
    stranger = cluster.raw()
    channel = Channel(secret)
    assert channel.challenged(hear(stranger, msg.Challenge).nonce) is None
    stranger.sendall(msg.render(channel.introduced(msg.Hello(msg.VERSION, "other", 1, "pod-1", "x"))))
    line = stranger.makefile("rb").readline()
    refused = msg.parse(channel.check(line) if secret == b"right" else line)
    assert refused == msg.RefusedHere("this coordinator serves job job, not other", retry=False)


def test_a_node_with_a_secret_waits_for_a_coordinator_that_has_it_too(cluster):
    cluster.serve(1)
    says: list[str] = []
    node = cluster.node(0, secret=b"mine", say=says.append)
    eventually(lambda: says, "the node says why it waits")
    assert "has no secret, and this node has one; mount the job's Secret in all pods" in says[0]
    cluster.server.stop()
    cluster.serve(1, port=cluster.port, secret=b"mine")
    await_(node, Connected)


def test_a_coordinator_that_comes_back_goes_on(cluster):
    clients = cluster.running(3)
    cluster.server.stop()
    for client in clients:
        assert isinstance(await_(client, Disconnected), Disconnected)
    cluster.serve(3, port=cluster.port)
    for client in clients:
        await_(client, Connected)
        assert await_(client, msg.Restart).generation == 1
    formed = cluster.form(clients, after=1)
    assert {f.generation for f in formed} == {2}


def test_a_launcher_says_only_once_whom_it_waits_for_and_that_the_coordinator_is_gone(cluster, caplog):
    caplog.set_level("INFO")
    cluster.serve(3)
    says: list[str] = []
    clients = [cluster.node(0), cluster.node(1, say=says.append)]
    for rank, client in enumerate(clients):
        cluster.join(client, rank)
    for client in clients:
        while await_(client, msg.Waiting).present < 2:
            pass
    assert [text for text in cluster.said if "2 of 3 nodes" in text], "the coordinator, in node 0's launcher"
    assert caplog.text.count("2 of 3 nodes are here; missing: node 2") == 1, "node 1"
    cluster.server.stop()
    await_(clients[1], Disconnected)
    assert caplog.text.count("the coordinator is unreachable: the coordinator has closed the connection") == 1
    assert not [text for text in says if "closed the connection" in text]


def test_a_join_that_was_not_answered_is_said_again_to_a_new_coordinator(cluster):
    cluster.serve(2)
    zero = cluster.node(0)
    cluster.join(zero, 0)
    await_(zero, msg.Waiting)
    cluster.server.stop()
    cluster.serve(2, port=cluster.port)
    cluster.join(cluster.node(1), 1)
    assert await_(zero, msg.Formed).size == 2


def test_a_join_that_was_granted_meanwhile_is_not_said(cluster):
    """A new coordinator would take this node for one without workers."""
    clients = cluster.running(2)
    cluster.join(clients[0], 0)
    cluster.server.stop()
    for client in clients:
        await_(client, Disconnected)
    cluster.serve(2, port=cluster.port)
    for client in clients:
        await_(client, msg.Restart)
    status = inquire(Endpoint("127.0.0.1", cluster.port), "job")
    assert isinstance(status, msg.JobStatus)
    assert [word for _, _, word, _ in status.nodes] == ["connected", "connected"]


def test_the_last_word_arrives_although_the_server_stops_at_once(cluster):
    clients = cluster.running(3)
    cluster.server.give_up("told to end")
    cluster.server.stop()
    assert {await_(client, msg.GiveUp).reason for client in clients} == {"told to end"}


def test_a_client_says_at_which_stage_it_waits(cluster):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        cluster.port = unused.getsockname()[1]
    says: list[str] = []
    cluster.node(0, say=says.append)
    eventually(lambda: says, "any words")
    assert says[0].startswith("cannot connect to the coordinator at localhost")
    hello = msg.Hello(msg.VERSION, "job", 0, "pod-0", "a")
    nowhere = Client(Endpoint("no-such-name.invalid", 1), hello, say=says.append)
    eventually(
        lambda: any("no address for no-such-name.invalid yet" in text for text in says), "its wait for a name"
    )
    nowhere.close()
    cluster.serve(1, port=cluster.port)
    eventually(lambda: "connected" in says, "the connection")


def test_a_port_in_use_is_named(cluster):
    cluster.serve(1)
    again = Coordinator(
        CoordinatorSettings(job="j", min_nodes=1, max_nodes=1, max_restarts=0), Endpoint("127.0.0.1", cluster.port)
    )
    with pytest.raises(
        NodeError, match=rf":{cluster.port}: Address already in use by pid \d+ \(.*\); free that port"
    ):
        again.start()


def test_both_families_are_served(cluster):
    settings = CoordinatorSettings(job="job", min_nodes=1, max_nodes=1, max_restarts=0)
    server = Coordinator(settings, Endpoint("", 0), log=cluster.say)
    cluster.port = server.start()
    cluster.open.callback(server.stop)
    assert hear(cluster.raw(), msg.Challenge) == msg.Challenge("")
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError), socket.create_connection(("::1", cluster.port), timeout=LONG_S) as six:
            assert hear(six, msg.Challenge) == msg.Challenge("")


def test_a_defect_of_the_coordinator_ends_the_job_with_a_sentence(cluster, monkeypatch, caplog):
    clients = cluster.running(2)

    def fail(state, peer, message, now_s):
        raise KeyError("peer")

    monkeypatch.setattr(membership, "hear", fail)
    clients[0].send(msg.Done(1))
    for client in clients:
        assert await_(client, msg.GiveUp).reason == "internal error in the coordinator: KeyError: 'peer'"
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_a_defect_of_the_coordinator_ends_a_node_that_comes_to_it_first_or_later(cluster, monkeypatch, secret):
    def fail(state, peer, message, now_s):
        raise KeyError("peer")

    monkeypatch.setattr(membership, "hear", fail)
    cluster.serve(2, secret=secret)
    for rank in (0, 1):
        client = cluster.node(rank, secret=secret)
        assert await_(client, msg.GiveUp).reason == "internal error in the coordinator: KeyError: 'peer'"


def test_a_look_for_other_coordinators_that_fails_is_repeated(monkeypatch, caplog):
    looks, results = iter([OSError(24, "Too many open files")]), Queue[Looked]()

    def look(candidates):
        for problem in looks:
            raise problem
        return frozenset(), frozenset(candidates)

    monkeypatch.setattr(candidates, "look", look)
    monkeypatch.setattr(timeouts, "LOOK_EVERY_S", 0.05)
    watch = candidates.CandidateWatch(Seats(Endpoint("node-0", 29500), "node-#", 0, 3), "job", None, results.put)
    watch.start()
    watch.want(frozenset({2}))
    assert results.get(timeout=LONG_S).absent == {2}
    watch.close()
    assert "cannot look for other coordinators: OSError: [Errno 24] Too many open files" in caplog.text


def test_a_failure_that_was_only_suspected_does_not_change_how_the_job_ended():
    world = World(2, 2, max_restarts=0)
    _, two = world.come(0, 1)
    world.open_store()
    world.say(two, msg.Failed(world.number, 1, 1, None, lost_peer=True))
    world.close("asked to stop")
    world.pass_time(60.0)
    assert world.state.end == msg.GiveUp("asked to stop")
