"""A trial in a process of its own, started by path with `-I -S`: only the standard library, as little as can be.

`storage FOLDER SECONDS` writes, renames and reads back a file, `memlock BYTES SECONDS` locks memory. Each stage is
told before it begins, so that who kills us knows where we hung.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable

_SIZE = 1 << 20
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL)


def main() -> None:
    """Do what the command line says."""
    what, argument, limit = sys.argv[1:4]
    # Should our parent die first: nobody would end us.
    signal.setitimer(signal.ITIMER_REAL, float(limit) + 5)
    try:
        values = TRIALS[what](argument)
    except OSError as problem:
        tell(errno=problem.errno)
    else:
        tell(values=values)


def tell(**report: object) -> None:
    """Print a line for the process that started us."""
    os.write(1, json.dumps(report).encode() + b"\n")


def storage(folder: str) -> dict[str, float]:
    """Do as a checkpoint does: create, write, fsync, rename, fsync the folder, read back, unlink.

    A bucket that is mounted as a folder lacks some of these; how many is a value.
    """
    # Random, as all nodes share it, and one that was killed here may have left a file.
    name = os.path.join(folder, f".trainer-launch-probe-{os.uname().nodename}-{os.urandom(8).hex()}")
    data = os.urandom(_SIZE)
    began = time.monotonic()
    at = name + ".new"
    lacks = 0
    tell(stage="create")
    file = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        tell(stage="write")
        written = 0
        while written < len(data):
            written += os.write(file, data[written:])
        tell(stage="fsync")
        lacks += not can(os.fsync, file)
        os.close(file)
        tell(stage="rename")
        if can(os.rename, at, name):
            at = name
        else:
            lacks += 1
        sync_folder(folder)
        tell(stage="read")
        with open(at, "rb") as back:
            same = back.read() == data
        tell(stage="unlink")
    finally:
        lacks += not can(os.unlink, at)
    seconds = time.monotonic() - began
    space = os.statvfs(folder)
    return {
        "seconds": seconds,
        "same": float(same),
        "lacks": float(lacks),
        "free_bytes": float(space.f_bavail * space.f_frsize if space.f_blocks else -1),  # -1: it tells none
        "free_inodes": float(space.f_favail if space.f_files else -1),  # -1: this file system has no such limit
    }


def can(act: Callable[..., object], *args: object) -> bool:
    """Do this; whether the file system has it at all."""
    try:
        act(*args)
    except OSError as problem:
        if problem.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def sync_folder(folder: str) -> None:
    """Make the rename last; file systems that cannot do it for a folder do without."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(place)
    except OSError:
        pass
    finally:
        os.close(place)


def memlock(argument: str) -> dict[str, float]:
    """Lock memory as RDMA does; the limit alone does not tell whether that works."""
    size = int(argument)
    import ctypes
    import mmap

    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # should memory run out, then we are the one to go
    except OSError:
        pass
    tell(stage="mlock")
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mlock = ctypes.CDLL(None, use_errno=True).mlock
    mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    if mlock(address, size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return {"bytes": float(size)}


TRIALS = {"storage": storage, "memlock": memlock}

if __name__ == "__main__":
    main()
