"""Pods with a network, names, /dev/shm and a memory limit of their own: made, entered, disturbed, and gone with us.

Every pod is a network namespace with one address; the router between them is a namespace too, ours. Losing packets
is the router's doing, so that neither side is told, as between machines. The namespaces have no name anywhere: we
hold them open, and when we and the pods' processes have ended, the kernel takes them down.

A tree of cgroups has one owner, so nothing is made in one that belongs to somebody else: it must be the container's
own, or delegated to us (systemd's word, https://systemd.io/CGROUP_DELEGATION). Version 1 knows no delegation.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import cgroup, deadline_subprocess, files
from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import MIB
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import pod_values
from trainer_launch.rehearsal.controllers.local_jobs import ON_A_LAPTOP
from trainer_launch.rehearsal.faults.grammar import Fault

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
    """The pods' network; we are its router, so we have to be in namespaces of our own already."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._places: dict[str, _Place] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._known = self._told = True  # whether pods are to know the others' names, and whether that is written
        self._lasting: Counter[tuple[str, str | None]] = Counter()  # how many faults of a kind a pod suffers now
        _run(_ROUTES)

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
            _ip(cable(link, pid))
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

    def wrap(self, pod: str, process: Process) -> Process:
        """The same process, in the pod's place."""
        if not self._told:
            self._tell_names()
        into = ("sh", "-c", 'cd "$0" && exec "$@"', process.cwd or os.getcwd())
        return replace(process, argv=(*self._places[pod].enter(), *into, *process.argv))

    def renew(self, pod: str) -> None:
        """A new pod takes the place of the old one: its /dev/shm is empty."""
        place = self._places[pod]
        _run([(*place.enter("mnt"), "sh", "-c", NEW_SHM, "sh", place.shm)])

    # -- faults -------------------------------------------------------------------------------

    def begin(self, fault: Fault, pod: str | None) -> None:
        """Let it come; `pod` is None for a fault of all pods. Of several partitions at once the first one counts.

        Raises:
            NodeError: it could not be done.
        """
        key = fault.kind, pod
        if not self._lasting[key] or fault.kind != "partition":
            self._change(fault, pod, is_over=False)
        self._lasting[key] += 1

    def end(self, fault: Fault, pod: str | None) -> None:
        """Let it be over; of several at once the last one's end counts. Raises NodeError: it could not be done."""
        key = fault.kind, pod
        self._lasting[key] -= 1
        if not self._lasting[key]:
            self._change(fault, pod, is_over=True)

    def _change(self, fault: Fault, pod: str | None, *, is_over: bool) -> None:
        if fault.kind == "delay dns":
            self._known = is_over
            self._tell_names()
            return
        place = self._places[pod or ""]
        if fault.kind == "fill shm":
            script = EMPTY_SHM if is_over else FILL_SHM
            _run([(*place.enter("mnt"), "sh", "-c", script, "sh", place.shm)])
        elif fault.kind == "partition":
            _ip((heal if is_over else partition)(place.link))
        elif fault.kind == "slow link":
            _run(fast(place.link) if is_over else slow(place.link, fault.bytes_per_s or 0.0))

    def _tell_names(self) -> None:
        """In place: the files are mounted into the pods."""
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
FILL = "trainer-launch-fault"  # the file that fills /dev/shm
_BURST_S, _BURST_BYTES = 0.1, 128 * 1024  # a segment that is not cut yet has 64 KiB

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
_REMOUNT = "mount --options-mode ignore -o"  # what is listed there now may not be set by a mapped root
# Up to 1 GiB is really written; a larger one is made no larger than what is in it.
FILL_SHM = (
    f"head -c 1073741824 /dev/zero >/dev/shm/{FILL} 2>/dev/null; set -- $(df -kP /dev/shm | tail -n 1); "
    f'[ "$4" -eq 0 ] || {_REMOUNT} "remount,size=$3k" /dev/shm'
)
EMPTY_SHM = f'rm -f /dev/shm/{FILL}; {_REMOUNT} "remount,size=$1" /dev/shm'
UNSHARE = ("--net", "--mount", "--uts", "--ipc")
_ROUTES: list[Argv] = [("ip", "link", "set", "lo", "up"), ("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")]


def address_of(number: int) -> str:
    """A pod's address, by its number in the job."""
    return pod_values.address_of(number, "10.77")


class Link(Struct, frozen=True):
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


def cable(link: Link, pid: int) -> list[Argv]:
    """Lay the cable to the pod whose namespace a process has: first at the router's end."""
    port, address = link.port, link.address
    return [
        ("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "addr", "add", f"{ROUTER}/32", "dev", port),
        ("ip", "link", "set", port, "up"),
        ("ip", "route", "add", f"{address}/32", "dev", port),
    ]


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


def slow(link: Link, bytes_per_s: float) -> list[Argv]:
    """Lose what is sent to or from a pod faster than this."""
    table, burst = f"slow{link.number}", max(_BURST_BYTES, round(bytes_per_s * _BURST_S))
    limit = ("limit", "rate", "over", f"{bytes_per_s:.0f}", "bytes/second", "burst", str(burst), "bytes", "drop")
    return [
        ("nft", "add", "table", "ip", table),
        ("nft", f"add chain ip {table} forward {{ type filter hook forward priority 0; }}"),
        ("nft", "add", "rule", "ip", table, "forward", "ip", "daddr", link.address, *limit),
        ("nft", "add", "rule", "ip", table, "forward", "ip", "saddr", link.address, *limit),
    ]


def fast(link: Link) -> list[Argv]:
    """Undo `slow`."""
    return [("nft", "delete", "table", "ip", f"slow{link.number}")]


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


# -- memory cgroups ----------------------------------------------------------------------------


# How much is used, the limit, and no limit, by the version of cgroups.
_FILES = {1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "-1"), 2: ("memory.current", "memory.max", "max")}
_REST = "trainer-launch-rest"  # where we go ourselves: a group that has groups may have no processes
_ROOM = 2 * MIB  # what a squeezed group may have beyond what it uses; less, and the limit is not taken
_ROUNDS = 20
_SQUEEZE_S, _GONE_S, _PAUSE_S = 20.0, 5.0, 0.005
# Uses up what is left, slowly enough to be ended before it is the largest of all.
_EAT = "import time\nkept = []\nwhile True: kept.append(b'x' * (2 << 20)); time.sleep(0.01)"
_SCOPE = "start it as: systemd-run --user --scope -p Delegate=yes trainer-launch local ..."


def why_not(groups: cgroup.Groups | None = None) -> str:
    """Why no memory cgroup can be made for a pod here, and what to do; empty when it can be tried."""
    groups = cgroup.own_groups() if groups is None else groups
    if not groups.memory:
        return "this machine has no memory cgroups mounted; use kill worker instead"
    home = groups.memory[0]
    if not _is_ours(groups):
        hint = _SCOPE if groups.version == 2 else "use kill worker instead"
        return f"the cgroup {home} belongs to another program; {hint}"
    if groups.version == 2 and "memory" not in files.text(home / "cgroup.controllers").split():
        return f"the cgroup {home} has no memory controller; {_SCOPE}"
    if not os.access(home / "cgroup.procs", os.W_OK) or os.statvfs(home).f_flag & os.ST_RDONLY:
        return f"the cgroup {home} is not writable; run in a --privileged container, or {_SCOPE}"
    return ""


class MemoryGroups:
    """The groups of one rehearsal."""

    def __init__(self) -> None:
        groups = cgroup.own_groups()
        self._version, self._home = groups.version, groups.memory[0]
        self._own = self._home / f"trainer-launch-{os.getpid()}"
        self._moved = False
        self._pods: dict[str, Path] = {}
        try:
            if _has_to_be_left(groups):
                (self._home / _REST).mkdir(exist_ok=True)
                self._move(self._home, self._home / _REST)
                self._moved = True
            self._divide(self._home)
            self._own.mkdir()
            self._divide(self._own)
        except OSError as problem:
            self.close()
            raise NodeError(f"cannot create a memory cgroup in {self._home}: {problem}") from None

    def wrap(self, pod: str, process: Process) -> Process:
        """The same process, in its pod's group from its beginning. Raises NodeError: the group cannot be made."""
        group = self._pods[pod] = self._own / pod
        try:
            group.mkdir(exist_ok=True)
        except OSError as problem:
            raise NodeError(f"cannot create a memory cgroup for {pod}: {problem}") from None
        return replace(process, argv=(*_entering(group), *process.argv))

    def squeeze(self, pod: str) -> None:
        """Allow no more memory and have it used up, until the kernel has killed for it; then allow all again.

        Raises:
            NodeError: nobody was killed.
        """
        group = self._pods.get(pod)
        if group is None:
            raise NodeError(f"{pod} has not started")
        used, limit, no_limit = _FILES[self._version]
        before, end_s = _kills(group), time.monotonic() + _SQUEEZE_S
        try:
            (group / limit).write_text(str(int(files.text(group / used)) + _ROOM))
            argv = (*_entering(group), sys.executable, "-I", "-S", "-c", _EAT)
            with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as eater:
                while _kills(group) == before and time.monotonic() < end_s and eater.poll() is None:
                    time.sleep(_PAUSE_S)
                (group / limit).write_text(no_limit)
                eater.kill()
        except (OSError, ValueError) as problem:
            raise NodeError(f"cannot limit the memory of {pod}: {problem}") from None
        finally:
            with contextlib.suppress(OSError):
                (group / limit).write_text(no_limit)
        if _kills(group) == before:
            raise NodeError(f"the kernel killed no process of {pod}, although its memory limit was reached")

    def close(self) -> None:
        """Leave the tree as it was; whatever still runs in the groups is killed."""
        for group in (*self._pods.values(), self._own):
            for pid in _pids(group):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _remove(group)
        if self._moved:
            with contextlib.suppress(OSError):
                (self._home / "cgroup.subtree_control").write_text("-memory")
            with contextlib.suppress(OSError):
                self._move(self._home / _REST, self._home)
            _remove(self._home / _REST)

    def _divide(self, group: Path) -> None:
        if self._version == 2:
            (group / "cgroup.subtree_control").write_text("+memory")

    def _move(self, of: Path, to: Path) -> None:
        for _ in range(_ROUNDS):  # what was forked meanwhile is found the next time
            pids = list(_pids(of))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    (to / "cgroup.procs").write_text(str(pid))
            if not pids:
                break


def _entering(group: Path) -> Argv:
    """What runs a program in the group from its beginning."""
    return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"))


def _remove(group: Path) -> None:
    """An empty group; who was killed in it takes a moment to go."""
    end_s = time.monotonic() + _GONE_S
    while group.is_dir() and time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(_PAUSE_S)


def _is_ours(groups: cgroup.Groups) -> bool:
    """The root of what we see, as in a container, or marked as delegated."""
    if len(groups.memory) == 1:
        return True
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(groups.memory[0], name) == b"1":
                return True
    return False


def _has_to_be_left(groups: cgroup.Groups) -> bool:
    """Whether a group that is divided may have no processes itself: in version 2, but for the machine's root."""
    home = groups.memory[0]
    return groups.version == 2 and not (len(groups.memory) == 1 and not (home / "cgroup.type").exists())


def _pids(group: Path) -> Iterator[int]:
    yield from map(int, files.text(group / "cgroup.procs").split())


def _kills(group: Path) -> int:
    version = 2 if (group / "memory.events").exists() else 1
    return cgroup.oom_kills(cgroup.Groups(version=version, memory=(group,))) or 0
