"""Limits of a container: memory, CPUs, processes, files, locked memory, room in /dev/shm, folders.

The folders of --storage are tried in children, as a checkpoint would use them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, json
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.shm import TMP_VARIABLES, too_long_for_sockets
from trainer_launch.model.units import MIB, counted, in_mib, in_units
from trainer_launch.planning import shared_memory
from trainer_launch.preflight import report_formats
from trainer_launch.preflight.check import Subject, at_once, check
from trainer_launch.preflight.rules import Observed

# What one process that imports torch surely takes: 146 MB (2.13, CPU), CUDA more. Forked workers share most of it,
# so many may start where there is room for one; and an init container's limits need not be the workers'.
LEAST_MIB, LEAST_GPU_MIB = 128, 256
# What a worker usually takes; a warning below.
USUAL_MIB, USUAL_GPU_MIB = 512, 2048
LEAST_THREADS, USUAL_THREADS = (
    8,
    128,
)  # of a process with torch alone; of a worker with NCCL, data loaders and OpenMP
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
    errno.ENOENT: "mount the volume there, or create the directory",
    errno.EROFS: "the mount is read-only: see readOnly in volumeMounts, and the volume's access mode",
    errno.EACCES: _LET_WRITE,
    errno.EPERM: _LET_WRITE,
    errno.ENOSPC: "free space on the volume",
    errno.EDQUOT: "free space, or have the quota raised",
}
_JOBS = frozenset((*_ADVICE, errno.ENOTDIR))  # whatever node it is, these stay the same
_HEADROOM = 8  # of the memory limit's rest, this part at most is locked or written


@check("memory")
def memory(subject: Subject) -> Observed:
    """The container's memory limit is enough for this node's workers to start."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    if limit is None:
        return Observed(good="the container's memory is not limited")
    least, usual = (LEAST_GPU_MIB, USUAL_GPU_MIB) if subject.host.gpus.cuda else (LEAST_MIB, USUAL_MIB)
    there, in_use = limit // MIB, used // MIB
    about = f"{max(0, there - in_use)} MiB are left of the limit of {there} MiB for "
    about += counted(subject.workers, "worker")
    facts = {"about": about, "least": least, "usual": usual, "all": (there, in_use + usual * subject.workers)}
    facts |= {"one": (there, in_use + least)} if subject.is_torch else {}
    return Observed(facts=facts, good=about, more={"measured": there})


@check("cpu")
def cpu(subject: Subject) -> Observed:
    """Each worker of this node has at least one CPU: with less, collectives are many times slower."""
    cpus = subject.host.cpus
    usable = float(cpus.affinity if cpus.quota is None else min(cpus.affinity, cpus.quota))
    quota = "no quota" if cpus.quota is None else f"a quota of {cpus.quota:g}"
    have, workers = f"{usable:g} {'CPU' if usable == 1 else 'CPUs'}", counted(subject.workers, "worker")
    about = f"{have} for {workers} ({cpus.affinity} in the affinity mask, {quota})"
    return Observed(facts={"about": about, "cpus": (usable, subject.workers)}, good=about)


@check("pids")
def pids(subject: Subject) -> Observed:
    """The container's limit allows all processes and threads that its workers start."""
    if subject.pids is None:
        return Observed(good="processes and threads are not limited")
    limit, left = subject.pids
    about = (
        f"{left} more processes and threads are allowed (limit {limit}) for {counted(subject.workers, 'worker')}"
    )
    facts = {"about": about, "least": LEAST_THREADS, "usual": USUAL_THREADS}
    facts |= {"all": (limit, limit - left + USUAL_THREADS * subject.workers)}
    facts |= {"one": (limit, limit - left + LEAST_THREADS)} if subject.is_torch else {}
    return Observed(facts=facts, good=about, more={"measured": limit})


@check("nofile")
def nofile(subject: Subject) -> Observed:
    """The limit of open files is high enough for a worker of a job of this size."""
    soft, hard = subject.limits.nofile_soft, subject.limits.nofile_hard  # a program starts with the soft one
    if soft is None:
        return Observed(good="open files are not limited")
    need = BASE_FILES + FILES_OF_EACH_RANK * subject.ranks
    is_gloo = subject.is_torch and not subject.may_use_gpus  # it connects each rank with each, surely
    raising = f"raise LimitNOFILE of the container runtime on the nodes (hard limit {hard})"
    facts = {"soft": soft, "need": need, "ranks": counted(subject.ranks, "rank"), "estimate": (soft, need)}
    facts["certain"] = soft, max(BASE_FILES // 2, subject.ranks if is_gloo else 0)
    facts["action"] = f"ulimit -n {need} before the command" if hard is None or hard >= need else raising
    return Observed(facts=facts, good=f"{soft} open files are allowed, {need} may be needed")


@check("memlock", limit_s=lambda subject: _LOCK_S + 1)
def memlock(subject: Subject) -> Observed:
    """Memory can be locked, as RDMA needs it. Locking is tried: with CAP_IPC_LOCK the limit has no effect."""
    size = _bearable(subject, LOCKED_BYTES)
    tried = subject.try_out("memlock", str(size), _LOCK_S)
    if tried.is_good:
        return Observed(good=f"{in_mib(size)} can be locked", more={"measured": size // MIB, "unit": "MiB"})
    if tried.errno is None:
        why = tried.problem or "the child did not end in time"
        return Observed(unknown=f"whether memory can be locked is not known: {why}")
    allowed = subject.limits.memlock_bytes
    limit = "none" if allowed is None else f"{allowed // 1024} KiB"
    text = f"{in_mib(size)} of memory cannot be locked: {os.strerror(tried.errno)}; the limit is {limit}"
    if subject.has_rdma and subject.has_peers:
        return Observed(facts={"refused": text})
    why = "there are no other nodes" if subject.has_rdma else "no RDMA device is here"
    return Observed(skipped=f"{text}; only RDMA needs it, and {why}")


@check("shm")
def shm(subject: Subject) -> Observed:
    """/dev/shm can be written, and is large enough for this node's workers, as `run` estimates it."""
    host, need = subject.host, subject.shm_need
    size, free = host.shm_bytes, host.shm_free_bytes
    if size is None or free is None:
        action = "mount an emptyDir with medium: Memory at /dev/shm"
        return Observed(facts={"broken": "/dev/shm is not there", "action": action})
    more = {"measured": size // MIB, "unit": "MiB"}
    number = subject.write_problem(_bearable(subject, _WRITTEN_BYTES))
    if number is not None:
        text = f"/dev/shm ({in_mib(size)}, {in_mib(free)} free) cannot be written: {os.strerror(number)}"
        action = "remove what fills it, or mount an emptyDir with medium: Memory there"
        return Observed(facts={"broken": text, "action": action}, more=more)
    if subject.shm_size == "keep":  # it stays as it is; whether it is enough is a question all the same
        host = replace(host, may_enlarge_shm=False)
    decision = shared_memory.decide(host, need, "auto" if subject.shm_size == "keep" else subject.shm_size)
    text, _, action = decision.warning.partition(". To enlarge it: ")
    if decision.is_short:
        text += f"; NCCL and MPI alone may take {in_mib(need.least_bytes)}, and die of SIGBUS"
    return Observed(facts={"small": text, "action": action}, good=f"{in_mib(size)}; {decision.text}", more=more)


def _bearable(subject: Subject, most: int) -> int:
    """Bytes that may be written or locked without the kernel killing somebody for it: they count as memory."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    return most if limit is None else min(most, max(4096, (limit - used) // _HEADROOM))


@check("tmpdir")
def tmpdir(subject: Subject) -> Observed:
    """The directory for temporary files can be written, and its path is short enough for sockets."""
    name = next((name for name in TMP_VARIABLES if subject.env.get(name)), None)
    path = "/tmp" if name is None else subject.env[name]
    if (long := too_long_for_sockets(subject.env)) is not None:
        return Observed(facts={"wrong": long, "action": "set TMPDIR to a shorter one, such as /tmp"})
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        text = f"{path} is not a writable directory; Python uses another one, torch and MPI may not"
        action = f"make it, correct {name or 'TMPDIR'}, or mount an emptyDir at /tmp"
        return Observed(facts={"wrong": text, "action": action})
    return Observed(good=f"temporary files go to {path}")


@check("storage", limit_s=lambda subject: _STORAGE_CHILD_S + 2)
def storage(subject: Subject) -> Iterator[Observed]:
    """A checkpoint can be written, synced, renamed, read and removed in each --storage directory in time."""
    if not subject.storage:
        yield Observed(skipped="no directory was given with --storage")
        return
    limit_s = subject.left_s(_LEAST_S, _STORAGE_CHILD_S)
    folders = subject.storage
    tried = at_once(folders, lambda folder: subject.try_out("storage", folder, limit_s), len(folders))
    for folder in folders:
        observed = _of_folder(folder, tried[folder], limit_s)
        yield replace(observed, more={"subject": folder, **observed.more})


def _of_folder(folder: str, tried: Tried, limit_s: float) -> Observed:
    if tried.timed_out:
        text = f"{folder} hangs at {tried.stage or 'the start'}, after {limit_s:.0f} s"
        text += "; the process that waits for it cannot be killed" if tried.stuck else ""
        return Observed(facts={"hangs": text})
    if tried.errno is not None:
        text, whose = f"{folder}: {os.strerror(tried.errno)} at {tried.stage}", tried.errno in _JOBS
        action = _ADVICE.get(tried.errno, "check the volume and its server")
        return Observed(facts={"refused" if whose else "fails": text, "action": action})
    if tried.problem:
        return Observed(unknown=f"{folder} could not be tested: {tried.problem}")
    if not tried.values["same"]:
        action = "do not train on this volume; check its server and this node"
        return Observed(
            facts={"fails": f"{folder}: the data read back differs from the data written", "action": action}
        )
    return _room(folder, tried.values)


def _room(folder: str, values: Mapping[str, float]) -> Observed:
    seconds, free, inodes = values["seconds"], int(values["free_bytes"]), int(values["free_inodes"])
    text = f"{folder}: {in_units(free)} free, 1 MiB written, synced and read back in {seconds:.3f} s"
    problems = ["it is nearly full"] * (free < _LOW_BYTES)
    problems += [f"room for only {counted(inodes, 'more file')}"] * (0 <= inodes < _LOW_INODES)
    problems += ["it is slow"] * (seconds > _SLOW_S)
    more: dict[str, Any] = {"measured": round(seconds, 3), "expected": _SLOW_S, "unit": "s"}
    return Observed(facts={"low": "; ".join((text, *problems)) if problems else ""}, good=text, more=more)


class _Writer(Struct, frozen=True):
    host: str


class _ReportOfNode(Struct, frozen=True):
    node: _Writer


def fault_of(path: str, host: str) -> str:
    """Return the faults that the init container's preflight proved of this node; "": none, or no report.

    Nodes that share a volume may have written over each other's report.
    """
    left = LiveFiles(report_formats.MAX_BYTES + 1).read(path) or b""
    try:
        findings = report_formats.parse(left)
        if json.decode(left, type=_ReportOfNode).node.host != host:
            return ""
    except ValueError:
        return ""
    faulty = [finding for finding in findings if finding.proves_a_fault]
    own = [finding for finding in faulty if "node " not in finding.subject or f"({host})" in finding.subject]
    return "; ".join(f"{finding.check}: {finding.text}" for finding in own)[:500]
