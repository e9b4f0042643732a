"""The system call in which a thread waits, and the files and connections of this call.

/proc/PID/syscall may be read of one's own children, also with the kernel's default restrictions of ptrace. Where it
may not be read, or the machine is neither x86_64 nor aarch64, nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Collection, Iterator
from enum import Enum
from typing import NamedTuple

from trainer_launch.host import files


class CallKind(Enum):
    """The kind of a system call."""

    DATA = "data"  # reads or writes one descriptor
    PATH = "path"  # opens a file, asks about it, or closes it
    POLL = "poll"
    SELECT = "select"
    EPOLL = "epoll"
    CHILD = "child"  # waits for the end of a child
    LOCK = "lock"
    NO_FILE = "no file"  # of a device, or waits in the kernel for a new child
    OTHER = "other"  # such as a sleep; or none: a page of memory, which may be one of a mapped file


# Per kind the numbers on x86_64, then on aarch64.
_NUMBERS = {
    CallKind.DATA: (
        (0, 1, 17, 18, 19, 20, 40, 42, 44, 45, 46, 47, 74, 75, 275, 277, 295, 296, 326, 327, 328),
        (63, 64, 65, 66, 67, 68, 69, 70, 71, 76, 82, 83, 84, 203, 206, 207, 211, 212, 285, 286, 287),
    ),
    CallKind.PATH: (
        (2, 3, 4, 6, 21, 76, 77, 78, 82, 83, 87, 89, 217, 257, 258, 262, 263, 264, 267, 269, 285, 316, 332, 439),
        (34, 35, 38, 45, 46, 47, 48, 56, 57, 61, 78, 79, 276, 291, 439),
    ),
    CallKind.POLL: ((7, 271), (73,)),
    CallKind.SELECT: ((23, 270), (72,)),
    CallKind.EPOLL: ((232, 281, 441), (22, 441)),
    CallKind.CHILD: ((61, 247), (95, 260)),
    CallKind.LOCK: ((202,), (98,)),
    CallKind.NO_FILE: ((16, 56, 57, 58, 435), (29, 220, 435)),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(os.uname().machine)
_KINDS = {} if _COLUMN is None else {n: kind for kind, columns in _NUMBERS.items() for n in columns[_COLUMN]}
_MOST_FDS = 1024  # of one call
_OPENS_PIPE = re.compile("wait_for_partner|fifo|pipe")  # until somebody opens its other end
_WAIT4, _P_PID = (61, 260), 1
_CONNECTS, _LISTENS = "02", "0A"


class SystemCall(NamedTuple):
    """The call that a thread sleeps in."""

    kind: CallKind
    fds: tuple[int, ...] = ()
    files: tuple[str, ...] = ()  # what its descriptors lead to: a path, pipe:[NUMBER], socket:[NUMBER]
    child: int = 0  # the pid of the child whose end it waits for; 0: any, or none
    is_uninterruptible: bool = False  # state D


def of_thread(pid: int, tid: int) -> SystemCall | None:
    """The call that a thread sleeps in; None: it runs, has ended, or that may not be read."""
    folder = f"/proc/{pid}/task/{tid}"
    words = files.text(f"{folder}/syscall").split()
    try:
        number, *arguments = (int(word, 0) for word in words)
    except ValueError:  # `running`, or nothing
        return None
    if not _KINDS:
        return None
    kind = _KINDS.get(number, CallKind.OTHER)
    if kind is CallKind.PATH and _OPENS_PIPE.search(files.text(f"{folder}/wchan")):
        kind = CallKind.OTHER
    state = files.text(f"{folder}/stat").rpartition(")")[2].split()
    fds: tuple[int, ...] = ()
    with contextlib.suppress(OSError, struct.error):
        fds = tuple(_fds(pid, kind, arguments))
    links = tuple(link for fd in fds if (link := _link(pid, fd)))
    # wait4 has the pid first, waitid its type.
    child = arguments[0] if number in _WAIT4 else arguments[1] if arguments[:1] == [_P_PID] else 0
    child = child if kind is CallKind.CHILD and child < 1 << 31 else 0
    return SystemCall(kind, fds, links, child, is_uninterruptible=state[:1] == ["D"])


def of_other_threads(pid: int) -> Iterator[SystemCall]:
    """The calls of all threads but the main one."""
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            if int(tid) != pid and (call := of_thread(pid, int(tid))) is not None:
                yield call


def open_files(pid: int) -> frozenset[str]:
    """The targets of all descriptors of a process."""
    try:
        return frozenset(_link(pid, int(fd)) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return frozenset()


def connections(pid: int, own_ports: Collection[int] = ()) -> frozenset[str]:
    """The TCP connections of a process's network that do not lead to one of these ports, as socket:[NUMBER]."""
    others = (row for row in _tcp(pid) if row[3] != _LISTENS)
    return frozenset(f"socket:[{row[9]}]" for row in others if int(row[2].rpartition(":")[2], 16) not in own_ports)


def is_connecting(pid: int) -> bool:
    """Whether the main thread waits for a connection to be made; a library in C may give up if a signal comes."""
    call = of_thread(pid, pid)
    if call is None or not call.files:
        return False
    return any(f"socket:[{row[9]}]" in call.files for row in _tcp(pid) if row[3] == _CONNECTS)


def _tcp(pid: int) -> list[list[str]]:
    """The rows of the kernel's tables of TCP connections: addresses, state, number, and more."""
    lines = "".join(files.text(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")).splitlines()
    return [row for row in map(str.split, lines) if len(row) > 9 and row[0] != "sl"]


def _fds(pid: int, kind: CallKind, arguments: list[int]) -> Iterator[int]:
    first, second = arguments[0], arguments[1]
    if kind is CallKind.DATA:
        yield first & 0xFFFFFFFF
    elif kind is CallKind.POLL:
        size = 8 * min(second, _MOST_FDS)
        yield from (fd for fd, _ in struct.iter_unpack("=iI", _memory(pid, first, size)) if fd >= 0)
    elif kind is CallKind.SELECT:
        count = min(first & 0xFFFFFFFF, _MOST_FDS)
        for address in filter(None, arguments[1:4]):
            bits = int.from_bytes(_memory(pid, address, (count + 63) // 64 * 8), "little")
            yield from (fd for fd in range(count) if bits >> fd & 1)
    elif kind is CallKind.EPOLL:
        lines = files.text(f"/proc/{pid}/fdinfo/{first & 0xFFFFFFFF}").splitlines()
        yield from (int(line.split()[1]) for line in lines if line.startswith("tfd:"))


def _memory(pid: int, address: int, size: int) -> bytes:
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, size, address)
    finally:
        os.close(fd)


def _link(pid: int, fd: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
