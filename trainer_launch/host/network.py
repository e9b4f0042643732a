"""The machine's network: free ports and who listens on others, interfaces, RDMA adapters, routes, names.

Names are looked up by the system's resolver, in threads: a lookup that hangs holds nobody up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import files
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.host.slow_files import in_time
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import listed

Addresses: TypeAlias = frozenset[str] | tuple[str, ...]
Lookup: TypeAlias = Callable[[str], Addresses]  # raises OSError while the name does not resolve
K = TypeVar("K")
V = TypeVar("V")
_late: dict[str, list[Any]] = {}  # what the resolver told of a host after whoever asked had gone
_THREADS = 16  # that look names up
_LATER = 12_000  # ports
LOOKUP_S = 12.0  # for one name; after a lost packet, or for a nameserver that is gone, glibc waits 5 s
MESH_PORTS = (15001, 15021)  # Istio's: what leaves the pod; health


def free_port(among: PortRange | None = None, *, keeps: bool = False) -> int:
    """A port that nothing uses on any address: the kernel's choice, so that two who ask at once differ.

    With `keeps` no program gets it while this process lives, but one that listens as a server does, such as ours.

    Raises:
        NodeError: all of `among` are taken.
    """
    if among is None:
        return _bound(0, keeps)
    ports = list(range(among.low, among.high + 1))
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError):
            return _bound(port, keeps)
    if among.low == among.high:
        raise NodeError(f"port {among.low} is taken on this node")
    raise NodeError(f"every port of --port-range {among} is taken on this node; widen the range, or free some")


def later_ports() -> PortRange | None:
    """Ports for servers that start later: the kernel gives none of them to those that ask for any; None: it may."""
    lowest = int((files.read("/proc/sys/net/ipv4/ip_local_port_range", 100) or b"0").split()[0])
    return PortRange(lowest - _LATER, lowest - 1) if lowest > _LATER + 1024 else None


def _bound(port: int, keeps: bool = False) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that only winds down is free
        probe.bind(("", port))
        found = int(probe.getsockname()[1])
        if keeps:
            probe.detach()
        return found


def is_here(host: str) -> bool:
    """Whether an address of this name is this machine's; no, while it does not resolve."""
    return bool(here_and_elsewhere(host)[0])


def here_and_elsewhere(host: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The addresses of this name that are this machine's, and those of others; none, while it does not resolve.

    A resolver has `LOOKUP_S` to answer. Of a family that this machine does not use, no address counts.
    """
    try:
        entries = _entries(host, LOOKUP_S)
    except OSError:
        return (), ()
    here = {(family, str(address[0])) for family, _, _, _, address in entries if _can_bind(family, address)}
    families = {family for family, _ in here}
    elsewhere = (str(address[0]) for family, _, _, _, address in entries if family in families or not here)
    own = tuple(address for _, address in here)
    return own, tuple(address for address in elsewhere if address not in own)


def may_share(host: str) -> bool:
    """Whether other pods of the job, and so `host`, may be in this network: with hostNetwork, or in a rehearsal.

    The kubelet says so in the first line of /etc/hosts. A rehearsal's pods are at 127.0.0.2 and up.
    """
    is_rehearsal = host.startswith("127.0.0.") and host != "127.0.0.1"
    return is_rehearsal or "(host network)" in files.text("/etc/hosts").partition("\n")[0]


def mesh_port() -> int | None:
    """The port of a service mesh's proxy that listens in this pod."""
    busy = ((port, port_error(port)) for port in MESH_PORTS)
    return next((port for port, problem in busy if problem and problem[0] == errno.EADDRINUSE), None)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return True
    return False


def listener(port: int) -> str:
    """The process that listens on a port, as `pid 17 (python)`; "": we may look into none that does."""
    import psutil  # only errors and preflight need it

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if is_it and connection.pid is not None:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def port_error(port: int) -> tuple[int, str] | None:
    """Why a program could not listen on a port here: the errno, and who has it; None when it could."""
    try:
        _bound(port)
    except OSError as problem:
        return problem.errno or 0, listener(port)
    return None


_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # Linux, sockios.h
_IFREQ_BYTES = 40 if sys.maxsize > 1 << 32 else 32
_MOST_ADDRESSES = 4096
_UP_AND_RUNNING = 0x41
_ACTIVE = "4"  # as in "4: ACTIVE"
_ERRORS = frozenset(
    (
        *("symbol_error", "link_error_recovery", "link_downed", "local_link_integrity_errors", "port_rcv_errors"),
        "local_ack_timeout_err",  # of hw_counters; others there count what adaptive routing and congestion do
    )
)
_SHOWN = 8
_DISCARD = 9  # a UDP socket that is only connected sends nothing, so any port will do


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface that has addresses."""

    name: str
    addresses: tuple[str, ...]
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


def named(among: Sequence[Interface]) -> str:
    """For people: `eth0 (10.0.0.7), net1 (10.1.0.7)`; a node's own network may have hundreds."""
    return listed([f"{interface.name} ({interface.addresses[0]})" for interface in among], _SHOWN)


class AdapterPort(Struct, frozen=True):
    """A port of an RDMA adapter."""

    device: str
    port: int
    is_active: bool
    rate: str = ""  # as the kernel writes it: 400 Gb/sec (4X NDR)
    is_ethernet: bool = False
    is_foreign: bool = False  # such as EFA's: NCCL uses it by a plug-in, whatever NCCL_IB_HCA says
    has_others: bool = False  # the machine has adapters that this container was not given


def interfaces() -> tuple[Interface, ...]:
    """List those that have an IP address, in the kernel's order; none where a sandbox does not tell."""
    by_name: dict[str, list[str]] = {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for name, address in (*_ipv4_addresses(probe), *_ipv6_addresses()):
                by_name.setdefault(name, []).append(address)
            return tuple(
                Interface(name=name, addresses=tuple(own), is_up=_is_up(probe, name))
                for name, own in by_name.items()
            )
    except OSError:
        return ()


def _ipv4_addresses(probe: socket.socket) -> Iterator[tuple[str, str]]:
    """Names and addresses; an address with a label of its own, such as eth0:1, has that for a name."""
    import array  # only who has other nodes, or names an interface, needs it

    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    asked = struct.pack("iP", len(room), room.buffer_info()[0])
    used, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    for at in range(0, used, _IFREQ_BYTES):
        entry = room[at : at + _IFREQ_BYTES].tobytes()
        yield entry[:16].partition(b"\0")[0].decode(errors="replace"), socket.inet_ntoa(entry[20:24])


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    for line in files.text("/proc/net/if_inet6").splitlines():
        number, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))


def _is_up(probe: socket.socket, name: str) -> bool:
    asked = struct.pack("16s24x", name.encode())
    flags: int = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, asked), 16)[0]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def interface_to(address: str, among: Sequence[Interface]) -> str:
    """The interface from which the kernel would send to an address; "": there is no route, or it is not listed."""
    try:
        source = source_to(address)
    except OSError:
        return ""
    return next((interface.name for interface in among if source in interface.addresses), "")


def adapter_ports(root: Path = Path("/")) -> tuple[AdapterPort, ...]:
    """List the ports of this container's RDMA adapters; `root` stands for `/` in tests.

    The kernel shows those of the whole machine: virtual functions of other pods, and unused ones.
    """
    devices = (path.name for path in (root / "dev/infiniband").glob("uverbs*"))
    own = {files.text(root / "sys/class/infiniband_verbs" / name / "ibdev").strip() for name in devices} - {""}
    ports = [*_ports_below(root / "sys/class/infiniband")]
    its = [port for port in ports if not own or port.device in own]
    return tuple(replace(port, has_others=len(its) < len(ports)) for port in its)


def _ports_below(folder: Path) -> Iterator[AdapterPort]:
    for port in sorted(folder.glob("*/ports/*")):
        if port.name.isdigit():
            is_active = files.text(port / "state").partition(":")[0].strip() == _ACTIVE
            rate, layer = (files.text(port / name).strip() for name in ("rate", "link_layer"))
            kind = layer == "Ethernet", layer == "Unknown"
            yield AdapterPort(port.parts[-3], int(port.name), is_active, rate[:80], *kind)


def port_errors(root: Path = Path("/")) -> dict[tuple[str, int, str], int]:
    """The error counters of RDMA ports since their drivers were loaded: by device, port and counter."""
    ports = [port for port in (root / "sys/class/infiniband").glob("*/ports/*") if port.name.isdigit()]
    texts = {
        (port.parts[-3], int(port.name), path.name): files.text(path).strip()
        for port in ports
        for path in port.glob("*counters/*")
        if path.name in _ERRORS
    }
    return {place: int(text) for place, text in texts.items() if text.isdecimal()}


def may_use_rdma(root: Path = Path("/")) -> bool:
    """Whether the container was given RDMA devices."""
    return any((root / "dev/infiniband").glob("uverbs*"))


def source_to(address: str) -> str:
    """Ask the kernel from which of our addresses it would send to an address; nothing is sent.

    Raises:
        OSError: there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD))
        return str(probe.getsockname()[0]).partition("%")[0]


_BACKLOG = 4096  # the kernel cuts it to net.core.somaxconn
_MOST_IDLE_S = 32_767  # that the kernel takes for TCP_KEEPIDLE
_OTHER_FILES = 256  # descriptors that stay free for the rest of the process
TOO_FEW_FILES = "the limit of open files (ulimit -n) leaves this process no room for %s"
_ANY = ("", "0.0.0.0", "::", "*")


def listen(endpoint: Endpoint, who: str = "the coordinator") -> socket.socket:
    """Listen there, on IPv4 and IPv6 when no address is named; port 0 lets the kernel pick."""
    try:
        if endpoint.is_loopback:
            source_to(endpoint.host)  # nobody could connect where that interface is down
        opened = _listen_anywhere(endpoint.port) if endpoint.host in _ANY else _listen_at(endpoint)
    except (OSError, OverflowError, UnicodeError) as problem:
        number = getattr(problem, "errno", None)  # the resolver has numbers of its own
        why = os.strerror(int(number)) if number and number in errno.errorcode else str(problem)
        holder = listener(endpoint.port) if number == errno.EADDRINUSE else ""
        why += f" by {holder}" if holder else ""
        advice = "free that port (see `ss -ltnp`) or choose another one for the job"
        if number in (errno.EADDRNOTAVAIL, errno.ENETUNREACH):
            loopback = " (ip addr add 127.0.0.1/8 dev lo; ip link set lo up)" if endpoint.is_loopback else ""
            advice = f"give an interface of this machine that address{loopback}"
        raise NodeError(f"{who} cannot listen on {endpoint.host or '*'}:{endpoint.port}: {why}; {advice}") from None
    opened.setblocking(False)
    return opened


def _listen_anywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel with IPv6 compiled in but switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _listen_at(endpoint: Endpoint) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server((address[0], int(address[1])), family=family, backlog=_BACKLOG)


def tune(sock: socket.socket, silence_s: float) -> None:
    """Send small lines at once, and let the kernel end a connection whose other end no longer answers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(max(1, round(silence_s)), _MOST_IDLE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(silence_s * 1000)))


def allow_connections(connections: int) -> bool:
    """Let this process have so many connections, and what it starts; whether that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(connections + _OTHER_FILES, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return spare_files() >= connections


def spare_files() -> int:
    """How many descriptors may be connections."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES


class Answer(str, Enum):
    """Why a name has no address, in words; what fails is not known to be absent."""

    NXDOMAIN = "NXDOMAIN"
    NO_DATA = "no address"  # the name is there, and has neither A nor AAAA
    TEMPORARY = "the DNS server does not answer, or answers SERVFAIL or REFUSED"
    FAILED = "the resolver failed"


_ANSWERS = {
    getattr(socket, "EAI_NODATA", socket.EAI_NONAME): Answer.NO_DATA,  # musl has none
    socket.EAI_NONAME: Answer.NXDOMAIN,
    socket.EAI_AGAIN: Answer.TEMPORARY,
}


def lookup(name: str) -> tuple[str, ...]:
    """All addresses of a name, of both families and in the order of a worker's own getaddrinfo.

    Raises:
        OSError: it does not resolve.
    """
    try:
        entries = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except UnicodeError as problem:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(problem)) from None
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def lookup_all(names: Sequence[str], limit_s: float, by: Lookup = lookup) -> Mapping[str, Addresses | Answer]:
    """The addresses of each name, or why there are none: TEMPORARY where nothing came within `limit_s`."""
    answers = in_threads(names, lambda name: _addresses(name, by), limit_s)
    return {name: answers.get(name, Answer.TEMPORARY) for name in names}


def in_threads(keys: Sequence[K], ask: Callable[[K], V], limit_s: float, *, threads: int = _THREADS) -> dict[K, V]:
    """The results of `ask` for each key that come within `limit_s`; `ask` may hang, and raises nothing."""
    answers: Queue[tuple[K, V]] = Queue()
    until_s = time.monotonic() + limit_s
    left = iter(keys)  # of all threads: a slow answer delays no other

    def work() -> None:
        for key in left:
            answers.put((key, ask(key)))
            if time.monotonic() > until_s:
                return  # nobody waits any more

    for _ in range(min(threads, len(keys))):
        if begin_thread("lookup", work) is None:
            break
    arrived: dict[K, V] = {}
    with contextlib.suppress(Empty):
        for _ in keys:
            key, value = answers.get(timeout=max(0.0, until_s - time.monotonic()))
            arrived[key] = value
    return arrived


def is_absent(problem: socket.gaierror) -> bool:
    """Whether the resolver knows that a name has no address."""
    return _answer_of(problem) in (Answer.NXDOMAIN, Answer.NO_DATA)


def addresses_of(host: str, limit_s: float) -> list[str]:
    """The addresses of a host in the resolver's order; an answer that is too late for a caller is the next one's.

    Raises:
        OSError: the name does not resolve, or not within `limit_s`.
    """
    return [str(entry[4][0]) for entry in _entries(host, limit_s)]


def _entries(host: str, limit_s: float) -> list[Any]:
    try:
        entries = _late.pop(host, None)
        if entries is None:
            entries = in_time(f"the lookup of {host}", None, _look_up, host, wait_s=max(0.0, limit_s))
            _late.pop(host, None)
    except UnicodeError as problem:  # a label that is empty or too long
        raise OSError(str(problem)) from None
    if entries is None:
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver did not answer in time")
    return entries


def _look_up(host: str) -> list[Any]:
    _late[host] = entries = [*socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)]
    return entries


def connected(endpoint: Endpoint, limit_s: float) -> socket.socket:
    """A connection to the first address there that accepts one, or the OSError of the last one."""
    *others, last = addresses_of(endpoint.host, limit_s)
    for address in others:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, endpoint.port), timeout=limit_s)
    return socket.create_connection((last, endpoint.port), timeout=limit_s)


def _addresses(name: str, by: Lookup) -> Addresses | Answer:
    try:
        return by(name)
    except OSError as problem:
        return _answer_of(problem)


def _answer_of(problem: OSError) -> Answer:
    return Answer.FAILED if problem.errno is None else _ANSWERS.get(problem.errno, Answer.FAILED)
