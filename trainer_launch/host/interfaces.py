"""Network interfaces and RDMA adapters, as the kernel lists them for this container."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ACTIVE = "4"  # as in "4: ACTIVE"
_IP_MTU, _IPV6_MTU = 14, 24  # <linux/in.h>, <linux/in6.h>; Python does not name them
_SHOWN = 8
_DISCARD = 9  # a UDP socket that is only connected sends nothing, so any port will do


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface that has addresses."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether only this container itself can be reached through it."""
        return all(ipaddress.ip_address(address).is_loopback for address in self.addresses)

    @property
    def is_local_only(self) -> bool:
        """Whether none of its addresses means anything beyond one wire."""
        parsed = [ipaddress.ip_address(address) for address in self.addresses]
        return all(address.is_link_local or address.is_loopback for address in parsed)


def named(found: Sequence[Interface]) -> str:
    """For people: `eth0 (10.0.0.7), net1 (10.1.0.7)`; a node's own network may have hundreds."""
    shown = ", ".join(f"{one.name} ({one.addresses[0]})" for one in found[:_SHOWN])
    return shown + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


@dataclass(frozen=True, slots=True)
class AdapterPort:
    """One port of an RDMA adapter."""

    device: str
    port: int
    is_active: bool
    rate: str = ""  # as the kernel writes it: 400 Gb/sec (4X NDR)


@dataclass(frozen=True, slots=True)
class Route:
    """How packets go to an address: from which of ours, and how large they may be."""

    source: str
    mtu: int


def interfaces() -> tuple[Interface, ...]:
    """List those that have an IP address, in the kernel's order; none where a sandbox does not tell."""
    import psutil  # only preflight needs it

    try:
        stats, listed = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:
        return ()
    found = []
    for name, entries in listed.items():
        families = (socket.AF_INET, socket.AF_INET6)
        addresses = tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        if addresses and name in stats:
            found.append(Interface(name=name, addresses=addresses, mtu=stats[name].mtu, is_up=stats[name].isup))
    return tuple(found)


def adapter_ports(root: Path = Path("/")) -> tuple[AdapterPort, ...]:
    """List the ports of RDMA adapters; `root` stands for `/` in tests."""
    return tuple(_ports_below(root / "sys/class/infiniband"))


def _ports_below(folder: Path) -> Iterator[AdapterPort]:
    for port in sorted(folder.glob("*/ports/*")):
        if port.name.isdigit():
            is_active = _line(port / "state").partition(":")[0].strip() == _ACTIVE
            yield AdapterPort(port.parts[-3], int(port.name), is_active, _line(port / "rate"))


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()[:80]
    except OSError:
        return ""


def may_use_rdma(root: Path = Path("/")) -> bool:
    """Whether the container was given RDMA devices."""
    return any((root / "dev/infiniband").glob("uverbs*"))


def route_to(address: str) -> Route:
    """Ask the kernel how it would send to an address; nothing is sent.

    Raises:
        OSError: there is no route.
    """
    is_v6 = ":" in address
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD))
        source = str(probe.getsockname()[0]).partition("%")[0]
        level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_v6 else (socket.IPPROTO_IP, _IP_MTU)
        return Route(source, probe.getsockopt(level, option))
