"""Who holds a port that we cannot have."""

from __future__ import annotations

import os
import socket

import pytest

from trainer_launch.host import network
from trainer_launch.host.network import listen
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_whoever_listens_is_named(address: str) -> None:
    with listen(Endpoint(address, 0)) as taken:  # without an address on IPv6 too, where there is one
        port = taken.getsockname()[1]
        assert network.listener(port).startswith(f"pid {os.getpid()} (")
    assert network.listener(port) == ""


def test_a_coordinator_that_cannot_listen_says_who_has_the_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(NodeError, match=rf"already in use by pid {os.getpid()} \("),
    ):
        listen(Endpoint("127.0.0.1", taken.getsockname()[1]))
