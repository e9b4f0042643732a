"""Access to files that may never return: a file server that is gone holds each of its callers for ever.

PID 1 has to hear signals meanwhile. So its loop touches the files that a user or TMPDIR names by `within` only.
Little is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

WAIT_S = 2.0  # for an answer; a healthy file server needs milliseconds
LOCAL = (
    *("btrfs", "devtmpfs", "ext2", "ext3", "ext4", "f2fs"),
    *("overlay", "proc", "ramfs", "sysfs", "tmpfs", "xfs", "zfs"),
)
_REMEMBERED_S = 60.0  # how long a path's mount is taken to be the same
_MOST = 100  # paths: each restart has others
_MOST_LINKS = 40  # symbolic links of a path, as in the kernel
HEARD_S = 1.0  # a signal that comes just before a wait, or to another thread, does not end it
T = TypeVar("T")
_mounts: dict[str, tuple[float, str, bool]] = {}  # by path: when it was looked up, its mount, whether that is local
_waiting: dict[threading.Thread, str] = {}  # calls that have not returned in time, and of what, such as a mount


def within(path: str, default: T, call: Callable[..., T], *args: object, wait_s: float = WAIT_S) -> T:
    """Return the result of `call(*args)`, or `default` if that takes too long.

    `path` is what the call touches; on a local file system it is an ordinary call. While a call still hangs, others
    on the same mount are not tried.

    Raises:
        Exception: what the call raises.
    """
    mount, is_local = _mount_of(path)
    return call(*args) if is_local else in_time(mount, default, call, *args, wait_s=wait_s)


def in_time(what: str, default: T, call: Callable[..., T], *args: object, wait_s: float = WAIT_S) -> T:
    """Like `within`, for calls that may touch files anywhere; `what` names those of which only one may hang."""
    if _hangs(what):
        return default
    answer: list[Any] = []  # (value, None) or (None, problem)

    def work() -> None:
        try:
            answer.append((call(*args), None))
        except BaseException as problem:  # noqa: BLE001 - the caller's
            answer.append((None, problem))

    thread = threading.Thread(target=work, name="files", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed
        return call(*args)
    join(thread, wait_s)
    if not answer:
        _waiting[thread] = what
        return default
    value, problem = answer[0]
    if problem is not None:
        raise problem
    return value  # type: ignore[no-any-return]


def join(thread: threading.Thread, limit_s: float = math.inf) -> None:
    """Wait for a thread's end, at most so long; handlers of signals run meanwhile."""
    until_s = time.monotonic() + limit_s
    while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
        thread.join(min(left_s, HEARD_S))


def file_behind(fd: int) -> str:
    """The path of the regular file that a descriptor writes to, "" for all else."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")  # asks no file server, in contrast to fstat
        status = within(path, None, os.fstat, fd)
    except OSError:
        return ""
    is_file = path.startswith("/") and (status is None or stat.S_ISREG(status.st_mode))  # None: its server is gone
    return path if is_file else ""


def _hangs(what: str) -> bool:
    for thread in [*_waiting]:  # which other threads change, too
        if not thread.is_alive():
            _waiting.pop(thread, None)
    return what in [*_waiting.values()]


def _mount_of(path: str) -> tuple[str, bool]:
    looked_s, mount, is_local = _mounts.get(path, (-_REMEMBERED_S, "", False))
    if time.monotonic() - looked_s < _REMEMBERED_S:
        return mount, is_local
    mount, kind = mount_of(path)
    if len(_mounts) > _MOST:
        _mounts.clear()
    _mounts[path] = time.monotonic(), mount, kind in LOCAL
    return mount, kind in LOCAL


def mount_of(path: str) -> tuple[str, str]:
    """Where the file system of a path is mounted, and its kind. Only local file systems are asked.

    Symbolic links are followed as far as these are on local ones: what lies behind another mount is on it.
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            lines = [line.split(" ") for line in file]
    except OSError:
        lines = []
    places = [(line[1].replace("\\040", " "), line[2]) for line in lines]
    if not path.startswith("/"):
        path = f"{os.readlink('/proc/self/cwd')}/{path}"  # os.getcwd() fails where the folder is gone
    place, names, left = "", path.split("/")[::-1], _MOST_LINKS
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        below = os.path.dirname(place) if name == ".." else f"{place}/{name}"
        mount, kind = _place_of(below, places)
        if kind not in LOCAL:
            return mount, kind
        try:
            target = os.readlink(below) if left and below else ""
        except OSError:  # no link, or not there
            target = ""
        if target:
            left -= 1
            names += target.split("/")[::-1]
            below = "" if target.startswith("/") else place
        place = "" if below == "/" else below
    return _place_of(place, places)


def _place_of(path: str, places: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The last of the mounts that are deepest above a path."""
    fitting = [place for place in places if f"{path}/".startswith(f"{place[0].rstrip('/')}/")]
    deepest = max((len(place) for place, _ in fitting), default=0)
    return next((place for place in reversed(fitting) if len(place[0]) == deepest), ("/", ""))
