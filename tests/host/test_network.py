"""Who holds a port that we cannot have; what the resolver says of a name, and does not say in time."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from trainer_launch.host import network, slow_files
from trainer_launch.host.network import Answer, free_port, listen
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError


def test_a_coordinator_that_cannot_listen_says_who_has_the_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(NodeError, match=rf"already in use by pid {os.getpid()} \("),
    ):
        listen(Endpoint("127.0.0.1", taken.getsockname()[1]))


FOUND = frozenset({"10.0.0.6"})


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (socket.EAI_NONAME, Answer.NXDOMAIN),
        (socket.EAI_NODATA, Answer.NO_DATA),
        (socket.EAI_AGAIN, Answer.TEMPORARY),
        (socket.EAI_FAIL, Answer.FAILED),
        (socket.EAI_MEMORY, Answer.FAILED),
        (None, Answer.FAILED),
    ],
)
def test_what_the_resolver_says_is_told_apart(number: int | None, answer: Answer) -> None:
    def lookup(name: str) -> frozenset[str]:
        if name == "there":
            return FOUND
        raise OSError(number, "as the resolver says") if number else OSError("no number")

    assert network.lookup_all(["absent", "there"], 10.0, lookup) == {"absent": answer, "there": FOUND}


def test_a_name_that_is_not_answered_in_time_may_be_there() -> None:
    release = threading.Event()

    def lookup(name: str) -> frozenset[str]:
        assert name == "there" or release.wait(60)
        return FOUND

    began_s = time.monotonic()
    try:
        found = network.lookup_all(["silent", "there"], 0.5, lookup)
    finally:
        release.set()
    assert found == {"silent": Answer.TEMPORARY, "there": FOUND}
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "." * 3, ""])
def test_a_name_that_cannot_exist_is_denied(name: str) -> None:
    assert network.lookup_all([name], 10.0) == {name: Answer.NXDOMAIN}


@pytest.mark.parametrize(
    ("addresses", "here", "elsewhere"),
    [
        (["127.0.0.1"], ("127.0.0.1",), ()),
        (["192.0.2.1"], (), ("192.0.2.1",)),
        (["127.0.0.1", "192.0.2.1"], ("127.0.0.1",), ("192.0.2.1",)),
        (["127.0.0.1", "2001:db8::1"], ("127.0.0.1",), ()),
    ],
    ids=["own", "another's", "a name of several machines", "IPv6 of a machine that has none"],
)
def test_the_addresses_of_a_name_are_this_machines_or_others(
    addresses: list[str], here: tuple[str, ...], elsewhere: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def found(host: str, *args: object, **more: object) -> list[object]:
        return [entry for address in addresses for entry in real(address, 0, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert network.here_and_elsewhere("name") == (here, elsewhere)


def test_a_name_without_an_address_is_nobodys() -> None:
    assert network.here_and_elsewhere("no-such-name.invalid") == ((), ())
    assert not network.is_here("no-such-name.invalid")


def test_a_name_that_the_resolver_does_not_answer_for_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_more: answers.wait(2) and [])
    monkeypatch.setattr(network, "LOOKUP_S", 0.05)
    try:
        assert not network.is_here("a-name-without-an-answer")
        assert "the lookup of a-name-without-an-answer" in slow_files._waiting.values(), "nobody waits for it"
    finally:
        answers.set()


def test_an_answer_of_a_slow_resolver_serves_who_asks_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nameserver that is gone costs glibc 5 s each time, and who connects waits for 3 s."""
    answered, real = threading.Event(), socket.getaddrinfo

    def slowly(host: str, *args: object, **more: object) -> list[object]:
        answered.wait(5)
        return [*real("127.0.0.1", 0, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    with pytest.raises(socket.gaierror, match="did not answer in time"):
        network.addresses_of("slow-host", 0.01)
    (lookup,) = (thread for thread, what in slow_files._waiting.items() if what == "the lookup of slow-host")
    answered.set()
    lookup.join()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_more: [])
    assert network.addresses_of("slow-host", 0.01) == ["127.0.0.1"]


def test_a_port_that_is_kept_goes_to_no_other_and_a_server_may_have_it() -> None:
    port = free_port(keeps=True)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))  # as the kernel does for who connects, or asks for any port
    listen(Endpoint("127.0.0.1", port)).close()


def test_a_free_port_is_one_of_the_range_that_nobody_uses() -> None:
    with socket.create_server(("", 0)) as taken:
        low = taken.getsockname()[1]
        with pytest.raises(NodeError, match=f"port {low} is taken on this node"):
            free_port(PortRange(low, low))
        wide = PortRange(low, min(65535, low + 20))
        assert {free_port(wide) for _ in range(20)} <= set(range(low + 1, low + 21))
