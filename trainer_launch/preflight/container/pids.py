"""The container may have as many processes and threads as its workers will start."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.check_context import Subject

NAME = "pids"
OF_A_CONTAINER = True
LEAST, USUAL = 8, 128  # threads of a worker: torch alone; with NCCL, data loaders and OpenMP


def check(subject: Subject) -> Iterator[Finding]:
    """Compare the nearest limit with what workers take."""
    if subject.pids is None:
        yield Finding(check=NAME, status=Status.PASS, text="processes and threads are not limited")
        return
    limit, left = subject.pids
    text = f"{left} more processes and threads are allowed (limit {limit}) for {counted(subject.workers, 'worker')}"
    action = "raise the kubelet's podPidsLimit (or --pids-limit), or start fewer workers"
    if left < LEAST * subject.workers:
        yield Finding(
            check=NAME,
            status=Status.FAIL,
            fault=Fault.JOB,
            text=f"{text}; torch alone takes {LEAST} in each",
            measured=limit,
            expected=limit - left + LEAST * subject.workers,
            unit="pids",
            action=action,
        )
    elif left < USUAL * subject.workers:
        yield Finding(
            check=NAME,
            status=Status.WARN,
            text=f"{text}; with data loaders {USUAL} in each are usual",
            measured=limit,
            unit="pids",
            action=action,
        )
    else:
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=limit, unit="pids")
