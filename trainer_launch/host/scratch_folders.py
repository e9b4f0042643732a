"""The private folder of a run, and those that killed runs have left in a pod whose /tmp outlives its containers.

A run locks its folder as long as it lives, also when it is killed. So PID 1 may remove those of its user that are
locked by nobody: all that a predecessor had started died with it, and a neighbour in the pod holds its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

from trainer_launch.host import runtime_directory
from trainer_launch.model.errors import UsageError

_LOCK = "lock"
_NEW = "."  # before a name, until the folder is locked


def private_folder() -> str:
    """Make one; a read-only root without /tmp still has the pod's /dev/shm.

    Raises:
        UsageError: no folder may be written.
    """
    try:
        made = _make(None)
    except OSError:
        try:
            made = _make(runtime_directory.SHM)
        except OSError as problem:
            raise UsageError(f"no writable directory ({problem}); mount an emptyDir at /tmp") from None
    if os.getpid() == 1:
        forget_killed(os.path.dirname(made))
    return made


def forget_killed(place: str) -> None:
    """Remove the folders in this one that killed runs of our user have left."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in list(entries):
            is_run = entry.name.startswith(runtime_directory.START) and entry.is_dir(follow_symlinks=False)
            if is_run and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                _forget(entry.path)


def _make(place: str | None) -> str:
    new = tempfile.mkdtemp(prefix=_NEW + runtime_directory.START, dir=place)
    lock = os.open(f"{new}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody else gets one, either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is ours until this process ends
    made = os.path.join(os.path.dirname(new), os.path.basename(new).removeprefix(_NEW))
    os.rename(new, made)
    return made


def _forget(folder: str) -> None:
    try:
        lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none that we have made
        return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
