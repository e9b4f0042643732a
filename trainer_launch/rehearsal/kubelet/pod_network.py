"""Pods with a network, names, a host name and /dev/shm of their own: made, entered, disturbed, and gone with us.

The namespaces have no name anywhere: we hold them open, the pods' processes are in them, and when all these have
ended, killed or not, the kernel takes them down. What the commands are is said in `rehearsal.wiring`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.faults import network_commands
from trainer_launch.rehearsal.faults.fault import Fault
from trainer_launch.rehearsal.faults.network_commands import Argv, Outlet

COMMAND_S = 20.0  # for one command of a moment
_OTHERS = 256  # descriptors that all else takes
_KINDS = ("net", "mnt", "uts", "ipc")
_OPTIONS = {"net": "--net", "mnt": "--mount", "uts": "--uts", "ipc": "--ipc"}


@dataclass(frozen=True, slots=True)
class _Place:
    """One pod's namespaces, which we hold open."""

    outlet: Outlet
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
        self._known, self._told = (
            True,
            True,
        )  # whether pods are to know the others' names, and whether that is written
        self._lasting: Counter[tuple[str, str | None]] = Counter()  # how many faults of a kind a pod suffers now
        _run(network_commands.router())

    def add(self, pod: str, number: int, names: Sequence[str], shm_bytes: int | None = None) -> None:
        """Give a pod its place, `shm_bytes` as `Pod` has it; when something runs there, all pods know its names.

        Raises:
            NodeError: this machine does not do it.
        """
        _make_room(len(self._places) + 1)
        outlet, hosts = Outlet(number), self._scratch / pod / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.touch()
        shm = network_commands.size_of_shm(shm_bytes)
        resolver = hosts.with_name("resolv.conf")
        resolver.write_text(network_commands.RESOLVER, encoding="ascii")
        inside = ("sh", "-c", network_commands.POD, "sh", pod, str(hosts), shm, str(resolver))
        with _child(("unshare", *network_commands.UNSHARE, "--", *inside)) as pid:
            _ip(network_commands.cable(outlet, pid))
            fds = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS}
            self._places[pod] = place = _Place(outlet, fds, hosts, shm)
        _ip(network_commands.plug(outlet), place.enter("net"))
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
        _run([(*place.enter("mnt"), "sh", "-c", network_commands.NEW_SHM, "sh", place.shm)])

    # -- faults -------------------------------------------------------------------------------

    def begin(self, fault: Fault, pod: str | None) -> None:
        """Let it come; `pod` is None for a fault of all pods.

        Raises:
            NodeError: it could not be done.
        """
        self._do(fault, pod, is_over=False)

    def end(self, fault: Fault, pod: str | None) -> None:
        """Let it be over.

        Raises:
            NodeError: it could not be done.
        """
        self._do(fault, pod, is_over=True)

    def _do(self, fault: Fault, pod: str | None, *, is_over: bool) -> None:
        key = fault.kind, pod
        if is_over:
            self._lasting[key] -= 1
        if self._lasting[key] > 0 and (is_over or fault.kind == "partition"):
            self._lasting[key] += not is_over
            return  # of several at once the last one's end counts
        self._change(fault, pod, is_over=is_over)
        self._lasting[key] += not is_over

    def _change(self, fault: Fault, pod: str | None, *, is_over: bool) -> None:
        if fault.kind == "delay dns":
            self._known = is_over
            self._tell_names()
            return
        place = self._places[pod or ""]
        if fault.kind == "fill shm":
            script = network_commands.EMPTY_SHM if is_over else network_commands.FILL_SHM
            _run([(*place.enter("mnt"), "sh", "-c", script, "sh", place.shm)])
        elif fault.kind == "partition":
            _ip((network_commands.heal if is_over else network_commands.partition)(place.outlet))
        elif fault.kind == "slow link":
            limit = fault.bytes_per_s or 0.0
            _run(network_commands.fast(place.outlet) if is_over else network_commands.slow(place.outlet, limit))

    def _tell_names(self) -> None:
        """In place: the files are mounted into the pods."""
        self._told = True
        addresses = {pod: place.outlet.address for pod, place in self._places.items()}
        for pod, place in self._places.items():
            place.hosts.write_text(
                network_commands.hosts(pod, self._names, addresses, known=self._known), encoding="utf-8"
            )


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
        try:
            done = subprocess.run(
                argv, input=text, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise NodeError(f"cannot set up the pods' network: {' '.join(argv)[:200]}: {problem}") from None
        if done.returncode != 0:
            raise NodeError(
                f"cannot set up the pods' network: {' '.join(argv)[:200]}: {shown(done.stderr.strip())}"
            )


def _make_room(pods: int) -> None:
    """Each pod takes some descriptors of ours, beside its containers' pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * len(_KINDS) * pods + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
