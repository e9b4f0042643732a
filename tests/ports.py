"""Ports for what a test starts later: the kernel gives none of them to others meanwhile."""

from __future__ import annotations

from pathlib import Path

from trainer_launch.host import network
from trainer_launch.model import PortRange

_HOW_MANY = 12_000


def free_port() -> int:
    """A port that nothing uses, from below those that the kernel gives to whoever asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= _HOW_MANY + 1024:
        return network.free_port()
    return network.free_port(PortRange(lowest - _HOW_MANY, lowest - 1))
