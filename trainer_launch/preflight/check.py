"""Checks, the container that they look at, and how they are run.

A check never prints, and does not raise because the world is bad. Should it raise nevertheless, or take longer than
it may, its finding is "unknown". All run at once, each in a thread that cannot keep the launcher alive; children do
what could hang in the kernel.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, machine, network, shm
from trainer_launch.host.deadline_subprocess import NO_THREAD, begin_thread
from trainer_launch.host.machine import Limits
from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model import Host, Job, Topology, removed
from trainer_launch.model.findings import Fault, Finding, Report, Status
from trainer_launch.model.settings import Settings
from trainer_launch.planning import engines
from trainer_launch.planning.command import Command
from trainer_launch.planning.interfaces import NodeNetwork, has_remote_peers
from trainer_launch.planning.job import hosts_no_rank, place
from trainer_launch.planning.reading import Reading, route_to
from trainer_launch.planning.shared_memory import Need
from trainer_launch.preflight.gpu_collect import LOAD_S, Cards, collect
from trainer_launch.preflight.rules import Observed, judged

LIMIT_S = 5.0  # for a check that does not say otherwise
_THREAD = "check "  # and the check's name
_NO_LIMITS = Limits(nofile_soft=None, nofile_hard=None, memlock_bytes=None)
_ORDER = (Status.SKIPPED, Status.PASS, Status.UNKNOWN, Status.WARN, Status.FAIL)
_states: dict[str, Status | None] = {}
Context = TypeVar("Context")
_About = TypeVar("_About")
_Result = TypeVar("_Result")
_Output: TypeAlias = Finding | Observed


class Where(str, Enum):
    """Where a check runs, and so what it gets to see."""

    EXTERNAL = "external"  # in each pod, before all others: a Subject
    CONTAINER = "container"  # in each pod: a Subject
    GPU = "gpu"  # likewise, if it has GPUs
    CLUSTER = "cluster"  # on node 0, when all nodes have reported: a Cluster
    MPI = "mpi"  # in an MPI job's launcher: its hosts' answers


class Check(Struct, Generic[Context], frozen=True, kw_only=True):
    """A check, as registry.py lists them."""

    id: str  # what --only and --policy take, and findings have
    title: str  # what a PASS means
    run: Callable[[Context], Iterable[Finding]]  # checks that share it are run once
    where: Where = Where.CONTAINER
    needs_load: bool = False  # GPUs at work
    is_late: bool = False  # it looks when all nodes have met
    limit_s: Callable[[Context], float] = lambda context: LIMIT_S

    def passed(self, text: str, **more: Any) -> Finding:
        """Nothing is wrong."""
        return Finding(check=self.id, status=Status.PASS, text=text, **more)

    def skipped(self, text: str, **more: Any) -> Finding:
        """The check means nothing here."""
        return Finding(check=self.id, status=Status.SKIPPED, text=text, **more)

    def unknown(self, text: str, **more: Any) -> Finding:
        """The fact could not be read."""
        return Finding(check=self.id, status=Status.UNKNOWN, text=text, **more)

    def found(self, fact: str, text: str, **more: Any) -> Finding:
        """What the rule of this fact makes of it."""
        return next(judged(self.id, [Observed(facts={fact: text or "no reason was given"}, more=more)]))

    def bad(self, fault: Fault | None, text: str, **more: Any) -> Finding:
        """A failure by somebody's fault, or a warning where it is nobody's. The job mends what is its own fault."""
        status, remedy = Status.WARN if fault is None else Status.FAIL, "FIX_JOB" if fault is Fault.JOB else ""
        return Finding(check=self.id, status=status, fault=fault, text=text, **{"remedy": remedy, **more})


def check(
    name: str,
    where: Where = Where.CONTAINER,
    *,
    needs_load: bool = False,
    is_late: bool = False,
    limit_s: Callable[[Any], float] = lambda context: LIMIT_S,
) -> Callable[[Callable[[Context], _Output | Iterable[_Output]]], Check[Context]]:
    """Make a check of the function that follows; the first line of its docstring is the title.

    The function gives findings, or observations that the rules of this name judge.
    """

    def made(run: Callable[[Context], _Output | Iterable[_Output]]) -> Check[Context]:
        def findings(context: Context) -> tuple[Finding, ...]:
            result = run(context)
            outputs = [result] if isinstance(result, Finding | Observed) else list(result)
            ready = [output for output in outputs if isinstance(output, Finding)]
            return (*ready, *judged(name, [output for output in outputs if isinstance(output, Observed)]))

        title, how = (run.__doc__ or "").partition("\n")[0], {"needs_load": needs_load, "is_late": is_late}
        return Check(id=name, title=title, run=findings, where=where, limit_s=limit_s, **how)

    return made


class Subject(Struct, frozen=True, kw_only=True):
    """A container of a job. The defaults are those of a healthy container."""

    job: Job
    host: Host
    topology: Topology
    command: Command | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    is_torch: bool = True  # torch elastic runs the command, so gloo may be used
    deadline_s: float = 0.0  # for what may appear later, such as a peer's name
    ends_at_s: float | None = None  # by the monotonic clock: what hangs is given up then; None: no deadline
    external_check: str | None = None  # a site's own command
    storage: tuple[str, ...] = ()
    shm_size: str = "auto"  # as --shm-size has it

    limits: Limits = _NO_LIMITS
    pids: tuple[int, int] | None = None  # the limit, and how many it still allows
    interfaces: tuple[Interface, ...] = ()
    route: Callable[[], str] = lambda: ""  # which of several interfaces leads to node 0
    adapters: tuple[AdapterPort, ...] = ()
    has_rdma: bool = False  # the container was given RDMA devices
    port_errors: Mapping[tuple[str, int, str], int] | None = None  # that its ports had before pairs were tested
    burn_s: float = 0.0  # how long GPUs are heated
    cards: Cards | None = None  # NVIDIA's GPUs, which children look at; None: there is none

    lookup: network.Lookup = network.lookup
    write_problem: Callable[[int], int | None] = shm.write_error
    count_errors: Callable[[], Mapping[tuple[str, int, str], int]] = network.port_errors
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
    def shm_need(self) -> Need:
        """The shared memory that this node's workers may need."""
        return Need(
            workers=0 if hosts_no_rank(self.job) else self.workers,
            on_gpus=self.host.gpus.cuda > 0,
            is_mpi=self.job.engine in ("mpirun", "sshd"),
        )

    @property
    def test_env(self) -> Mapping[str, str]:
        """The environment of tests, as of the job's workers: without room in /dev/shm, GPUs meet by other ways."""
        free = self.host.shm_free_bytes
        is_short = free is not None and free < self.shm_need.least_bytes
        return {"NCCL_SHM_DISABLE": "1", **self.env} if is_short else self.env

    @property
    def ranks(self) -> int:
        """Processes in the job, at most."""
        return self.workers * (self.topology.nodes.max if self.topology.nodes else 1)

    @property
    def network(self) -> NodeNetwork:
        """The network as workers see it; the own name is looked up."""
        addresses: tuple[str, ...] = ()
        why_none = ""
        try:
            addresses = tuple(self.lookup(self.host.hostname))
        except OSError as problem:
            why_none = str(problem.strerror or problem)
        node = NodeNetwork(
            hostname=self.host.hostname,
            addresses=addresses,
            why_none=why_none,
            interfaces=self.interfaces,
            env=self.env,
            has_remote_peers=self.has_remote_peers,
            is_home=self.topology.is_coordinator,
            needs_gloo=self.needs_gloo and self.ranks != 1,
            needs_nccl=self.host.gpus.cuda > 0 and self.ranks != 1,
        )
        return replace(node, route=self.route()) if node.usable[1:] else node

    @property
    def needs_gloo(self) -> bool:
        """Whether torch has nothing but gloo here: no accelerator, of whatever maker."""
        return self.is_torch and not self.may_use_gpus and not self.host.gpus.count

    @property
    def may_use_gpus(self) -> bool:
        """Whether the job's workers may have GPUs, also where this container, an init container, was given none."""
        promised = self.env.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("", "void", "none")
        return self.host.gpus.cuda > 0 or promised or self.job.nproc_per_node == "gpu"

    @property
    def has_peers(self) -> bool:
        """Whether there are other nodes, or may be."""
        return self.topology.pods != 1

    @property
    def has_remote_peers(self) -> bool:
        """Whether other nodes may be on other machines; no where they meet at a loopback address."""
        return has_remote_peers(self.topology)


def subject_of(reading: Reading, settings: Settings) -> Subject:
    """The container to check, without network and GPUs.

    Raises:
        LaunchError: this node has no place in the job.
    """
    job, command = reading.job, reading.command
    folders = tuple(filter(None, (settings.storage or "").split(",")))
    if any(path.startswith("shared:") for path in folders):
        removed.refuse("--storage shared:PATH")
    is_torch = job.engine in (None, "torchrun")
    if command is not None:
        is_torch = engines.pick(job, command, settings.engine)[0].name in engines.OF_TORCH
    return Subject(
        job=job,
        host=reading.host,
        topology=place(job, reading.host),
        command=command,
        env=reading.pod.env,
        is_torch=is_torch,
        deadline_s=settings.wait_timeout,
        ends_at_s=time.monotonic() + settings.wait_timeout,
        shm_size=settings.shm_size,
        burn_s=settings.gpu_burn,
        external_check=settings.external_check,
        storage=folders,
        limits=machine.process_limits(),
        pids=machine.pids_left(machine.own_groups()),
        has_rdma=network.may_use_rdma(),
    )


def with_gpus(subject: Subject, level: str) -> Subject:
    """Add the GPUs; nothing is asked of them yet."""
    gpus, command = subject.host.gpus, subject.command
    if not gpus.count or not gpus.is_nvidia:
        return subject
    python = command.python[0] if command is not None and command.python else sys.executable
    is_short = gpus.count > subject.host.cpus.usable
    about = (subject.test_env, python, level, gpus.count, subject.left_s, subject.burn_s)
    made = functools.partial(collect, *about, is_short_of_cpus=is_short)
    return replace(subject, cards=Cards(made, level, subject.burn_s + is_short * LOAD_S))


def with_network(subject: Subject) -> Subject:
    """Add what a pod's containers share."""
    here = network.interfaces()
    return replace(
        subject,
        interfaces=here,
        route=functools.cache(functools.partial(route_to, subject.topology.coordinator, here)),
        adapters=network.adapter_ports(),
    )


def at_once(about: Sequence[_About], work: Callable[[_About], _Result], most: int) -> dict[_About, _Result]:
    """The results of `work`, which may block, for each: in threads, at most so many at a time."""
    with ThreadPoolExecutor(most) as pool:
        return dict(zip(about, pool.map(work, about), strict=True))


def run(subject: Subject, checks: Sequence[Check[Subject]], limit_s: float | None = None) -> Report:
    """Check the subject; `limit_s` holds for every check, in place of its own limit."""
    began_s = time.monotonic()
    findings: dict[str, tuple[Finding, ...]] = {}

    def begin(check: Check[Subject]) -> threading.Thread | None:
        return begin_thread(f"{_THREAD}{check.id}", _judge, check, subject, findings)

    for check, begun in [(check, begin(check)) for check in checks]:
        thread = begun or begin(check)  # where no more were allowed before, another may have ended
        most_s = check.limit_s(subject) if limit_s is None else limit_s
        if thread is not None:
            thread.join(max(0.0, began_s + most_s - time.monotonic()))
        why = NO_THREAD if thread is None else f"it did not finish within {most_s:g} s"
        findings.setdefault(check.id, (check.unknown(why, took_s=time.monotonic() - began_s),))
    ordered = tuple(finding for check in checks for finding in findings[check.id])
    return Report(findings=ordered, took_s=time.monotonic() - began_s)


def _judge(check: Check[Subject], subject: Subject, findings: dict[str, tuple[Finding, ...]]) -> None:
    began_s = time.monotonic()
    _states[check.id] = None
    try:
        results = tuple(check.run(subject))
    except Exception as problem:  # noqa: BLE001  a check that is wrong must not stop the job
        results = (check.unknown(f"internal error in this check: {type(problem).__name__}: {problem}"),)
    findings.setdefault(check.id, tuple(replace(result, took_s=time.monotonic() - began_s) for result in results))
    _states[check.id] = max((result.status for result in results), key=_ORDER.index, default=Status.SKIPPED)


def states() -> dict[str, Status | None]:
    """The worst status of each check that has begun; None: it has not ended yet."""
    return dict(_states)
