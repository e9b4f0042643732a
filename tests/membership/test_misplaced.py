"""A coordinator's address that leads elsewhere: to this node, to nothing, to the proxy of a service mesh."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import eventually
from trainer_launch.host import files, network, slow_files
from trainer_launch.membership import client, timeouts
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.client import Client
from trainer_launch.model import Endpoint

HOSTS = "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n10.0.0.7\tjob-node-0-1\n"
OF_MACHINE = HOSTS.replace("file.", "file (host network).")


@contextlib.contextmanager
def node(host: str, port: int, rank: int | None = 1, **hello: Any) -> Iterator[tuple[Client, list[str]]]:
    says: list[str] = []
    words = msg.Hello(msg.VERSION, "job", rank, "pod-1", "1-a", **hello)
    with contextlib.closing(Client(Endpoint(host, port), words, say=says.append)) as made:
        yield made, says


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for node 0 to come on this machine."""
    monkeypatch.setattr(timeouts, "NODE_0_HERE_S", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_a_node_that_is_not_node_0_but_has_its_address_is_misconfigured(host: str) -> None:
    with node(host, free_port()) as (made, _):
        news = made.receive(timeout_s=20)
    assert isinstance(news, msg.GiveUp)
    assert (news.cause, news.exit_code) == ("Misconfigured", 2)
    assert f"node 0's address {host} leads to this node, whose rank is 1" in news.reason


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("host", "hello"),
    [
        ("127.0.0.1", {"rank": 0}),
        ("127.0.0.1", {"rank": None, "arrives": True}),
        ("127.0.0.2", {}),  # a pod of a rehearsal
    ],
    ids=str,
)
def test_a_node_that_may_have_node_0_on_its_machine_is_not_accused(host: str, hello: dict[str, Any]) -> None:
    with node(host, free_port(), **hello) as (made, says):
        eventually(lambda: says, "its wait")
        assert made.receive(timeout_s=0.3) is None
    assert says == [says[0]]
    assert says[0].startswith("cannot connect to the coordinator at")


def test_two_launchers_that_are_started_together_on_one_machine_wait_for_each_other() -> None:
    assert timeouts.NODE_0_HERE_S >= 10
    with node("127.0.0.1", free_port()) as (made, says):
        eventually(lambda: says, "its wait")
        assert made.receive(timeout_s=0.3) is None


@pytest.mark.parametrize(
    ("hosts", "host", "may"),
    [
        (HOSTS, "localhost", False),
        (OF_MACHINE, "10.9.0.1", True),
        ("127.0.0.1 localhost\n", "127.0.1.1", False),
        ("127.0.0.1 localhost\n", "127.0.0.7", True),
    ],
    ids=["a pod's own network", "hostNetwork", "no Kubernetes", "rehearsal"],
)
def test_pods_of_one_machines_network_may_hold_node_0(
    hosts: str, host: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "text", lambda path: hosts)
    assert network.may_share(host) is may


@pytest.mark.parametrize("busy", [None, 15001, 15021])
def test_a_mesh_that_takes_connections_and_closes_them_is_named(
    busy: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "port_error", lambda port: (errno.EADDRINUSE, "") if port == busy else None)
    with socket.create_server(("127.0.0.1", 0)) as proxy, node("127.0.0.1", proxy.getsockname()[1]) as (_, says):
        proxy.accept()[0].close()
        eventually(lambda: says, "what it waits for")
    assert says[0].startswith("the coordinator has closed the connection")
    assert (f"service mesh listens on port {busy} of this pod" in says[0]) is (busy is not None)


def test_the_coordinator_itself_says_that_it_has_no_name() -> None:
    with node("no-such-name.invalid", 1, rank=0) as (_, says), node("no-such-name.invalid", 1) as (_, others):
        eventually(lambda: says and others, "their waits")
    assert "this node itself is the coordinator, to which all connect by that name" in says[0]
    assert "publishNotReadyAddresses: true" in says[0]
    assert others[0].startswith("no address for no-such-name.invalid yet")
    assert "itself" not in others[0]


def test_a_resolver_that_hangs_holds_up_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    with node("127.0.0.1", 1) as (made, _):
        monkeypatch.setattr(made, "where", lambda: (Endpoint("node-0", 1), "10.0.0.7"))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_more: answers.wait(60) and [])
        monkeypatch.setattr(client, "WAIT_S", 0.05)
        try:
            assert made.own_address(None, "node-1") == "10.0.0.7"
            assert not answers.is_set(), "it is told before the resolver answers"
            assert "the lookup of node-0" in slow_files._waiting.values()
        finally:
            answers.set()
