"""The container's memory limit is enough for this node's workers to start."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import MIB, counted
from trainer_launch.preflight.check_context import Subject

NAME = "memory"
OF_A_CONTAINER = True
# What a worker takes surely, in memory that the kernel cannot drop: `import torch` 146 MB (2.13, CPU), CUDA more.
LEAST_MIB, LEAST_GPU_MIB = 128, 256
# What one usually takes; a warning below.
USUAL_MIB, USUAL_GPU_MIB = 512, 2048


def check(subject: Subject) -> Iterator[Finding]:
    """Compare what is left of the limit with what the workers take at least."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    if limit is None:
        yield Finding(check=NAME, status=Status.PASS, text="the container's memory is not limited")
        return
    each, usual = (LEAST_GPU_MIB, USUAL_GPU_MIB) if subject.host.gpus.count else (LEAST_MIB, USUAL_MIB)
    least = each * subject.workers
    left = max(0, limit - used) // MIB
    measured = limit // MIB
    text = f"{left} MiB are left of the limit of {measured} MiB for {counted(subject.workers, 'worker')}"
    if left < least and subject.is_torch:
        yield Finding(
            check=NAME,
            status=Status.FAIL,
            fault=Fault.JOB,
            text=f"{text}; torch alone takes {each} MiB in each",
            measured=measured,
            expected=least + used // MIB,
            unit="MiB",
            action="raise resources.limits.memory, or start fewer workers",
        )
    elif left < usual * subject.workers:
        yield Finding(
            check=NAME,
            status=Status.WARN,
            text=f"{text}; {usual} MiB for each are usual",
            measured=measured,
            unit="MiB",
            action="raise resources.limits.memory, or start fewer workers",
        )
    else:
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=measured, unit="MiB")
