"""What each container has of its own: memory, CPUs, processes, files, locked memory, room in /dev/shm.

The folders of --storage are tried in children, as a checkpoint would use them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from trainer_launch.host import socket_folders
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.files import LiveFiles
from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import MIB, counted, in_mib, in_units
from trainer_launch.planning import shared_memory
from trainer_launch.preflight import report_formats
from trainer_launch.preflight.check import STATE_FILE, Subject, at_once, check

# What a worker takes surely, in memory that the kernel cannot drop: `import torch` 146 MB (2.13, CPU), CUDA more.
LEAST_MIB, LEAST_GPU_MIB = 128, 256
# What one usually takes; a warning below.
USUAL_MIB, USUAL_GPU_MIB = 512, 2048
LEAST_THREADS, USUAL_THREADS = 8, 128  # of a worker: torch alone; with NCCL, data loaders and OpenMP
BASE_FILES = 256  # libraries, data files, loaders' pipes
FILES_OF_EACH_RANK = 2  # gloo connects each rank with each, NCCL its root with all and the others with some
LOCKED_BYTES = 32 * MIB  # the usual limits of containers, 64 KiB and 8 MiB, are below
_LOCK_S = 8.0
_WRITTEN_BYTES = 16 * MIB
_STORAGE_CHILD_S = 20.0
_LEAST_S = 5.0  # whatever the deadline
_SLOW_S = 5.0  # for one file of 1 MiB
_LOW_BYTES, _LOW_INODES = 1 << 30, 1000
_LET_WRITE = "let this user write there: securityContext.fsGroup or runAsUser"
_ADVICE = {
    errno.ENOENT: "mount the volume there, or make the folder",
    errno.EROFS: "the mount is read-only: see readOnly in volumeMounts, and the volume's access mode",
    errno.EACCES: _LET_WRITE,
    errno.EPERM: _LET_WRITE,
    errno.ENOSPC: "make room on the volume",
    errno.EDQUOT: "make room, or have the quota raised",
}
_JOBS = frozenset((*_ADVICE, errno.ENOTDIR))  # whatever node it is, these stay the same
_HEADROOM = 8  # of the memory limit's rest, this part at most is locked or written


@check("memory")
def memory(subject: Subject) -> Finding:
    """The container's memory limit is enough for this node's workers to start."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    if limit is None:
        return memory.passed("the container's memory is not limited")
    each, usual = (LEAST_GPU_MIB, USUAL_GPU_MIB) if subject.host.gpus.cuda else (LEAST_MIB, USUAL_MIB)
    least = each * subject.workers
    left, measured = max(0, limit - used) // MIB, limit // MIB
    text = f"{left} MiB are left of the limit of {measured} MiB for {counted(subject.workers, 'worker')}"
    action = "raise resources.limits.memory, or start fewer workers"
    if left < least and subject.is_torch:
        text, expected = f"{text}; torch alone takes {each} MiB in each", least + used // MIB
        return memory.failed(Fault.JOB, text, measured=measured, expected=expected, unit="MiB", action=action)
    if left < usual * subject.workers:
        text = f"{text}; {usual} MiB for each are usual"
        return memory.warned(text, measured=measured, unit="MiB", action=action)
    return memory.passed(text, measured=measured, unit="MiB")


@check("cpu")
def cpu(subject: Subject) -> Finding:
    """There are CPUs for this node's workers: less than one each makes collectives many times slower."""
    cpus = subject.host.cpus
    usable = float(cpus.affinity if cpus.quota is None else min(cpus.affinity, cpus.quota))
    quota = "no quota" if cpus.quota is None else f"a quota of {cpus.quota:g}"
    have, workers = f"{usable:g} {'CPU' if usable == 1 else 'CPUs'}", counted(subject.workers, "worker")
    text = f"{have} for {workers} ({cpus.affinity} in the affinity mask, {quota})"
    if usable >= subject.workers:
        return cpu.passed(text, measured=usable, unit="CPUs")
    action = "raise resources.limits.cpu to at least one for each worker, data loaders not counted"
    return cpu.warned(text, measured=usable, expected=subject.workers, unit="CPUs", action=action)


@check("pids")
def pids(subject: Subject) -> Finding:
    """The container may have as many processes and threads as its workers will start."""
    if subject.pids is None:
        return pids.passed("processes and threads are not limited")
    limit, left = subject.pids
    text = f"{left} more processes and threads are allowed (limit {limit}) for {counted(subject.workers, 'worker')}"
    action, least = "raise the kubelet's podPidsLimit (or --pids-limit), or start fewer workers", LEAST_THREADS
    if left < least * subject.workers:
        text, expected = f"{text}; torch alone takes {least} in each", limit - left + least * subject.workers
        return pids.failed(Fault.JOB, text, measured=limit, expected=expected, unit="pids", action=action)
    if left < USUAL_THREADS * subject.workers:
        text = f"{text}; with data loaders {USUAL_THREADS} in each are usual"
        return pids.warned(text, measured=limit, unit="pids", action=action)
    return pids.passed(text, measured=limit, unit="pids")


@check("nofile")
def nofile(subject: Subject) -> Finding:
    """A process may open as many files and sockets as a worker of a job this large does."""
    soft, hard = subject.limits.nofile_soft, subject.limits.nofile_hard  # a program starts with the soft one
    need = BASE_FILES + FILES_OF_EACH_RANK * subject.ranks
    if soft is None or soft >= need:
        allowed = f"{soft} open files are allowed, {need} may be needed"
        return nofile.passed("open files are not limited" if soft is None else allowed, measured=soft, unit="files")
    is_gloo = subject.is_torch and not subject.may_use_gpus  # it connects each rank with each, surely
    is_certain = soft < BASE_FILES // 2 or (is_gloo and soft < subject.ranks)
    raising = f"raise LimitNOFILE of the container runtime on the nodes (hard limit {hard})"
    return nofile.bad(
        Fault.JOB if is_certain else None,
        f"a process may open {soft} files; a worker of {counted(subject.ranks, 'rank')} may need {need}",
        measured=soft,
        expected=need,
        unit="files",
        action=f"ulimit -n {need} before the command" if hard is None or hard >= need else raising,
    )


@check("memlock", limit_s=lambda subject: _LOCK_S + 1)
def memlock(subject: Subject) -> Finding:
    """Memory can be locked, as RDMA needs it. The limit is not believed: with CAP_IPC_LOCK it means nothing."""
    size = _bearable(subject, LOCKED_BYTES)
    tried = subject.try_out("memlock", str(size), _LOCK_S)
    if tried.is_good:
        return memlock.passed(f"{in_mib(size)} can be locked", measured=size // MIB, unit="MiB")
    if tried.errno is None:
        why = tried.problem or "the child did not end in time"
        return memlock.unknown(f"whether memory can be locked is not known: {why}")
    allowed = subject.limits.memlock_bytes
    limit = "none" if allowed is None else f"{allowed // 1024} KiB"
    text = f"{in_mib(size)} of memory cannot be locked: {os.strerror(tried.errno)}; the limit is {limit}"
    if not subject.has_rdma or not subject.has_peers:
        why = "there are no other nodes" if subject.has_rdma else "no RDMA device is here"
        return memlock.skipped(f"{text}; only RDMA needs it, and {why}")
    action = "add IPC_LOCK to securityContext.capabilities.add (as root; without, raise LimitMEMLOCK of the "
    action += "container runtime)"
    return memlock.failed(Fault.JOB, text, measured=0, expected=size // MIB, unit="MiB", action=action)


@check("shm")
def shm(subject: Subject) -> Finding:
    """/dev/shm is large enough for this node's workers, as `run` estimates it, and can be written."""
    host, need = subject.host, subject.shm_need
    size, free = host.shm_bytes, host.shm_free_bytes
    if size is None or free is None:
        action = "mount an emptyDir with medium: Memory at /dev/shm"
        return shm.failed(Fault.JOB, "/dev/shm is not there", unit="MiB", action=action)
    number = subject.write_problem(_bearable(subject, _WRITTEN_BYTES))
    if number is not None:
        text = f"/dev/shm ({in_mib(size)}, {in_mib(free)} free) cannot be written: {os.strerror(number)}"
        action = "remove what fills it, or mount an emptyDir with medium: Memory there"
        return shm.failed(Fault.JOB, text, measured=size // MIB, unit="MiB", action=action)
    if subject.shm_size == "keep":  # it stays as it is; whether it is enough is a question all the same
        host = replace(host, may_enlarge_shm=False)
    decision = shared_memory.decide(host, need, "auto" if subject.shm_size == "keep" else subject.shm_size)
    if not decision.warning:
        return shm.passed(f"{in_mib(size)}; {decision.text}", measured=size // MIB, unit="MiB")
    # No failure: GPUs that reach each other directly need none of it, and `run` tells engines to use less.
    text, _, action = decision.warning.partition(". To enlarge it: ")
    if decision.is_short:
        text += f"; NCCL and MPI alone may take {in_mib(need.least_bytes)}, and die of SIGBUS"
    return shm.warned(text, measured=size // MIB, unit="MiB", action=action)


def _bearable(subject: Subject, most: int) -> int:
    """Bytes that may be written or locked without the kernel killing somebody for it: they count as memory."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    return most if limit is None else min(most, max(4096, (limit - used) // _HEADROOM))


@check("tmpdir")
def tmpdir(subject: Subject) -> Finding:
    """The folder for temporary files can be written, and its path is short enough for sockets in it."""
    name = next((name for name in socket_folders.VARIABLES if subject.env.get(name)), None)
    path = "/tmp" if name is None else subject.env[name]
    if (long := socket_folders.too_long(subject.env)) is not None:
        return tmpdir.warned(long, action="set TMPDIR to a shorter one, such as /tmp")
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        text = f"{path} is no folder that can be written; Python takes another one, torch and MPI may not"
        return tmpdir.warned(text, action=f"make it, correct {name or 'TMPDIR'}, or mount an emptyDir at /tmp")
    return tmpdir.passed(f"temporary files go to {path}")


@check("storage", limit_s=lambda subject: _STORAGE_CHILD_S + 2)
def storage(subject: Subject) -> Iterator[Finding]:
    """The folders of --storage take a checkpoint: made, synced, renamed, read back, removed, all in time."""
    if not subject.storage:
        yield storage.skipped("no directory was given with --storage")
        return
    limit_s = subject.left_s(_LEAST_S, _STORAGE_CHILD_S)
    folders = subject.storage
    tried = at_once(folders, lambda folder: subject.try_out("storage", folder, limit_s), len(folders))
    for folder in folders:
        finding = _wrong(folder, tried[folder], limit_s) or _room(folder, tried[folder].values)
        yield replace(finding, subject=folder)


def _wrong(folder: str, tried: Tried, limit_s: float) -> Finding | None:
    """What is wrong with a folder; unknown where nothing could be found out."""
    if tried.timed_out:
        text = f"{folder} hangs at {tried.stage or 'the start'}, after {limit_s:.0f} s"
        text += "; the process that waits for it cannot be killed" if tried.stuck else ""
        action = "check the file server and this node's connection to it (mount, CSI driver)"
        return storage.failed(Fault.NODE, text, action=action)
    if tried.errno is not None:
        fault = Fault.JOB if tried.errno in _JOBS else Fault.NODE
        action = _ADVICE.get(tried.errno, "see the volume and its server")
        return storage.failed(fault, f"{folder}: {os.strerror(tried.errno)} at {tried.stage}", action=action)
    if tried.problem:
        return storage.unknown(f"{folder} could not be tested: {tried.problem}")
    if not tried.values["same"]:
        text = f"{folder}: the data read back differs from the data written"
        return storage.failed(Fault.NODE, text, action="do not train on this volume; see its server and this node")
    return None


def _room(folder: str, values: Mapping[str, float]) -> Finding:
    seconds, free, inodes = values["seconds"], int(values["free_bytes"]), int(values["free_inodes"])
    text = f"{folder}: {in_units(free)} free, 1 MiB written, synced and read back in {seconds:.3f} s"
    problems = ["it is nearly full"] * (free < _LOW_BYTES)
    problems += [f"room for only {counted(inodes, 'more file')}"] * (0 <= inodes < _LOW_INODES)
    problems += ["it is slow"] * (seconds > _SLOW_S)
    more: dict[str, Any] = {"measured": round(seconds, 3), "expected": _SLOW_S, "unit": "s"}
    if not problems:
        return storage.passed(text, **more)
    action = "make room on the volume, or see why it is slow"
    return storage.warned("; ".join((text, *problems)), action=action, **more)


def fault_of(folder: str, host: str) -> str:
    """What the init container's preflight found faulty on this node itself; "": nothing, or not known."""
    left = LiveFiles(report_formats.MAX_BYTES + 1).read(os.path.join(folder, STATE_FILE))
    try:
        found = report_formats.parse(left or b"")
    except ValueError:
        return ""
    scopes = (Scope.NODE, Scope.GPU, Scope.RAIL)
    faulty = [one for one in found if one.fault is Fault.NODE and one.scope in scopes]
    own = [one for one in faulty if "node " not in one.subject or f"({host})" in one.subject]
    return "; ".join(f"{one.check}: {one.text}" for one in own)[:500]
