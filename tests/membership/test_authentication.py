"""Signed connections: someone in between alters lines or poses as the coordinator; launchers of other versions."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz import hostile
from tests.membership.test_server import LONG_S, Cluster, await_
from tests.waiting import eventually
from trainer_launch.diagnosis.stall import STALL, Ranks, StallJudge
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.authentication import (
    WRONG_SECRET,
    Channel,
    SignatureError,
)
from trainer_launch.membership.client import Client, Connected, Disconnected
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError
from trainer_launch.preflight.cluster import preflight_messages
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer
from trainer_launch.preflight.cluster.node_side import NodeLink
from trainer_launch.preflight.cluster.pair_tests import run
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

SECRET = b"right"
Alter = Callable[[bytes], "list[bytes]"]


class Middle:
    """Passes the lines of connections to a port on; `say` and `hear` alter those of the client and the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.say: Alter = lambda line: [line]
        self.hear: Alter = lambda line: [line]
        self.said: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *self._threads):
            thread.join(10)
        self._listener.close()

    def once(self, kind: bytes, altered: Alter) -> tuple[Alter, threading.Event]:
        """Alter the first line of this kind only."""
        done = threading.Event()

        def alter(line: bytes) -> list[bytes]:
            if done.is_set() or b'"kind":"%s"' % kind not in line:
                return [line]
            done.set()
            return altered(line)

        return alter, done

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._between, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _between(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as far:
            back = threading.Thread(target=self._pass, args=(far, near, False), daemon=True)
            back.start()
            self._pass(near, far, True)
            back.join(10)

    def _pass(self, source: socket.socket, sink: socket.socket, is_said: bool) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as lines:
            for line in lines:
                if is_said:
                    self.said.append(line)
                sink.sendall(b"".join((self.say if is_said else self.hear)(line)))
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    with made.open:
        yield made


@pytest.fixture
def middle(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Middle:
    """Between node 1 and the coordinator of a job of two nodes that runs.

    The nodes often say something, and have a lease that a busy machine does not miss.
    """
    cluster.serve(2, secret=SECRET, judges=[StallJudge()], lease_s=LONG_S)
    monkeypatch.setattr(timeouts, "RENEWALS", 3 * LONG_S)
    made = Middle(cluster.port)
    cluster.open.callback(made.close)
    return made


@pytest.fixture
def nodes(cluster: Cluster, middle: Middle) -> list[Client]:
    clients = [cluster.node(0, secret=SECRET), client(cluster, middle.at)]
    cluster.form(clients)
    return clients


def client(cluster: Cluster, at: Endpoint, secret: bytes = SECRET, say=lambda text: None) -> Client:
    made = Client(at, msg.Hello(msg.VERSION, "job", 1, "pod-1", "1-a"), secret, say)
    cluster.open.callback(made.close)
    return made


def changed(line: bytes) -> list[bytes]:
    return [line.replace(b'"', b"'", 1)]


ALTERATIONS = {"changed": changed, "repeated": lambda line: [line, line], "dropped": lambda line: []}
every_way = pytest.mark.parametrize("altered", ALTERATIONS.values(), ids=list(ALTERATIONS))


@every_way
def test_what_a_node_says_after_the_join_cannot_be_altered_and_the_job_goes_on(
    cluster: Cluster, middle: Middle, nodes: list[Client], altered: Alter
) -> None:
    middle.say, done = middle.once(b"renew", altered)
    assert done.wait(30)
    eventually(lambda: any("its signature is wrong" in text for text in cluster.said), "the coordinator says so")
    await_(nodes[1], Disconnected)
    await_(nodes[1], Connected)
    for node in nodes:  # nothing restarts, as with any connection that is reset
        node.send(msg.Done(1))
    for node in nodes:
        await_(node, msg.Finished)


@every_way
def test_what_the_coordinator_says_cannot_be_altered_and_the_node_says_so(
    cluster: Cluster, middle: Middle, nodes: list[Client], altered: Alter
) -> None:
    middle.hear, done = middle.once(b"showranks", altered)
    nodes[0].send(msg.Note(1, STALL, Ranks((), 1, limit_s=5.0)))
    assert done.wait(30)
    if not altered(b""):  # a line that was left out is noticed with the next one
        nodes[0].send(msg.Failed(1, 0, 1, None))
    lost = await_(nodes[1], Disconnected)
    assert lost.reason == (
        "lost the coordinator: a message was changed, repeated or lost on the way: its signature is wrong"
    )
    await_(nodes[1], Connected)


def test_who_sits_between_cannot_change_who_a_node_says_that_it_is(cluster: Cluster) -> None:
    cluster.serve(2, secret=SECRET)
    middle = Middle(cluster.port)
    cluster.open.callback(middle.close)
    middle.say = lambda line: [line.replace(b'"node_rank":1', b'"node_rank":0')]
    refused = await_(client(cluster, middle.at), msg.Refused)
    assert refused.reason == WRONG_SECRET


def test_a_recorded_connection_lets_nobody_in_again(cluster: Cluster, middle: Middle, nodes: list[Client]) -> None:
    assert answer(cluster.port, middle.said[0]) == msg.Refused(WRONG_SECRET, retry=False)
    assert not {Disconnected, msg.Restart} & {type(news) for news in iter(lambda: nodes[1].receive(0.2), None)}


IMPOSTORS = {
    "says what it likes": b'{"kind":"giveup","reason":"no","node":null,"rank":null,"exit_code":null,"signal":null,'
    b'"message":null,"cause":null,"seen":""}\n',
    "refuses": msg.render(msg.Refused("go away", retry=False)),
    "signs with another key": b"0" * 32 + b" " + msg.render(msg.Welcome(3.0)),
    "is no program of ours": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("words", IMPOSTORS.values(), ids=list(IMPOSTORS))
def test_who_poses_as_the_coordinator_of_a_running_job_is_named_and_not_believed(
    cluster: Cluster, middle: Middle, nodes: list[Client], words: bytes
) -> None:
    says: list[str] = []
    nodes[1]._say = says.append
    impostor, heard = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def pose() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = impostor.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(msg.render(msg.Challenge(f"signed:{os.urandom(16).hex()}")))
                    sock.recv(65536)
                    sock.sendall(words)
                    heard.set()
                    sock.recv(65536)

    thread = threading.Thread(target=pose, daemon=True)
    thread.start()
    middle.port, port = impostor.getsockname()[1], middle.port
    middle.say, _ = middle.once(b"renew", changed)  # so that the node comes again
    await_(nodes[1], Disconnected)
    assert heard.wait(30)
    sentence = "what answers as the coordinator at 127.0.0.1:"
    eventually(lambda: any(text.startswith(sentence) for text in says), lambda: f"the node says so: {says}")
    assert any("does not know the job's secret" in text for text in says)
    middle.port = port
    impostor.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    impostor.close()
    await_(nodes[1], Connected)


def test_a_node_with_another_secret_is_told_so_and_so_is_the_log(cluster: Cluster) -> None:
    cluster.serve(2, secret=SECRET)
    says: list[str] = []
    node = client(cluster, Endpoint("127.0.0.1", cluster.port), b"wrong", says.append)
    assert await_(node, msg.Refused).reason == WRONG_SECRET
    assert says == ["refused by the coordinator: its secret differs from the job's"]
    eventually(lambda: any(WRONG_SECRET in text for text in cluster.said), "the coordinator says so, too")


def test_a_cluster_preflight_that_somebody_interferes_with_ends_with_its_verdict() -> None:
    with contextlib.ExitStack() as undo:
        server = PreflightServer(
            ClusterSettings(job="job", min_nodes=2, max_nodes=2, deadline_s=60.0, places=(HERE,), salt="s"),
            Endpoint("127.0.0.1", 0),
            SECRET,
        )
        port = server.start()
        undo.callback(server.stop)
        middle = Middle(port)
        undo.callback(middle.close)
        middle.say, done = middle.once(b"nodereport", changed)
        ends = (Endpoint("127.0.0.1", port), middle.at)
        links = [link(undo, rank, at) for rank, at in enumerate(ends)]
        threads = [threading.Thread(target=takes_part, args=(one,)) for one in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert done.is_set()
        assert all(one.is_decided for one in links)


HERE = Endpoint("127.0.0.1", 1)


class _Link(NodeLink):
    is_decided = False


def link(undo: contextlib.ExitStack, rank: int, at: Endpoint) -> _Link:
    said = preflight_messages.Hello(preflight_messages.VERSION, "job", rank, f"host-{rank}", f"i{rank}")
    made = _Link(at, said, deadline_s=60.0, port=None, secret=SECRET, bench=run)
    undo.callback(made.close)
    return made


def takes_part(one: _Link) -> None:
    while not isinstance(news := one.receive(60.0), preflight_messages.Decided | None):
        if isinstance(news, preflight_messages.Complete):
            one.send(preflight_messages.NodeReport({"torch": "2"}, *one.offset))
    one.is_decided = news is not None and all(finding.fault is None for finding in news.findings)


# -- one end of a connection ---------------------------------------------------------------------


def ends() -> tuple[Channel, Channel]:
    server, node = Channel(SECRET), Channel(SECRET)
    node.challenged(server.challenge())
    assert server.admits(node.introduced(msg.Hello(msg.VERSION, "job", 1, "pod-1", "x")))
    return server, node


def test_lines_of_both_directions_are_signed_apart_and_in_their_order() -> None:
    server, node = ends()
    lines = [node.sign(b"{}\n") for _ in range(3)]
    assert len(set(lines)) == 3
    assert [server.check(line.rstrip()) for line in lines] == [b"{}"] * 3
    reflected = node.sign(b"{}\n")
    with pytest.raises(SignatureError):
        node.check(reflected.rstrip())


@pytest.mark.parametrize("proof", [None, "", ":", "ab:", ":ab", "\ud800:\ud800", "a" * 2000, '","":'])
def test_no_text_is_a_proof_but_the_right_one(proof: str | None) -> None:
    server = Channel(SECRET)
    server.challenge()
    hello = msg.Hello(msg.VERSION, "job", 1, "pod-1", "x", proof=proof)
    assert not server.admits(hello)


# -- launchers of earlier versions ------------------------------------------------------------------


def answer(port: int, *lines: bytes) -> msg.Message:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"".join(lines))
        return preflight_messages.parse(sock.makefile("rb").readlines()[-1])  # type: ignore[return-value]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["without a secret", "with a secret"])
def test_a_node_of_0_2_is_refused_in_a_sentence_although_its_hello_has_other_fields(
    cluster: Cluster, secret: bytes | None
) -> None:
    cluster.serve(2, secret=secret)
    told = answer(cluster.port, Path(__file__).with_name("hello_of_0_2.json").read_bytes())
    assert isinstance(told, msg.Refused)
    assert f"uses protocol version {msg.VERSION}, this node 6; install the same" in told.reason


def test_a_coordinator_of_0_1_does_not_get_a_node_that_has_a_secret(cluster: Cluster) -> None:
    says: list[str] = []
    with hostile.server(lambda sock: sock.sendall(msg.render(msg.Challenge("ab")))) as port:
        client(cluster, Endpoint("127.0.0.1", port), say=says.append)
        eventually(lambda: says, "the node says why")
    assert "has trainer-launch 0.1, which signs no messages, and this node has" in says[0]


def test_only_a_signed_challenge_is_answered_where_there_is_a_secret() -> None:
    for nonce in ("", "ab", "\ud800"):
        assert Channel(SECRET).challenged(nonce) is not None


def test_who_asks_for_the_status_believes_only_who_has_the_secret(cluster: Cluster) -> None:
    from trainer_launch.membership.candidates import ask

    cluster.serve(2, secret=SECRET)
    middle = Middle(cluster.port)
    cluster.open.callback(middle.close)
    assert ask(middle.at, "job", SECRET).phase == "gathering"
    middle.hear = lambda line: [line.replace(b"gathering", b"running")]
    with pytest.raises(NodeError, match="does not know the job's secret"):
        ask(middle.at, "job", SECRET)
