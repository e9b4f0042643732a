"""A network of the pods' own as commands: one router, a cable to each pod, names, and what goes wrong on it. Pure.

Every pod is a network namespace with one address; the router between them is a namespace too, ours. Losing packets
is the router's doing, so that neither side is told, as between machines. Only to be slow it needs `nft`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer_launch.model.units import MIB
from trainer_launch.rehearsal.controllers.flags import ON_A_LAPTOP

DEVICE = "eth0"  # in each pod
ROUTER = "169.254.1.1"
SHM_BYTES = 64 * MIB  # what a container's runtime gives a pod that asks for nothing else
FILL = "trainer-launch-fault"  # the file that fills /dev/shm
_BURST_S, _BURST_BYTES = 0.1, 128 * 1024  # a segment that is not cut yet has 64 KiB

Argv = tuple[str, ...]

# Inside unshare: $1 the pod's name, $2 its hosts file, $3 the size of its /dev/shm, $4 its resolv.conf.
# Ends with its standard input.
POD = (
    'set -e; ip link set lo up; hostname "$1"; mount --bind "$2" /etc/hosts; '
    '[ ! -e /etc/resolv.conf ] || mount --bind "$4" /etc/resolv.conf; '
    'mount -t tmpfs -o "mode=1777,size=$3" shm /dev/shm; echo ready; exec cat'
)
RESOLVER = (
    "nameserver 127.0.0.1\noptions attempts:1\n"  # where nobody is: a name that is in no file is refused at once
)
# In a pod that lives already. $1: the size of its /dev/shm.
NEW_SHM = 'umount -l /dev/shm && mount -t tmpfs -o "mode=1777,size=$1" shm /dev/shm'
_REMOUNT = "mount --options-mode ignore -o"  # what is listed there now may not be set by a mapped root
# Up to 1 GiB is really written; a larger one is made no larger than what is in it.
FILL_SHM = (
    f"head -c 1073741824 /dev/zero >/dev/shm/{FILL} 2>/dev/null; set -- $(df -kP /dev/shm | tail -n 1); "
    f'[ "$4" -eq 0 ] || {_REMOUNT} "remount,size=$3k" /dev/shm'
)
EMPTY_SHM = f'rm -f /dev/shm/{FILL}; {_REMOUNT} "remount,size=$1" /dev/shm'
# Each line says a word when it works; the words are those of `ability.GROUND`.
TRY_OUT = """
ip link set lo up && echo lo
hostname try-out && echo name
ip link add port0 type veth peer name port1 && echo veth
echo 1 >/proc/sys/net/ipv4/ip_forward && echo forward
ip rule add from 10.77.0.2 blackhole && echo rule
mount --bind /etc/hosts /etc/hosts && echo hosts
mount -t tmpfs -o mode=1777,size=1m shm /dev/shm && echo shm
nft add table ip try_out && nft "add chain ip try_out c { type filter hook forward priority 0; }" &&
  nft add rule ip try_out c limit rate over 1000000 bytes/second burst 131072 bytes drop && echo limit
true
"""
UNSHARE = ("--net", "--mount", "--uts", "--ipc")
AS_USER = ("--user", "--map-root-user")


def address_of(number: int) -> str:
    """A pod's address, by its number in the job."""
    return f"10.77.{number // 250}.{number % 250 + 2}"


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a pod is plugged into the router."""

    number: int

    @property
    def address(self) -> str:
        """The pod's."""
        return address_of(self.number)

    @property
    def port(self) -> str:
        """The router's end of the cable."""
        return f"port{self.number}"


def router() -> list[Argv]:
    """What makes our own namespace the router."""
    return [("ip", "link", "set", "lo", "up"), ("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")]


def cable(outlet: Outlet, pid: int) -> list[Argv]:
    """Lay the cable to the pod whose namespace a process has: first at the router's end."""
    port, address = outlet.port, outlet.address
    return [
        ("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "addr", "add", f"{ROUTER}/32", "dev", port),
        ("ip", "link", "set", port, "up"),
        ("ip", "route", "add", f"{address}/32", "dev", port),
    ]


def plug(outlet: Outlet) -> list[Argv]:
    """The pod's end of the cable, for its namespace."""
    return [
        ("ip", "addr", "add", f"{outlet.address}/32", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
        ("ip", "route", "add", ROUTER, "dev", DEVICE, "scope", "link"),
        ("ip", "route", "add", "default", "via", ROUTER),
    ]


def partition(outlet: Outlet) -> list[Argv]:
    """Lose all packets from and to a pod; nobody is told."""
    return [
        ("ip", "rule", "add", "from", outlet.address, "blackhole"),
        ("ip", "route", "replace", "blackhole", f"{outlet.address}/32"),
    ]


def heal(outlet: Outlet) -> list[Argv]:
    """Undo `partition`."""
    return [
        ("ip", "rule", "del", "from", outlet.address, "blackhole"),
        ("ip", "route", "del", "blackhole", f"{outlet.address}/32"),
        ("ip", "route", "replace", f"{outlet.address}/32", "dev", outlet.port),
    ]


def slow(outlet: Outlet, bytes_per_s: float) -> list[Argv]:
    """Lose what is sent to or from a pod faster than this."""
    table, burst = _table(outlet), max(_BURST_BYTES, round(bytes_per_s * _BURST_S))
    limit = ("limit", "rate", "over", f"{bytes_per_s:.0f}", "bytes/second", "burst", str(burst), "bytes", "drop")
    return [
        ("nft", "add", "table", "ip", table),
        ("nft", f"add chain ip {table} forward {{ type filter hook forward priority 0; }}"),
        ("nft", "add", "rule", "ip", table, "forward", "ip", "daddr", outlet.address, *limit),
        ("nft", "add", "rule", "ip", table, "forward", "ip", "saddr", outlet.address, *limit),
    ]


def fast(outlet: Outlet) -> list[Argv]:
    """Undo `slow`."""
    return [("nft", "delete", "table", "ip", _table(outlet))]


def _table(outlet: Outlet) -> str:
    return f"slow{outlet.number}"


def size_of_shm(size_bytes: int | None) -> str:
    """As `mount` takes it: of what the pod mounts there itself; 0 is without a limit, None is nothing."""
    return str(SHM_BYTES if size_bytes is None else size_bytes) if size_bytes != 0 else "50%"


def off_loopback(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of a pod on loopback as they are in a network of its own: who is told to use lo uses its device."""
    return {name: DEVICE if ON_A_LAPTOP.get(name) == value == "lo" else value for name, value in env.items()}


def hosts(own: str, names: Mapping[str, Sequence[str]], addresses: Mapping[str, str], *, known: bool) -> str:
    """/etc/hosts of the pod called `own`; unless they are `known`, of all pods' names it has only its own."""
    shown = [pod for pod in names if known or pod == own]
    local = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
    return "".join([local, *(_line(pod, names[pod], addresses[pod], own) for pod in shown)])


def _line(pod: str, names: Iterable[str], address: str, own: str) -> str:
    whole = [name for name in names if name.endswith(".svc")]
    all_names = dict.fromkeys(
        [*names, *(f"{name}.cluster.local" for name in whole), *([pod] if pod == own else [])]
    )
    return f"{address} {' '.join(all_names)}\n"
