"""Other seats on real sockets: who is there, who certainly is not, and how a connection ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from tests.ports import free_port
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.candidates import CandidateWatch, look
from trainer_launch.membership.client import Client, Connected, inquire
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.server import Coordinator, serve
from trainer_launch.membership.state import CoordinatorSettings, Looked
from trainer_launch.model import Endpoint, Hosting, NodeRange, Seats
from trainer_launch.model.errors import NodeError
from trainer_launch.observability import event_log
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer as RollCall
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings as Calling

JOB = "job"


@contextlib.contextmanager
def seat(rank: int, address: str, port: int = 0) -> Iterator[tuple[Coordinator, int]]:
    settings = CoordinatorSettings(job=JOB, min_nodes=1, max_nodes=3, max_restarts=3, candidate=rank)
    server = Coordinator(settings, Endpoint(address, port), log=lambda text, level: None)
    port = server.start()
    try:
        yield server, port
    finally:
        server.stop()


def test_a_launcher_is_there_when_it_says_so_and_absent_when_its_kernel_does() -> None:
    with seat(0, "127.0.0.1") as (_, port), socket.create_server(("127.0.0.1", 0)) as silent:
        there, absent = look(
            {
                0: Endpoint("127.0.0.1", port),
                1: Endpoint("127.0.0.1", silent.getsockname()[1]),
                2: Endpoint("127.0.0.1", free_port()),
                3: Endpoint("no-such-name.invalid", port),
            }
        )
    assert there == {0}
    assert 1 not in absent, "silence tells nothing"
    assert 2 in absent


def test_a_look_takes_in_every_node_of_a_job_of_any_size() -> None:
    results: Queue[Looked] = Queue()
    watch = CandidateWatch(Seats(Endpoint("127.0.0.2", free_port()), "127.0.0.3", 0, 600), JOB, None, results.put)
    watch.start()
    try:
        watch.want(frozenset(range(600)))
        assert results.get(timeout=30).absent == set(range(600))
    finally:
        watch.close()


def test_many_slow_names_make_no_long_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(host: str, *args: object, **kwargs: object) -> None:
        time.sleep(0.08)
        raise socket.gaierror(socket.EAI_NONAME, f"no {host}")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    began_s = time.monotonic()
    there, absent = look({rank: Endpoint(f"pod-{rank}", 1) for rank in range(250)})
    assert (there, absent) == (frozenset(), frozenset(range(250)))
    assert time.monotonic() - began_s < timeouts.LOOK_GAP_S / 2


def test_a_question_has_its_answer_in_time_also_where_the_resolver_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(60) and [])
    try:
        with pytest.raises(NodeError, match="the resolver did not answer in time"):
            inquire(Endpoint("node-0.job", 29500), JOB, timeout_s=0.05)
    finally:
        release.set()


def test_a_name_without_an_answer_in_time_is_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hanging(host: str, *args: object, **kwargs: object) -> None:
        assert host != "hanging" or release.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, f"no {host}")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(timeouts, "LOOK_NAMES_S", 0.5)
    try:
        _, absent = look({1: Endpoint("hanging", 1), 2: Endpoint("absent", 1)})
        assert absent == {2}
    finally:
        release.set()


@pytest.mark.parametrize("is_preflight", [True, False])
def test_a_standby_gives_way_to_node_0s_coordinator_and_not_to_its_preflight(is_preflight: bool) -> None:
    """Both begin with a Challenge; who is in preflight takes no nodes yet."""
    port = free_port()
    home = Endpoint("127.0.0.2", port)
    results: Queue[Looked] = Queue()
    watch = CandidateWatch(Seats(home, "127.0.0.#", 2, 3), JOB, None, results.put)
    watch.start()
    calling = Calling(job=JOB, min_nodes=1, max_nodes=3, deadline_s=60, places=(home,), salt="s")
    try:
        with contextlib.ExitStack() as undo:
            if is_preflight:
                present_nodes = RollCall(calling, home)
                present_nodes.start()
                undo.callback(present_nodes.stop)
            else:
                undo.enter_context(seat(0, home.host, port))
            watch.want(frozenset({0}))
            looked = results.get(timeout=10)
            assert looked.there == (set() if is_preflight else {0})
            assert looked.ready is is_preflight, "a coordinator without its own node takes nobody who trains"
    finally:
        watch.close()


def test_a_standby_takes_only_who_has_been_in_a_generation() -> None:
    claim = Claim(1, 0, "0-2", sure=True)
    with seat(1, "127.0.0.1") as (_, port):
        for claims, kind in (((), msg.Refused), ((claim,), msg.Welcome)):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                lines = sock.makefile("rb")
                assert isinstance(msg.parse(lines.readline()), msg.Challenge)
                hello = msg.Hello(msg.VERSION, JOB, 1, "pod-1", "i", 1, claims=claims)
                sock.sendall(msg.render(hello))
                assert isinstance(msg.parse(lines.readline()), kind)


def test_a_standby_without_its_port_is_no_reason_not_to_run() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        hosting = Hosting(
            job=JOB, host="", port=port, nodes=NodeRange(1, 3), max_restarts=3, rejoin_timeout_s=60.0, seat=1
        )
        with serve(hosting, None) as server:
            assert server is None


@pytest.mark.parametrize(("said_last", "end"), [(b"garbage\n", "reset"), (b"", "closed")])
def test_who_goes_elsewhere_resets_its_connection_and_only_a_process_that_ends_closes_it(said_last, end) -> None:
    """The coordinator takes an orderly end for the end of the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = Client(Endpoint("127.0.0.1", port), msg.Hello(msg.VERSION, JOB, 0, "pod-0", "i"))
        sock, _ = server.accept()
        server.close()
        with sock:
            sock.settimeout(5)
            sock.sendall(msg.render(msg.Challenge("")))
            sock.recv(65536)
            sock.sendall(msg.render(msg.Welcome(3.0)) + said_last)
            if not said_last:
                assert isinstance(client.receive(5), Connected)
                client.close()
            assert ended(sock) == end
        client.close()


def ended(sock: socket.socket) -> str:
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return "reset"
    return "closed"


def test_a_node_finds_a_coordinator_however_many_lower_seats_are_empty_and_tells_status_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timeouts, "TAKEOVER_S", 0.5)
    port = free_port()
    seats = Seats(Endpoint("127.0.0.2", port), "127.0.0.#", 2, 200)
    hello = msg.Hello(msg.VERSION, JOB, 199, "pod-199", "i", 1, claims=(Claim(1, 0, "0-199", sure=True),))
    client = Client(seats.home, hello, seats=seats, run_dir=str(tmp_path))
    with seat(150, "127.0.0.152", port), contextlib.closing(client):
        assert isinstance(client.receive(20), Connected)
        assert client.where() == (seats.endpoint(150), "127.0.0.1")
    assert event_log.standing(str(tmp_path)).coordinator == ("127.0.0.152", port)


def test_only_a_node_without_workers_goes_elsewhere_sooner_where_node_0s_address_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "TAKEOVER_S", 600.0)
    monkeypatch.setattr(timeouts, "TAKEOVER_REFUSED_S", 0.0)
    port, attempts = free_port(), Queue[tuple[str, int]]()
    seats = Seats(Endpoint("127.0.0.2", port), "127.0.0.#", 2, 3)
    hello = msg.Hello(msg.VERSION, JOB, 2, "pod-2", "i", 1, claims=(Claim(1, 0, "0-2", sure=True),))
    connect = socket.create_connection

    def noted(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.put(address)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", noted)
    with seat(1, "127.0.0.3", port), contextlib.closing(Client(seats.home, hello, seats=seats)) as client:
        assert {attempts.get(timeout=10) for _ in range(3)} == {(seats.home.host, port)}, (
            "its workers may still run"
        )
        client.send(msg.Join("i", 1))
        assert isinstance(client.receive(20), Connected)
        assert client.where()[0] == seats.endpoint(1)


def test_a_node_without_workers_waits_for_a_node_0_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher may be there: a slow one, or one behind a partition."""
    monkeypatch.setattr(timeouts, "TAKEOVER_S", 600.0)
    monkeypatch.setattr(timeouts, "TAKEOVER_REFUSED_S", 0.0)
    attempts = Queue[tuple[str, int]]()
    seats = Seats(Endpoint("node-0", 1), "node-#", 0, 3)
    hello = msg.Hello(msg.VERSION, JOB, 2, "node-2", "i", 1, claims=(Claim(1, 0, "0-2", sure=True),))

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.put(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    with contextlib.closing(Client(seats.home, hello, seats=seats)) as client:
        client.send(msg.Join("i", 1))
        assert {attempts.get(timeout=10) for _ in range(4)} == {("node-0", 1)}
