"""What a check looks at: values that were captured once, and the few ways it has to act."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from trainer_launch.host import cgroup, deadline_subprocess, dns, network, shm
from trainer_launch.host.cgroup import Limits
from trainer_launch.host.cgroup import process_limits as read_limits
from trainer_launch.host.network import AdapterPort, Interface, Route
from trainer_launch.model import Host, Job, Topology
from trainer_launch.planning.command import Command
from trainer_launch.preflight.gpu.devices import Cards, cards

_HOSTS_FILE = "etc/hosts"
_HOSTS_BYTES = 1 << 20
_NO_LIMITS = Limits(nofile_soft=None, nofile_hard=None, memlock_bytes=None, ephemeral_ports=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One container of a job. Without further words, a container in which all is well."""

    job: Job
    host: Host
    topology: Topology
    command: Command | None = None
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_torch: bool = True  # torch elastic runs the command, so gloo may be used
    deadline_s: float = 0.0  # for what may appear later, such as a peer's name
    ends_at_s: float | None = None  # by the monotonic clock: what hangs is given up then; None: nobody says
    storage: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()  # those of them that all nodes have to share
    shm_size: str = "auto"  # as --shm-size has it

    limits: Limits = _NO_LIMITS
    pids: tuple[int, int] | None = None  # the limit, and how many it still allows
    interfaces: tuple[Interface, ...] = ()
    adapters: tuple[AdapterPort, ...] = ()
    has_rdma: bool = False  # the container was given RDMA devices
    hosts_file: str = ""
    cards: Cards | None = None  # NVIDIA's GPUs, which children look at; None: there is none

    lookup: dns.Lookup = dns.lookup
    ask: Callable[[str, float], dns.Answer] = dns.ask
    route_to: Callable[[str], Route] = network.route_to
    port_trouble: Callable[[int], tuple[int, str] | None] = network.port_trouble
    write_trouble: Callable[[int], int | None] = shm.write_trouble
    leftovers: Callable[[], tuple[shm.Segment, ...]] = shm.unheld
    try_out: Callable[[str, str, float], deadline_subprocess.Tried] = deadline_subprocess.try_out

    def left_s(self, least_s: float, most_s: float) -> float:
        """The time until the deadline, within bounds: what works is never given up before `least_s`."""
        left_s = most_s if self.ends_at_s is None else self.ends_at_s - time.monotonic()
        return min(most_s, max(least_s, left_s))

    @property
    def workers(self) -> int:
        """Processes on this node."""
        return self.topology.local_world_size or 1

    @property
    def ranks(self) -> int:
        """Processes in the job, at most."""
        return self.workers * (self.topology.nodes.max if self.topology.nodes else 1)

    @property
    def may_use_gpus(self) -> bool:
        """Whether the job's workers may have GPUs, also where this container, an init container, was given none."""
        promised = self.env.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("", "void", "none")
        return self.host.gpus.count > 0 or promised or self.job.nproc_per_node == "gpu"

    @property
    def has_peers(self) -> bool:
        """Whether there are other nodes, or may be."""
        return self.topology.nodes is None or self.topology.nodes.max > 1

    @property
    def has_remote_peers(self) -> bool:
        """Whether other nodes may be on other machines; no where they meet at a loopback address."""
        coordinator = self.topology.coordinator
        return self.has_peers and not (coordinator is not None and coordinator.is_loopback)


def with_container(subject: Subject, root: Path = Path("/")) -> Subject:
    """Add what each container has of its own."""
    return replace(
        subject,
        limits=read_limits(root),
        pids=cgroup.pids_left(cgroup.own_groups(root)),
        has_rdma=network.may_use_rdma(root),
    )


def with_gpus(subject: Subject, level: str) -> Subject:
    """Add the GPUs; nothing is asked of them yet."""
    gpus, command = subject.host.gpus, subject.command
    if not gpus.count or not gpus.is_nvidia:
        return subject
    python = command.python[0] if command is not None and command.python else sys.executable
    return replace(subject, cards=cards(subject.env, python, level, gpus.count, subject.left_s))


def with_network(subject: Subject, root: Path = Path("/")) -> Subject:
    """Add what a pod's containers share."""
    return replace(
        subject,
        interfaces=network.interfaces(),
        adapters=network.adapter_ports(root),
        hosts_file=_hosts(root / _HOSTS_FILE),
    )


def _hosts(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_HOSTS_BYTES)
    except OSError:
        return ""
