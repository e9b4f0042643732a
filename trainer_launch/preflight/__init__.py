"""Should this pod start at all? Each check is a file here, and a line in CHECKS.

A check never prints, and does not raise because the world is bad; should it raise nevertheless, or take longer than
it may, its finding is "unknown". All run at once, each in a thread that cannot keep the launcher alive; what could
hang in the kernel they leave to children. The report has the order of CHECKS, in which a person would look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from types import ModuleType

from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Finding, Report, Status, raised
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.container import (
    cpu,
    dns,
    ephemeral_ports,
    gloo_socket_ifname,
    memlock,
    memory,
    mtu,
    nccl_ib_hca,
    nccl_socket_ifname,
    nofile,
    own_name,
    pids,
    ports,
    program,
    rank_collision,
    shm,
    shm_leftovers,
    storage,
    subdomain,
)
from trainer_launch.preflight.gpu import (
    clocks,
    count,
    ecc,
    load,
    mig,
    nccl_network,
    nvlink,
    pcie,
    peers,
    persistence,
    recovery_action,
    row_remapping,
    temperature,
    xid,
)
from trainer_launch.preflight.gpu import memory as gpu_memory

CHECKS: tuple[ModuleType, ...] = (
    program,
    rank_collision,
    memory,
    cpu,
    pids,
    nofile,
    memlock,
    shm,
    shm_leftovers,
    storage,
    own_name,
    subdomain,
    dns,
    gloo_socket_ifname,
    nccl_socket_ifname,
    nccl_ib_hca,
    mtu,
    ports,
    ephemeral_ports,
    count,
    recovery_action,
    ecc,
    row_remapping,
    mig,
    persistence,
    gpu_memory,
    load,
    peers,
    nccl_network,
    clocks,
    temperature,
    pcie,
    nvlink,
    xid,
)
# What each container has of its own: an init container cannot vouch for the main one.
OF_A_CONTAINER = tuple(check for check in CHECKS if getattr(check, "OF_A_CONTAINER", False))
# What is found out while all GPUs are at work: who asks for one of these alone asks for that.
NEEDING_LOAD = tuple(check for check in CHECKS if getattr(check, "NEEDS_LOAD", False))
_THREAD = "check "  # and the check's name
LIMIT_S = 5.0  # for a check that does not say otherwise


def names_in(text: str | None, flag: str, others: Sequence[str] = ()) -> tuple[str, ...]:
    """The checks that a comma-separated list names; `others` are checks that are not made here.

    Raises:
        UsageError: one of them does not exist.
    """
    known = [*(check.NAME for check in CHECKS), *others]
    named = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    for name in named:
        if name not in known:
            raise UsageError(f"{flag} names {name[:60]!r}, which is not a check; expected: {', '.join(known)}")
    return named


def run(
    subject: Subject,
    checks: Sequence[ModuleType] = CHECKS,
    *,
    silenced: Collection[str] = (),
    fatal: Collection[str] = (),
    limit_s: float | None = None,
) -> Report:
    """Check the subject; `limit_s` holds for every check, in place of its own limit."""
    began_s = time.monotonic()
    running = [_Running(check, subject, limit_s) for check in checks if check.NAME not in silenced]
    findings = [raised(finding, fatal) for one in running for finding in one.findings()]
    return Report(
        findings=tuple(findings),
        silenced=tuple(check.NAME for check in checks if check.NAME in silenced),
        took_s=time.monotonic() - began_s,
    )


def still_running() -> list[str]:
    """The checks that have not ended yet."""
    named = [thread.name for thread in threading.enumerate() if thread.name.startswith(_THREAD)]
    return [name.removeprefix(_THREAD) for name in named]


class _Running:
    """One check at work, in a thread of its own."""

    def __init__(self, check: ModuleType, subject: Subject, limit_s: float | None) -> None:
        self._name: str = check.NAME
        self._check: Callable[[Subject], Iterable[Finding]] = check.check
        self._subject = subject
        own = check.limit_s(subject) if hasattr(check, "limit_s") else LIMIT_S
        self._limit_s = own if limit_s is None else limit_s
        self._found: tuple[Finding, ...] = ()
        self._trouble = ""
        self._took_s = 0.0
        self._began_s = time.monotonic()
        self._thread = self._start()

    def _start(self) -> threading.Thread | None:
        thread = threading.Thread(target=self._work, daemon=True, name=f"{_THREAD}{self._name}")
        try:
            thread.start()
        except RuntimeError:  # no more of them are allowed; one may end soon
            return None
        return thread

    def _work(self) -> None:
        began_s = time.monotonic()
        try:
            self._found = tuple(self._check(self._subject))
        except Exception as problem:  # noqa: BLE001  a check that is wrong must not stop the job
            self._trouble = f"internal error in this check: {type(problem).__name__}: {problem}"
        self._took_s = time.monotonic() - began_s

    def findings(self) -> tuple[Finding, ...]:
        """What it found, at the latest when its time is up."""
        thread = self._thread or self._start()
        if thread is None:
            return (self._unknown("no thread could be started for it"),)
        thread.join(max(0.0, self._began_s + self._limit_s - time.monotonic()))
        if thread.is_alive():
            return (self._unknown(f"it did not finish within {self._limit_s:g} s"),)
        if self._trouble:
            return (self._unknown(self._trouble),)
        return tuple(replace(finding, took_s=self._took_s) for finding in self._found)

    def _unknown(self, text: str) -> Finding:
        took_s = self._took_s or time.monotonic() - self._began_s
        return Finding(check=self._name, status=Status.UNKNOWN, text=text, took_s=took_s)
