"""Small questions to the network of this machine."""

from __future__ import annotations

import socket


def free_port(preferred: int) -> int:
    """`preferred` when nothing listens there on any address, else a port that the kernel picks."""
    for port in (preferred, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return preferred
