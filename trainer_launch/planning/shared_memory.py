"""Shared memory as a budget: what this node's workers may need, what there is, and what to do about it.

Pages in /dev/shm count against the container's memory limit. So it is never planned larger than the limit can bear,
and what is in use already is counted.
"""

from __future__ import annotations

import errno
import logging
import os

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import files, shm
from trainer_launch.model import Host, Job
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import MIB, counted, in_mib
from trainer_launch.model.value_parsers import parse_quantity
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.job import hosts_no_rank, place
from trainer_launch.planning.reading import Reading

_MPI = ("mpirun", "sshd")
_COPIED = 4096
_ONLY_ADMINISTRATORS = ("2", "3")  # values of ptrace_scope
_log = logging.getLogger(__name__)

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
    """The need for shared memory of a node's workers."""

    workers: int = 1
    on_gpus: bool = False
    is_mpi: bool = False
    is_guess: bool = False  # the number is unknown: an MPI worker, where only the launcher knows

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
        """The bytes that engines take before a program has done anything; below it they have to use less."""
        if self.workers < 2:
            return 0
        return self.workers * (self.on_gpus * NCCL_LEAST_BYTES + self.is_mpi * MPI_BYTES)


class Decision(Struct, frozen=True, kw_only=True):
    """The decision about shared memory."""

    enlarge_to: int | None = None  # bytes; None: leave it
    is_short: bool = False  # the engines have to use less
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
    parts += ["the number of workers is a guess"] * need.is_guess
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


def decided(reading: Reading, settings: Settings) -> Decision:
    """Decide about the size of /dev/shm; nothing is done yet.

    Raises:
        LaunchError: --shm-size is no size, or this node has no place in the job.
    """
    return decide(reading.host, _need(reading), settings.shm_size)


def enlarged(reading: Reading, settings: Settings) -> Decision:
    """Do it, or say what would help.

    Raises:
        LaunchError: --shm-size is no size, or this node has no place in the job.
    """
    decision = decided(reading, settings)
    if decision.enlarge_to is not None:
        try:
            room = shm.enlarge(decision.enlarge_to)
            _log.info("enlarged /dev/shm to %.0f MiB", room.size_bytes / MIB)
        except NodeError:  # a user namespace's CAP_SYS_ADMIN is not enough
            reading = replace(reading, host=replace(reading.host, may_enlarge_shm=False))
            decision = decided(reading, settings)
    if decision.warning:
        _log.warning("%s", decision.warning)
    return decision


def _need(reading: Reading) -> Need:
    job = reading.job
    if job.role == "rank":
        return Need()  # one of several processes in a pod that somebody else owns
    if hosts_no_rank(job):
        return Need(workers=0)
    gpus, is_mpi = reading.host.gpus, job.engine in _MPI
    if job.nproc_per_node is None and is_mpi:
        # Only the job's launcher knows; two are the least that share anything.
        return Need(workers=max(gpus.count, 2), on_gpus=gpus.cuda > 0, is_mpi=True, is_guess=True)
    return Need(workers=place(job, reading.host).local_world_size or 1, on_gpus=gpus.cuda > 0, is_mpi=is_mpi)


def copies_are_refused(job: Job, command: Command) -> bool:
    """Whether Open MPI's ranks may not read each other's memory here; tried only for MPI."""
    return (job.engine in _MPI or mpi_options.is_mpirun(command.argv[0])) and copying_error() != 0


def copying_error() -> int:
    """The errno with which the kernel refuses to read another process's memory, as Open MPI's ranks do; or 0.

    Reading our own memory shows it: seccomp refuses the call itself. Only Yama asks whose memory it is.
    """
    import ctypes

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    if files.text("/proc/sys/kernel/yama/ptrace_scope").strip() in _ONLY_ADMINISTRATORS:
        return errno.EPERM
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    source, target = (ctypes.create_string_buffer(_COPIED) for _ in range(2))
    there, here = (Part(ctypes.addressof(buffer), _COPIED) for buffer in (source, target))
    count, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read = libc.process_vm_readv(os.getpid(), ctypes.byref(here), count, ctypes.byref(there), count, flags)
    return 0 if read == _COPIED else ctypes.get_errno() or errno.EIO
