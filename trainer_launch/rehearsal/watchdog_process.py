"""Outlives a rehearsal that is killed by SIGKILL, ends its pods, removes its folder: `watchdog_process.py FOLDER`.

Runs by itself, of the standard library alone. It reads its standard input, whose other end only the rehearsal
holds: any byte means that the rehearsal has cleaned up, the end of input that it was killed before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time

_ROUNDS, _PAUSE_S = 100, 0.05
_DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(folder: str) -> None:
    """Wait, and clean up if need be."""
    for number in _DEAF:  # a signal to the rehearsal's group means the rehearsal, which ends this process
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read(1):
        return
    for _ in range(_ROUNDS):  # what is forked meanwhile is met in the next round
        left = _processes_of(folder.encode())
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)
    for place in os.scandir(os.path.dirname(folder)):
        if place.name.startswith("trainer-launch-") and place.is_dir(follow_symlinks=False):
            _forget(place.path)


def _forget(folder: str) -> None:
    """Remove the private folder of a launcher that was killed: its lock is free."""
    opened = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW  # whatever a worker has put there
    with contextlib.suppress(OSError), open(os.open(f"{folder}/lock", opened), "rb") as lock:
        if os.fstat(lock.fileno()).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _processes_of(mark: bytes) -> set[int]:
    """All whose environment names the folder, or, as an sshd's does, whose command line; and all below them."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[:2]
            if state == b"Z" or int(name) == os.getpid():
                continue
            parents[int(name)] = int(parent)
            if mark in _read(f"/proc/{name}/cmdline") or mark in _read(f"/proc/{name}/environ"):
                marked.add(int(name))
    while below := {pid for pid, parent in parents.items() if parent in marked} - marked:
        marked |= below
    return marked


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    if os.fork():  # an orphan is no child of the rehearsal, which reaps and counts only its pods
        os._exit(0)
    main(sys.argv[1])
