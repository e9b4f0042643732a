"""Small questions to the network of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nothing uses on any address: the kernel's choice, so that two who ask at once differ."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
