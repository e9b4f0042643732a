"""Small questions to the network of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from trainer_launch.model import PortRange
from trainer_launch.model.errors import NodeError


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


def is_here(host: str) -> bool:
    """Whether a name or address is one of this machine's; no, while it does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False


def listener(port: int) -> str:
    """Who listens on a port, as `pid 17 (python)`; empty when it is nobody that we may look into."""
    sockets = {f"socket:[{inode}]" for family in ("tcp", "tcp6") for inode in listening(_table(family), port)}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(folder / "fd"):
                if os.readlink(folder / "fd" / number) in sockets:
                    return f"pid {folder.name} ({(folder / 'comm').read_text(errors='replace').strip()})"
    return ""


def listening(table: str, port: int) -> list[str]:
    """Inodes of listening sockets; a line is `slot: address:port remote state`, five more, `inode`."""
    rows = [row for line in table.splitlines()[1:] if len(row := line.split()) > 9 and row[3] == "0A"]
    return [row[9] for row in rows if row[1].rpartition(":")[2] == f"{port:04X}"]


def _table(family: str) -> str:
    try:
        return Path(f"/proc/net/{family}").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def port_trouble(port: int) -> tuple[int, str] | None:
    """Why a program could not listen on a port here: the errno, and who has it; None when it could."""
    try:
        _bound(port)
    except OSError as problem:
        return problem.errno or 0, listener(port)
    return None
