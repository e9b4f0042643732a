"""Shared memory as a budget: what this node's workers may need, what there is, and what to do about it. Pure.

Pages in /dev/shm count against the container's memory limit. So it is never planned larger than the limit can bear,
and what is in use already is counted.
"""

from __future__ import annotations

from msgspec import Struct

from trainer_launch.model import Host
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import MIB, counted, in_mib
from trainer_launch.model.value_parsers import parse_quantity

# Nobody can know a program's data loaders before it runs. A rule of thumb, for each worker: 4 loader processes,
# each 2 batches ahead (torch's default prefetch_factor), of 32 MiB (64 images of 3 x 224 x 224 floats are 37).
LOADERS_BYTES = 256 * MIB
# NCCL's segment for one direction of one channel between two GPUs of a node that cannot reach each other directly
# (NVIDIA/nccl#342, #525, #1518). Two channels are its least: 4 GPUs fill the 64 MiB of Docker, 2 do not, as there.
# Its trees may take as many again. gloo works through sockets and needs none.
NCCL_SEGMENT_BYTES = 9_637_888
NCCL_LEAST_BYTES = 2 * NCCL_SEGMENT_BYTES
NCCL_BYTES = 4 * NCCL_SEGMENT_BYTES
# Open MPI's segment of 4 MiB for each rank (btl_vader_segment_size, in 5.x btl_sm_segment_size), and an allowance
# for UCX, which does not use /dev/shm at all where it has less than 16 MiB (openucx/ucx#8508).
MPI_BYTES = 20 * MIB
SHARE_OF_LIMIT = 0.5  # of the container's memory may be shared memory; what Linux itself takes of a machine's

_YAML = (
    "volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {size}}}}}] in the pod, "
    "volumeMounts: [{{name: shm, mountPath: /dev/shm}}] in the container"
)


class Need(Struct, frozen=True, kw_only=True):
    """What the workers of one node may need."""

    workers: int = 1
    on_gpus: bool = False
    is_mpi: bool = False
    is_guess: bool = False  # nobody said how many: an MPI worker, where only the launcher knows

    @property
    def size_bytes(self) -> int:
        """With data loaders; a single worker is left alone: what it shares is only its own loaders' business."""
        if self.workers < 2:
            return 0
        if self.is_guess:
            return self.least_bytes
        return self.workers * (LOADERS_BYTES + self.on_gpus * NCCL_BYTES + self.is_mpi * MPI_BYTES)

    @property
    def least_bytes(self) -> int:
        """What the engines take before a program has done anything; below it they are told to use less."""
        if self.workers < 2:
            return 0
        return self.workers * (self.on_gpus * NCCL_LEAST_BYTES + self.is_mpi * MPI_BYTES)


class Decision(Struct, frozen=True, kw_only=True):
    """What to do about shared memory."""

    enlarge_to: int | None = None  # bytes; None: leave it
    is_short: bool = False  # the engines have to be told to use less
    text: str = ""  # for `explain`
    warning: str = ""


def decide(host: Host, need: Need, asked: str) -> Decision:
    """Compare the need with what there is; `asked` is --shm-size.

    Raises:
        UsageError: it is no size.
    """
    wanted = None if asked in ("auto", "keep") else parse_size(asked)
    size, free = host.shm_bytes, host.shm_free_bytes
    if asked == "keep" or size is None or free is None:
        return Decision(text="left as it is" if asked == "keep" else "not there")
    missing = max(0, need.size_bytes - free) if wanted is None else max(0, wanted - size)
    if not missing:
        return Decision(text="left as it is; " + _estimate(need))
    target = min(size + missing, _ceiling_bytes(host, is_asked=wanted is not None))
    can = host.may_enlarge_shm and target > size
    gained = target - size if can else 0
    is_short = free + gained < need.least_bytes
    is_enough = can and gained >= missing
    return Decision(
        enlarge_to=target if can else None,
        is_short=is_short,
        text=(f"made {in_mib(target)} large" if can else "too small") + "; " + _estimate(need),
        warning="" if is_enough else _warning(host, need, size + missing, gained=gained),
    )


def parse_size(text: str) -> int:
    """Parse a quantity as Kubernetes writes it.

    Raises:
        UsageError: it is none.
    """
    size = parse_quantity(text)
    if size is None or not 0 < size < 1 << 62:
        raise UsageError(f"--shm-size is {text[:60]!r}; expected auto, keep, or a size such as 8Gi")
    return size


def _ceiling_bytes(host: Host, *, is_asked: bool) -> int:
    """As large as the memory limit can bear: what runs already is counted, our own share is half, unless asked."""
    limit = host.memory_limit_bytes
    if limit is None:
        return 1 << 62
    if is_asked:
        return limit
    used_here = (host.shm_bytes or 0) - (host.shm_free_bytes or 0)
    elsewhere = max(0, (host.memory_used_bytes or 0) - used_here)
    return max(0, min(int(limit * SHARE_OF_LIMIT), limit - elsewhere))


def _estimate(need: Need) -> str:
    if not need.size_bytes:
        return "one worker needs no more" if need.workers else "no worker runs in this pod"
    parts = [] if need.is_guess else ["data loaders, a rule of thumb"]
    parts += ["NCCL"] * need.on_gpus + ["MPI"] * need.is_mpi
    parts += ["how many there will be is not known"] * need.is_guess
    return f"{counted(need.workers, 'worker')} may need {in_mib(need.size_bytes)} ({'; '.join(parts)})"


def _warning(host: Host, need: Need, wanted: int, *, gained: int) -> str:
    limit, used = host.memory_limit_bytes, host.memory_used_bytes
    size, free = (host.shm_bytes or 0) + gained, (host.shm_free_bytes or 0) + gained
    counts = ""
    if limit is not None:
        counts = f"; it counts against the memory limit of {in_mib(limit)}"
        counts += f", of which {in_mib(used)} are in use" if used is not None else ""
    have = f"/dev/shm has {in_mib(free)} free of {in_mib(size)}"
    fix = _YAML.format(size=f"{-(-wanted // (1 << 30))}Gi")
    return f"{have}, {_estimate(need)}{counts}. To enlarge it: {fix}"
