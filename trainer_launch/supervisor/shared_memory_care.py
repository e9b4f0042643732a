"""What `run` does about shared memory: enough of it before the start, none of it left over after each end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from trainer_launch.host import files, shm
from trainer_launch.host.shm import Baseline
from trainer_launch.model import Job
from trainer_launch.model.errors import NodeError
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import MIB
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.job import hosts_no_rank, place
from trainer_launch.planning.reading import Reading
from trainer_launch.planning.shared_memory import Decision, Need, decide

_MPI = ("mpirun", "sshd")
_COPIED = 4096
_ONLY_ADMINISTRATORS = ("2", "3")  # values of ptrace_scope
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def kept_clean() -> Iterator[Callable[[], None]]:
    """Remove what a killed predecessor left; yield what removes our dead workers' share, and do that at the end."""
    baseline = Baseline(os.uname().nodename)

    def sweep() -> None:
        removed = baseline.sweep()
        if removed.count:
            _log.info("%s", removed)

    if baseline.removed.count:
        _log.info("%s of this container's previous run", baseline.removed)
    try:
        yield sweep
    finally:
        sweep()
        baseline.close()


def decided(reading: Reading, settings: Settings) -> Decision:
    """What to do about the size of /dev/shm; nothing is done yet.

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


def copies_are_refused(job: Job, command: Command | None, *, say: bool = True) -> bool:
    """Whether Open MPI's ranks may not read each other's memory here; tried only for MPI."""
    if job.engine not in _MPI and not (command and mpi_options.is_mpirun(command.argv[0])):
        return False
    number = copying_error()
    if number and say:
        _log.info(
            "process_vm_readv is refused in this container (%s), as by the default seccomp profile: "
            "Open MPI is told to copy through shared memory",
            os.strerror(number),
        )
    return number != 0


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
