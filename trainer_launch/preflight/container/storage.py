"""The folders of --storage, tried in children as a checkpoint would use them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.model.findings import Fault, Finding
from trainer_launch.model.units import counted, in_units
from trainer_launch.preflight.check import Subject, check

_CHILD_S = 20.0
_LEAST_S = 5.0  # whatever the deadline
_SLOW_S = 5.0  # for one file of 1 MiB
_LOW_BYTES, _LOW_INODES = 1 << 30, 1000
# Whatever node it is, these stay the same.
_JOBS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT))


@check("storage", limit_s=lambda subject: _CHILD_S + 2)
def storage(subject: Subject) -> Iterator[Finding]:
    """The folders of --storage take a checkpoint: made, synced, renamed, read back, removed, all in time."""
    if not subject.storage:
        yield storage.skipped("no directory was given with --storage")
    else:
        limit_s = subject.left_s(_LEAST_S, _CHILD_S)
        with ThreadPoolExecutor(len(subject.storage)) as pool:
            tried = pool.map(lambda folder: subject.try_out("storage", folder, limit_s), subject.storage)
        for folder, its in zip(subject.storage, tried, strict=True):
            yield _judged(folder, its, limit_s)


def _judged(folder: str, tried: Tried, limit_s: float) -> Finding:
    if tried.timed_out:
        text = f"{folder} hangs at {tried.stage or 'the start'}, after {limit_s:.0f} s"
        text += "; the process that waits for it cannot be killed" if tried.stuck else ""
        return _failed(
            folder, text, Fault.NODE, "check the file server and this node's connection to it (mount, CSI driver)"
        )
    if tried.errno is not None:
        fault = Fault.JOB if tried.errno in _JOBS else Fault.NODE
        return _failed(
            folder, f"{folder}: {os.strerror(tried.errno)} at {tried.stage}", fault, _advice(tried.errno)
        )
    if tried.trouble:
        text = f"{folder} could not be tested: {tried.trouble}"
        return storage.unknown(text, subject=folder)
    values = tried.values
    if not values["same"]:
        text = f"{folder}: the data read back differs from the data written"
        return _failed(folder, text, Fault.NODE, "do not train on this volume; see its server and this node")
    return _room(folder, values["seconds"], int(values["free_bytes"]), int(values["free_inodes"]))


def _room(folder: str, seconds: float, free: int, inodes: int) -> Finding:
    text = f"{folder}: {in_units(free)} free, 1 MiB written, synced and read back in {seconds:.3f} s"
    troubles = ["it is nearly full"] * (free < _LOW_BYTES)
    troubles += [f"room for only {counted(inodes, 'more file')}"] * (0 <= inodes < _LOW_INODES)
    troubles += ["it is slow"] * (seconds > _SLOW_S)
    told = storage.warned if troubles else storage.passed
    return told(
        "; ".join((text, *troubles)),
        subject=folder,
        measured=round(seconds, 3),
        expected=_SLOW_S,
        unit="s",
        action="make room on the volume, or see why it is slow" if troubles else "",
    )


def _failed(folder: str, text: str, fault: Fault, action: str) -> Finding:
    return storage.failed(fault, text, subject=folder, action=action)


def _advice(number: int) -> str:
    words = {
        errno.ENOENT: "mount the volume there, or make the folder",
        errno.EROFS: "the mount is read-only: see readOnly in volumeMounts, and the volume's access mode",
        errno.EACCES: "let this user write there: securityContext.fsGroup or runAsUser",
        errno.EPERM: "let this user write there: securityContext.fsGroup or runAsUser",
        errno.ENOSPC: "make room on the volume",
        errno.EDQUOT: "make room, or have the quota raised",
    }
    return words.get(number, "see the volume and its server")
