"""Ports for what a test starts later: the kernel gives none of them to others meanwhile."""

from __future__ import annotations

from trainer_launch.host import network


def free_port() -> int:
    """A port that nothing uses."""
    return network.free_port(network.later_ports())
