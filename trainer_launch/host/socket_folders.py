"""Leftovers of killed processes in the folder for temporary files: the folders in which they listened.

`multiprocessing` makes `pymp-…` and torch's manager of shared memory `torch-shm-dir-…`, each with its sockets, and
removes them at an orderly end. Such a folder is a dead process's if no socket in it has a listener: no process of
this network namespace has bound it, and the kernel refuses a connection. One without a socket proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Mapping

from trainer_launch.host import files

VARIABLES = ("TMPDIR", "TEMP", "TMP")  # as Python's tempfile reads them
MOST_BYTES = 107 - len("/torch-shm-dir-123456/manager.sock")  # of a folder's path, for sockets' in it
_FAMILIES = re.compile(r"pymp-\w{8}|torch-shm-dir-\w{6}")
_MOST = 1000  # that one sweep looks at


def too_long(env: Mapping[str, str]) -> str | None:
    """Why sockets cannot be made in the folder for temporary files, by the length of its path."""
    name = next((name for name in VARIABLES if env.get(name)), None)
    size = 0 if name is None else len(os.fsencode(env[name]))
    if size <= MOST_BYTES:
        return None
    return (
        f"{name} is a path of {size} bytes, and sockets in it need one of at most {MOST_BYTES}: data loaders with "
        f"workers and torch.multiprocessing may hang or fail"
    )


def sweep(place: str) -> int:
    """Remove those of our user in this folder that dead processes have left; how many."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        chosen = [entry.path for entry in entries if _FAMILIES.fullmatch(entry.name)][:_MOST]
        bound = files.text("/proc/net/unix") if chosen else ""
        return sum(_remove(path, bound) for path in chosen)
    return 0


def _remove(folder: str, bound: str) -> bool:
    """Remove a dead process's folder; whether it was and is gone."""
    try:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        paths = [os.path.join(folder, name) for name in os.listdir(folder)]
        if not paths or not all(f" {path}\n" not in bound and _is_dead(path) for path in paths):
            return False
        for path in paths:
            os.unlink(path)
        os.rmdir(folder)
    except OSError:
        return False
    return True


def _is_dead(path: str) -> bool:
    """Whether this is a socket without a listener."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED
