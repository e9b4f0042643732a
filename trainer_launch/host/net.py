"""Small questions to the network of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

from trainer_launch.errors import NodeError
from trainer_launch.model import PortRange


def free_port(among: PortRange | None = None) -> int:
    """A port that nothing uses on any address: the kernel's choice, so that two who ask at once differ.

    Raises:
        NodeError: all of `among` are taken.
    """
    if among is None:
        return _bound(0)
    ports = list(range(among.low, among.high + 1))
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError):
            return _bound(port)
    raise NodeError(f"every port of --port-range {among} is taken on this node; widen the range, or free some")


def _bound(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that only winds down is free
        probe.bind(("", port))
        return int(probe.getsockname()[1])
