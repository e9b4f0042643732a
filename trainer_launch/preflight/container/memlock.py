"""Memory can be locked, as RDMA needs it. The limit is not believed: with CAP_IPC_LOCK it means nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import MIB, in_mib
from trainer_launch.preflight.check_context import Subject

NAME = "memlock"
OF_A_CONTAINER = True
TRIED_BYTES = 32 * MIB  # the usual limits of containers, 64 KiB and 8 MiB, are below
_CHILD_S = 8.0
_HEADROOM = 8  # of the memory limit's rest, this part at most is locked


def limit_s(subject: Subject) -> float:
    """How long it may take."""
    return _CHILD_S + 1


def check(subject: Subject) -> Iterator[Finding]:
    """Lock some in a child."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    size = TRIED_BYTES if limit is None else min(TRIED_BYTES, max(1, limit - used) // _HEADROOM)
    tried = subject.try_out("memlock", str(max(4096, size)), _CHILD_S)
    shown = in_mib(size)
    if tried.is_good:
        yield Finding(
            check=NAME, status=Status.PASS, text=f"{shown} can be locked", measured=size // MIB, unit="MiB"
        )
        return
    if tried.errno is None:
        why = tried.trouble or "the child did not end in time"
        yield Finding(check=NAME, status=Status.UNKNOWN, text=f"whether memory can be locked is not known: {why}")
        return
    allowed = subject.limits.memlock_bytes
    text = (
        f"{shown} of memory cannot be locked: {os.strerror(tried.errno)}; the limit is "
        f"{'none' if allowed is None else f'{allowed // 1024} KiB'}"
    )
    if not subject.has_rdma or not subject.has_peers:
        why = "there are no other nodes" if subject.has_rdma else "no RDMA device is here"
        text = f"{text}; only RDMA needs it, and {why}"
        yield Finding(check=NAME, status=Status.SKIPPED, text=text)
        return
    yield Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.JOB,
        text=text,
        measured=0,
        expected=size // MIB,
        unit="MiB",
        action="add IPC_LOCK to securityContext.capabilities.add (as root; without, raise LimitMEMLOCK of the "
        "container runtime)",
    )
