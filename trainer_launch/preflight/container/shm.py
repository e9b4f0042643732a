"""/dev/shm is large enough for this node's workers, and can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import MIB, in_mib
from trainer_launch.planning import shared_memory
from trainer_launch.planning.shared_memory import Need
from trainer_launch.planning.topology import hosts_no_rank
from trainer_launch.preflight.check_context import Subject

NAME = "shm"
OF_A_CONTAINER = True
_WRITTEN_BYTES = 16 * MIB
_HEADROOM = 8  # of the memory limit's rest, this part at most is written


def check(subject: Subject) -> Iterator[Finding]:
    """Compare with the need as `run` estimates it, then write."""
    host = subject.host
    size, free = host.shm_bytes, host.shm_free_bytes
    if size is None or free is None:
        yield _said("/dev/shm is not there", None, Status.FAIL, "mount an emptyDir with medium: Memory at /dev/shm")
        return
    need = Need(
        workers=0 if hosts_no_rank(subject.job) else subject.workers,
        on_gpus=host.gpus.count > 0,
        is_mpi=subject.job.engine in ("mpirun", "sshd"),
    )
    number = subject.write_trouble(min(_WRITTEN_BYTES, _bearable(subject)))
    if subject.shm_size == "keep":  # it stays as it is; whether it is enough is a question all the same
        host = replace(host, may_enlarge_shm=False)
    decision = shared_memory.decide(host, need, "auto" if subject.shm_size == "keep" else subject.shm_size)
    if number is not None:
        text = f"/dev/shm ({in_mib(size)}, {in_mib(free)} free) cannot be written: {os.strerror(number)}"
        yield _said(text, size, Status.FAIL, "remove what fills it, or mount an emptyDir with medium: Memory there")
    elif decision.warning:
        # No failure: GPUs that reach each other directly need none of it, and `run` tells engines to use less.
        text, _, action = decision.warning.partition(". To enlarge it: ")
        if decision.is_short:
            text += f"; NCCL and MPI alone may take {in_mib(need.least_bytes)}, and die of SIGBUS"
        yield _said(text, size, Status.WARN, action)
    else:
        yield _said(f"{in_mib(size)}; {decision.text}", size, Status.PASS)


def _bearable(subject: Subject) -> int:
    """What may be written without the kernel killing somebody for it: its pages count as memory."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes
    return _WRITTEN_BYTES if limit is None else max(4096, (limit - (used or 0)) // _HEADROOM)


def _said(text: str, size: int | None, status: Status, action: str = "") -> Finding:
    return Finding(
        check=NAME,
        status=status,
        fault=Fault.JOB if status is Status.FAIL else None,
        text=text,
        measured=None if size is None else size // MIB,
        unit="MiB",
        action=action,
    )
