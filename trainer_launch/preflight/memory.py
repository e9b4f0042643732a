"""The container's memory limit is enough for this node's workers to start."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.findings import Fault, Finding, Status
from trainer_launch.preflight.subject import Subject
from trainer_launch.shared_memory import MIB

NAME = "memory"
# What a worker takes before it has done anything: `import torch` 220 MiB, with a CUDA context and NCCL about 2 GiB.
BARE_MIB, GPU_MIB = 256, 2048
COMFORT = 4  # so much more before it is no longer worth a warning, without a GPU


def check(subject: Subject) -> Iterator[Finding]:
    """Compare what is left of the limit with what the workers take at least."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    if limit is None:
        yield Finding(check=NAME, status=Status.PASS, text="the container's memory is not limited")
        return
    each = GPU_MIB if subject.host.gpus.count else BARE_MIB
    least = each * subject.workers
    left = max(0, limit - used) // MIB
    measured = limit // MIB
    text = f"{left} MiB are left of the limit of {measured} MiB for {subject.workers} workers"
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
    elif left < (least if each == GPU_MIB else COMFORT * least):
        yield Finding(
            check=NAME,
            status=Status.WARN,
            text=f"{text}; that is little",
            measured=measured,
            unit="MiB",
            action="raise resources.limits.memory, or start fewer workers",
        )
    else:
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=measured, unit="MiB")
