"""Pods with a network, names and /dev/shm of their own: made, entered, disturbed, and gone with us.

Every pod is a network namespace with one address; the router between them is a namespace too, and loses packets
without an error for either side, as between machines. The namespaces have no name anywhere: we hold them open, and
when we and the pods' processes have ended, the kernel takes them down. A container is process 1 of a PID namespace,
where the kernel allows that. All of it needs root, or a user namespace: `capability` tries.
Tests of this project put their own pods here, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, files, runtime_directory
from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import MIB
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import pod_values
from trainer_launch.rehearsal.controllers.local_jobs import RUN

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "umount", "hostname", "sh")
AS_USER = ("--user", "--map-root-user")
_PACKAGES = {"ip": "iproute2", "hostname": "hostname"}  # Debian's; all else is of util-linux
COMMAND_S = 20.0  # for one command of a moment
DEVICE = "eth0"  # in each pod
ROUTER = "169.254.1.1"
SHM_BYTES = 64 * MIB  # what a container's runtime gives a pod that asks for nothing else
NETWORK = "10.77"
_OPTIONS = {"net": "--net", "mnt": "--mount", "uts": "--uts", "ipc": "--ipc"}
UNSHARE = tuple(_OPTIONS.values())
_CAPABILITY_TEST = """set -e
ip link set lo up
hostname capability-test
ip link add port0 type veth peer name port1
echo 1 >/proc/sys/net/ipv4/ip_forward
ip rule add from 10.77.0.2 blackhole
mount --bind /etc/hosts /etc/hosts
mount -t tmpfs -o mode=1777,size=1m shm /dev/shm
"""
# In the namespaces of a pod: $1 the pod's name, $2 its hosts file, $3 the size of its /dev/shm, $4 its resolv.conf.
# Ends with its standard input.
POD = (
    'set -e; ip link set lo up; hostname "$1"; mount --bind "$2" /etc/hosts; '
    '[ ! -e /etc/resolv.conf ] || mount --bind "$4" /etc/resolv.conf; '
    'mount -t tmpfs -o "mode=1777,size=$3" shm /dev/shm; echo ready; exec cat'
)
RESOLVER = "nameserver 127.0.0.1\noptions attempts:1\n"  # no server: a name that is in no file is refused at once
# In a pod that lives already. $1: the size of its /dev/shm.
NEW_SHM = 'umount -l /dev/shm && mount -t tmpfs -o "mode=1777,size=$1" shm /dev/shm'
# In the router's namespace. Ends with its standard input.
ROUTING = "set -e; ip link set lo up; echo 1 >/proc/sys/net/ipv4/ip_forward; echo ready; exec cat"
_AS_FIRST = (sys.executable, "-I", "-S", str(Path(__file__).with_name("first_process.py")))

Argv = tuple[str, ...]


class Capability(Struct, frozen=True, kw_only=True):
    """Whether this machine gives pods a network of their own."""

    why_not: str = ""  # why it does not, and what to do
    as_user: bool = False  # only with a namespace of users around the pods


def capability() -> Capability:
    """Try whether pods can have a network, names and /dev/shm of their own here."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = dict.fromkeys(_PACKAGES.get(program, "util-linux") for program in missing)
        return Capability(why_not=f"{' and '.join(missing)} not found in PATH; install {' and '.join(packages)}")
    why = _try(())
    as_user = bool(why) and os.geteuid() != 0
    why = _try(AS_USER) if as_user else why
    advice = f"{why}; run it as root, or in a --privileged container" if why else ""
    return Capability(why_not=advice, as_user=as_user)


def _try(flags: Sequence[str]) -> str:
    """The reason why new namespaces do not work; "" when all does."""
    argv = ("unshare", *flags, *UNSHARE, "--", "sh", "-c", _CAPABILITY_TEST)
    done = deadline_subprocess.run(argv, None, COMMAND_S)
    if done.code == 0:
        return ""
    first = next(iter(done.err.strip().splitlines()), done.failure or f"exit code {done.code}")
    return f"network namespaces are not permitted here ({first[:120]})"


def is_inside() -> bool:
    """Whether this process has entered its namespaces."""
    return os.environ.get(runtime_directory.INSIDE) == str(os.getpid())


def enter(*, as_user: bool) -> None:
    """Become the same command in namespaces of its own; does not return. Signals and terminal stay as they are."""
    flags = (*(AS_USER if as_user else ()), "--net", "--mount")
    argv = ("unshare", *flags, "--", sys.executable, "-c", RUN, *sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, runtime_directory.INSIDE: str(os.getpid())})


class _Place(Struct, frozen=True):
    """The namespaces of a pod, which we hold open, and where it is plugged into the router."""

    address: str
    port: str  # the router's end of the cable
    fds: Mapping[str, int]
    hosts: Path
    shm: str  # its size

    def enter(self, *kinds: str) -> Argv:
        """The words that run a program in them, all of them by default; the working directory is lost."""
        options = (f"{_OPTIONS[kind]}=/proc/{os.getpid()}/fd/{self.fds[kind]}" for kind in kinds or _OPTIONS)
        return ("nsenter", *options, "--")

    def plug(self) -> list[str]:
        """Commands of `ip` for the pod's end of the cable."""
        return [
            f"addr add {self.address}/32 dev {DEVICE}",
            f"link set {DEVICE} up",
            f"route add {ROUTER} dev {DEVICE} scope link",
            f"route add default via {ROUTER}",
        ]


def address_of(number: int) -> str:
    """A pod's address, by its number in the job."""
    return pod_values.address_of(number, NETWORK)


class OwnNetwork:
    """The pods' network and the router between them; needs root, or a user namespace in which we are root."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        with _child(("unshare", "--net", "--", "sh", "-c", ROUTING)) as pid:
            self._router_fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        # The words that run a program in the router's place.
        self.router: Argv = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self._router_fd}", "--")
        tried = deadline_subprocess.run((*_AS_FIRST, "true"), None, COMMAND_S)
        self._first: Argv = _AS_FIRST if tried.code == 0 else ()
        self._places: dict[str, _Place] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._has_names = self._is_written = (
            True  # whether pods have the others' names, and whether that is written
        )
        self._cut_off: set[str] = set()

    def add(self, pod: str, number: int, names: Sequence[str], shm_bytes: int | None = None) -> None:
        """Give a pod its place; when something runs there, all pods know its names.

        Its /dev/shm has `shm_bytes`: 0 is without a limit, None a container runtime's default.

        Raises:
            NodeError: this machine does not do it.
        """
        hosts = self._scratch / pod / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.touch()
        shm = "50%" if shm_bytes == 0 else str(SHM_BYTES if shm_bytes is None else shm_bytes)
        resolver = hosts.with_name("resolv.conf")
        resolver.write_text(RESOLVER, encoding="ascii")
        inside = ("sh", "-c", POD, "sh", pod, str(hosts), shm, str(resolver))
        with _child(("unshare", *UNSHARE, "--", *inside)) as pid:
            fds = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _OPTIONS}
            self._places[pod] = place = _Place(address_of(number), f"port{number}", fds, hosts, shm)
            self._route(
                f"link add {place.port} type veth peer name {DEVICE} netns {pid}",
                f"addr add {ROUTER}/32 dev {place.port}",
                f"link set {place.port} up",
                f"route add {place.address}/32 dev {place.port}",
            )
        _ip(place.enter("net"), place.plug())
        self._names[pod] = tuple(names)
        self._is_written = False

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
        return self._places[pod].address

    def enter(self, pod: str, *kinds: str) -> Argv:
        """The words that run a program in these namespaces of the pod (net, mnt, uts, ipc), by default in all."""
        return self._places[pod].enter(*kinds)

    def wrap(self, pod: str, process: Process) -> Process:
        """The same process, in the pod's place: process 1 of a PID namespace, the child of what is started."""
        if not self._is_written:
            self.write_names()
        into = ("sh", "-c", 'cd "$0" && exec "$@"', process.cwd or os.getcwd())
        return replace(process, argv=(*self._places[pod].enter(), *into, *self._first, *process.argv))

    def numbers_inside(self, pids: Iterable[int]) -> dict[int, int]:
        """Processes by their numbers as their own pod has them; those that have ended are left out."""
        inside: dict[int, int] = {}
        for pid in pids:
            lines = files.text(Path(f"/proc/{pid}/status")).splitlines()
            numbers = next((line.split() for line in lines if line.startswith("NSpid:")), [])
            if len(numbers) > (2 if self._first else 1):
                inside[int(numbers[-1])] = pid
        return inside

    def cut_off(self, pod: str) -> None:
        """Lose all packets from and to the pod; neither side gets an error. Raises NodeError: not done."""
        if pod in self._cut_off:
            return
        self._cut_off.add(pod)
        address = self._places[pod].address
        self._route(f"rule add from {address} blackhole", f"route replace blackhole {address}/32")

    def reconnect(self, pod: str) -> None:
        """Undo `cut_off`. Raises NodeError: it could not be done."""
        if pod not in self._cut_off:
            return
        self._cut_off.remove(pod)
        place = self._places[pod]
        self._route(
            f"rule del from {place.address} blackhole",
            f"route del blackhole {place.address}/32",
            f"route replace {place.address}/32 dev {place.port}",
        )

    def _route(self, *commands: str) -> None:
        """Commands of `ip` for the router."""
        _ip(self.router, commands)

    def renew(self, pod: str) -> None:
        """A new pod takes the place of the old one: its /dev/shm is empty."""
        place = self._places[pod]
        _run((*place.enter("mnt"), "sh", "-c", NEW_SHM, "sh", place.shm))

    def hide_names(self, hidden: bool) -> None:
        """Let no pod find the others by name, or let all find each other again."""
        self._has_names = not hidden
        self.write_names()

    def write_names(self) -> None:
        """Write every pod's /etc/hosts, in place: the files are mounted into the pods."""
        self._is_written = True
        addresses = {pod: place.address for pod, place in self._places.items()}
        for pod, place in self._places.items():
            place.hosts.write_text(
                hosts_file(pod, self._names, addresses, has_names=self._has_names), encoding="utf-8"
            )


@contextlib.contextmanager
def _child(argv: Argv) -> Iterator[int]:
    """The pid of a process that is ready; it ends when the block does."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        if line != "ready":
            child.kill()
            raise NodeError(f"cannot create a pod's namespaces: {shown(line)}")
        yield child.pid


def _ip(enter: Argv, commands: Iterable[str]) -> None:
    """Several commands of `ip` by one process; those after one that fails are not tried."""
    _run((*enter, "ip", "-batch", "-"), "".join(f"{command}\n" for command in commands))


def _run(argv: Argv, text: str = "") -> None:
    done = deadline_subprocess.run(argv, None, COMMAND_S, deadline_subprocess.Streams(text=text))
    if done.code != 0:
        why = done.failure or shown(done.err.strip())
        raise NodeError(f"cannot set up the pods' network: {' '.join(argv)[:200]}: {why}")


def hosts_file(
    own: str, names: Mapping[str, Sequence[str]], addresses: Mapping[str, str], *, has_names: bool
) -> str:
    """/etc/hosts of the pod called `own`, which has its own name only, or with `has_names` those of all pods."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for pod in names if has_names else (own,):
        whole = [f"{name}.cluster.local" for name in names[pod] if name.endswith(".svc")]
        lines.append(" ".join(dict.fromkeys([addresses[pod], *names[pod], *whole, *([pod] if pod == own else [])])))
    return "".join(f"{line}\n" for line in lines)
