"""A port that the coordinator and the workers' store share: each visitor comes to whom it wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from trainer_launch.membership import shared_port
from trainer_launch.membership.server import Connection
from trainer_launch.membership.shared_port import KNOCK, Place, SharedPort

DEADLINE_S = 30


class House:
    """A shared port, and who has come to the coordinator."""

    def __init__(self) -> None:
        self.store: Place | None = None
        self.came: Queue[socket.socket] = Queue()
        self._ours: list[socket.socket] = []
        self.port = SharedPort(lambda sock, _: self.came.put(sock), lambda: self.store)

    def visit(self, said: bytes) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
            theirs, _ = listener.accept()
        ours.sendall(said)
        self._ours.append(ours)
        self.port.take(theirs, "127.0.0.1")
        return ours

    def close(self) -> None:
        self.port.close()
        for sock in self._ours:
            sock.close()


@pytest.fixture
def house() -> Iterator[House]:
    with contextlib.closing(House()) as made:
        yield made


def test_a_launcher_that_knocks_comes_to_the_coordinator_without_its_knock(house: House) -> None:
    visitor = house.visit(KNOCK + b"{}\n")
    with house.came.get(timeout=DEADLINE_S) as came:
        came.setblocking(True)
        assert came.recv(100) == b"{}\n"
        came.sendall(b"hello\n")
        assert visitor.recv(100) == b"hello\n"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "another protocol"])
def test_who_is_neither_comes_to_the_coordinator_as_it_is(
    house: House, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_port, "_SILENT_S", 0.01)
    house.visit(said)
    with house.came.get(timeout=DEADLINE_S) as came:
        assert not said or came.recv(100) == said


def test_what_begins_as_torch_does_is_led_to_the_present_store_in_both_directions(house: House) -> None:
    large = b"\0" + bytes(range(256)) * 4096

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            received = b""
            while len(received) < len(large):
                received += sock.recv(1 << 20)
            sock.sendall(received[::-1])

    with socket.create_server(("127.0.0.1", 0)) as store:
        thread = threading.Thread(target=serve, args=(store,))
        thread.start()
        house.store = store.getsockname()
        visitor = house.visit(b"")
        visitor.sendall(large)
        answer = b""
        while data := visitor.recv(1 << 20):
            answer += data
        thread.join()
    assert answer == large[::-1], "and its end is told"


def is_over(visitor: socket.socket) -> bool:
    try:
        return visitor.recv(100) == b""
    except ConnectionResetError:
        return True


def test_where_no_store_is_open_torch_is_told_at_once_and_tries_again(house: House) -> None:
    assert is_over(house.visit(b"\0"))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        house.store = gone.getsockname()
    assert is_over(house.visit(b"\0"))


def test_a_knock_where_no_port_is_shared_is_not_heard() -> None:
    """As of a node that was started by another command than node 0."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(KNOCK + b"{}\n" + KNOCK)
        assert Connection(theirs, 1, "127.0.0.1", None, 0.0).read() == [b"{}"]
