"""A node and a coordinator of other versions: the refusal names both."""

from __future__ import annotations

import socket
import threading

import pytest

from trainer_launch import __version__
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.client import inquire
from trainer_launch.model import Endpoint

SAME = "install the same trainer-launch in all pods"
OURS = f"this node (trainer-launch {__version__}) {msg.VERSION}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            f"the coordinator speaks version 3, not {msg.VERSION}",
            f"the coordinator (trainer-launch 0.1) uses protocol version 3, {OURS}; {SAME}",
        ),
        (
            f"the coordinator (trainer-launch 0.2.0) uses protocol version 6, this node {msg.VERSION}; {SAME}",
            f"the coordinator (trainer-launch 0.2.0) uses protocol version 6, {OURS}; {SAME}",
        ),
        ("this coordinator serves job a, not b", "this coordinator serves job a, not b"),
    ],
    ids=["0.1", "0.2", "another job"],
)
def test_a_refusal_by_another_version_names_both(said: str, shown: str) -> None:
    assert msg.with_own_version(said) == shown


def test_a_coordinator_of_0_1_is_named_with_its_version_and_ours() -> None:
    def answer(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b'{"kind": "challenge", "nonce": ""}\n')
            sock.makefile("rb").readline()
            reason = f"the coordinator speaks version 2, not {msg.VERSION}"
            sock.sendall(b'{"kind": "refused", "reason": "%s", "retry": false}\n' % reason.encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        told = inquire(Endpoint("127.0.0.1", server.getsockname()[1]), "job")
        thread.join()
    assert isinstance(told, msg.Refused)
    assert "(trainer-launch 0.1) uses protocol version 2" in told.reason
    assert OURS in told.reason
