"""Pods with a network, names and /dev/shm of their own: made, entered, disturbed, and gone with us.

Every pod is a network namespace with one address; the router between them is a namespace too. Losing packets
is the router's doing, so that neither side is told, as between machines. The namespaces have no name anywhere: we
hold them open, and when we and the pods' processes have ended, the kernel takes them down. A container is process 1
of a PID namespace, where the kernel allows that. Tests of this project put their own pods here, too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, files
from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import MIB
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import pod_values
from trainer_launch.rehearsal.controllers.local_jobs import ON_A_LAPTOP
from trainer_launch.rehearsal.faults.kinds import InjectedFault

COMMAND_S = 20.0  # for one command of a moment
_OTHERS = 256  # descriptors that all else takes
_KINDS = ("net", "mnt", "uts", "ipc")
_OPTIONS = {"net": "--net", "mnt": "--mount", "uts": "--uts", "ipc": "--ipc"}


class _Place(Struct, frozen=True):
    """One pod's namespaces, which we hold open."""

    link: Link
    fds: Mapping[str, int]
    hosts: Path
    shm: str  # its size

    def enter(self, *kinds: str) -> Argv:
        """What runs a program in them, all of them by default; the working directory is lost."""
        options = (f"{_OPTIONS[kind]}=/proc/{os.getpid()}/fd/{self.fds[kind]}" for kind in kinds or _KINDS)
        return ("nsenter", *options, "--")


class OwnNetwork:
    """The pods' network and the router between them; needs root, or a user namespace in which we are root."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        with _child(("unshare", "--net", "--", "sh", "-c", ROUTING)) as pid:
            self._router_fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        # What runs a program in the router's place.
        self.router: Argv = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self._router_fd}", "--")
        tried = deadline_subprocess.run((*_AS_FIRST, "true"), None, COMMAND_S)
        self._first: Argv = _AS_FIRST if tried.code == 0 else ()
        self._places: dict[str, _Place] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._known = self._told = True  # whether pods are to know the others' names, and whether that is written
        self._lasting: Counter[tuple[str, str | None]] = Counter()  # how many faults of a kind a pod suffers now

    def add(self, pod: str, number: int, names: Sequence[str], shm_bytes: int | None = None) -> None:
        """Give a pod its place, `shm_bytes` as `Pod` has it; when something runs there, all pods know its names.

        Raises:
            NodeError: this machine does not do it.
        """
        _make_room(len(self._places) + 1)
        link, hosts = Link(number), self._scratch / pod / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.touch()
        shm = size_of_shm(shm_bytes)
        resolver = hosts.with_name("resolv.conf")
        resolver.write_text(RESOLVER, encoding="ascii")
        inside = ("sh", "-c", POD, "sh", pod, str(hosts), shm, str(resolver))
        with _child(("unshare", *UNSHARE, "--", *inside)) as pid:
            _ip(cable(link, pid), self.router)
            fds = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS}
            self._places[pod] = place = _Place(link, fds, hosts, shm)
        _ip(plug(link), place.enter("net"))
        self._names[pod] = tuple(names)
        self._told = False

    def close(self) -> None:
        """Let go of all namespaces."""
        for place in self._places.values():
            for fd in place.fds.values():
                os.close(fd)
        self._places.clear()
        if self._router_fd >= 0:
            os.close(self._router_fd)
        self._router_fd = -1

    def address(self, pod: str) -> str:
        """The pod's address now."""
        return self._places[pod].link.address

    def enter(self, pod: str, *kinds: str) -> Argv:
        """What runs a program in the pod's namespaces of these kinds (net, mnt, uts, ipc), by default in all."""
        return self._places[pod].enter(*kinds)

    def wrap(self, pod: str, process: Process) -> Process:
        """The same process, in the pod's place: process 1 of a PID namespace, the child of what is started."""
        if not self._told:
            self.tell_names()
        into = ("sh", "-c", 'cd "$0" && exec "$@"', process.cwd or os.getcwd())
        return replace(process, argv=(*self._places[pod].enter(), *into, *self._first, *process.argv))

    def numbers_inside(self, pids: Iterable[int]) -> dict[int, int]:
        """Processes by their numbers as their own pod has them; those that have ended are left out."""
        found: dict[int, int] = {}
        for pid in pids:
            lines = files.text(Path(f"/proc/{pid}/status")).splitlines()
            numbers = next((line.split() for line in lines if line.startswith("NSpid:")), [])
            if len(numbers) > (2 if self._first else 1):
                found[int(numbers[-1])] = pid
        return found

    def move(self, pod: str) -> None:
        """Give the pod another address, which all pods' /etc/hosts then have."""
        place = self._places[pod]
        old, link = place.link, replace(place.link, moves=place.link.moves + 1)
        _ip([("ip", "route", "del", f"{old.address}/32"), *route(link)], self.router)
        _ip([("ip", "addr", "flush", "dev", DEVICE), *plug(link)], place.enter("net"))
        self._places[pod] = replace(place, link=link)
        self.tell_names()

    def cut_off(self, pod: str) -> None:
        """Lose all packets from and to the pod; neither side is told."""
        _ip(partition(self._places[pod].link), self.router)

    def reconnect(self, pod: str) -> None:
        """Undo `cut_off`."""
        _ip(heal(self._places[pod].link), self.router)

    def renew(self, pod: str) -> None:
        """A new pod takes the place of the old one: its /dev/shm is empty."""
        place = self._places[pod]
        _run([(*place.enter("mnt"), "sh", "-c", NEW_SHM, "sh", place.shm)])

    # -- faults -------------------------------------------------------------------------------

    def begin(self, fault: InjectedFault, pod: str | None) -> None:
        """Let it come; `pod` is None for a fault of all pods. Of several partitions at once the first one counts.

        Raises:
            NodeError: it could not be done.
        """
        key = fault.kind, pod
        if not self._lasting[key] or fault.kind != "partition":
            self._change(fault, pod, is_over=False)
        self._lasting[key] += 1

    def end(self, fault: InjectedFault, pod: str | None) -> None:
        """Let it be over; of several at once the last one's end counts. Raises NodeError: it could not be done."""
        key = fault.kind, pod
        self._lasting[key] -= 1
        if not self._lasting[key]:
            self._change(fault, pod, is_over=True)

    def _change(self, fault: InjectedFault, pod: str | None, *, is_over: bool) -> None:
        if fault.kind == "delay dns":
            self._known = is_over
            self.tell_names()
            return
        (self.reconnect if is_over else self.cut_off)(pod or "")

    def tell_names(self) -> None:
        """Write every pod's /etc/hosts, in place: the files are mounted into the pods."""
        self._told = True
        addresses = {pod: place.link.address for pod, place in self._places.items()}
        for pod, place in self._places.items():
            place.hosts.write_text(hosts_file(pod, self._names, addresses, known=self._known), encoding="utf-8")


@contextlib.contextmanager
def _child(argv: Argv) -> Iterator[int]:
    """A process that has said that it is ready; it ends when the block does. Its number."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        if said != "ready":
            child.kill()
            raise NodeError(f"cannot create a pod's namespaces: {shown(said)}")
        yield child.pid


def _ip(commands: Sequence[Argv], enter: Argv = ()) -> None:
    """Several commands of `ip` by one process; those after one that fails are not tried."""
    _run([(*enter, "ip", "-batch", "-")], "".join(f"{' '.join(argv[1:])}\n" for argv in commands))


def _run(commands: Sequence[Argv], text: str = "") -> None:
    for argv in commands:
        done = deadline_subprocess.run(argv, None, COMMAND_S, deadline_subprocess.Streams(text=text))
        if done.code != 0:
            why = done.failure or shown(done.err.strip())
            raise NodeError(f"cannot set up the pods' network: {' '.join(argv)[:200]}: {why}")


def _make_room(pods: int) -> None:
    """Each pod takes some descriptors of ours, beside its containers' pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * len(_KINDS) * pods + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


# -- commands of the network -------------------------------------------------------------------


DEVICE = "eth0"  # in each pod
ROUTER = "169.254.1.1"
SHM_BYTES = 64 * MIB  # what a container's runtime gives a pod that asks for nothing else
_NETWORK, _NETWORKS = 77, 100  # 10.77.0.0/16 is the first of so many: a pod that moves goes to the next

Argv = tuple[str, ...]

# In the namespaces of a pod: $1 the pod's name, $2 its hosts file, $3 the size of its /dev/shm, $4 its resolv.conf.
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
UNSHARE = ("--net", "--mount", "--uts", "--ipc")
# In the router's namespace. Ends with its standard input.
ROUTING = "set -e; ip link set lo up; echo 1 >/proc/sys/net/ipv4/ip_forward; echo ready; exec cat"
_AS_FIRST = (sys.executable, "-I", "-S", str(Path(__file__).with_name("first_process.py")))


def address_of(number: int) -> str:
    """A pod's address, by its number in the job."""
    return Link(number).address


class Link(Struct, frozen=True):
    """Where a pod is plugged into the router."""

    number: int
    moves: int = 0  # how often the pod has got another address

    @property
    def address(self) -> str:
        """The pod's."""
        return pod_values.address_of(self.number, f"10.{_NETWORK + self.moves % _NETWORKS}")

    @property
    def port(self) -> str:
        """The router's end of the cable."""
        return f"port{self.number}"


def cable(link: Link, pid: int) -> list[Argv]:
    """Lay the cable to the pod whose namespace a process has: first at the router's end."""
    port = link.port
    return [
        ("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "addr", "add", f"{ROUTER}/32", "dev", port),
        ("ip", "link", "set", port, "up"),
        *route(link),
    ]


def route(link: Link) -> list[Argv]:
    """The router's way to the pod's address."""
    return [("ip", "route", "add", f"{link.address}/32", "dev", link.port)]


def plug(link: Link) -> list[Argv]:
    """The pod's end of the cable, for its namespace."""
    return [
        ("ip", "addr", "add", f"{link.address}/32", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
        ("ip", "route", "add", ROUTER, "dev", DEVICE, "scope", "link"),
        ("ip", "route", "add", "default", "via", ROUTER),
    ]


def partition(link: Link) -> list[Argv]:
    """Lose all packets from and to a pod; nobody is told."""
    return [
        ("ip", "rule", "add", "from", link.address, "blackhole"),
        ("ip", "route", "replace", "blackhole", f"{link.address}/32"),
    ]


def heal(link: Link) -> list[Argv]:
    """Undo `partition`."""
    return [
        ("ip", "rule", "del", "from", link.address, "blackhole"),
        ("ip", "route", "del", "blackhole", f"{link.address}/32"),
        ("ip", "route", "replace", f"{link.address}/32", "dev", link.port),
    ]


def size_of_shm(size_bytes: int | None) -> str:
    """As `mount` takes it: of what the pod mounts there itself; 0 is without a limit, None is nothing."""
    return str(SHM_BYTES if size_bytes is None else size_bytes) if size_bytes != 0 else "50%"


def off_loopback(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of a pod on loopback as they are in a network of its own: who is told to use lo uses its device."""
    return {name: DEVICE if ON_A_LAPTOP.get(name) == value == "lo" else value for name, value in env.items()}


def hosts_file(own: str, names: Mapping[str, Sequence[str]], addresses: Mapping[str, str], *, known: bool) -> str:
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
