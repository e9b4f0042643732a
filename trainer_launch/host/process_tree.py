"""Processes below a process, their environments, and the system calls that they wait in; killing all of them.

/proc/PID/syscall may be read of one's own children, also with the kernel's default restrictions of ptrace. Where it
may not be read, or the machine is neither x86_64 nor aarch64, nothing is known.

Some files of /proc/PID wait for a lock of that process, which it may hold for ever where a file server is gone:
`environ` and `mem` for that of its memory map; `io`, `syscall`, `stack`, in state D, for one of an exec.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import NamedTuple, TypeVar

from msgspec import Struct

from trainer_launch.host import files
from trainer_launch.host.slow_files import in_time
from trainer_launch.model.errors import MALFORMED, NodeError
from trainer_launch.model.units import counted

_MAX_BYTES = 1 << 20  # of an environment; the kernel allows 128 KiB a variable
_TRIES = 3  # a parent that ends between two reads hides its children from that scan
_SWEEPS = 100  # looks of one sweep; each finds only what was forked during the one before
_MOST_FDS = 1024  # of one system call
_OPENS_PIPE = re.compile("wait_for_partner|fifo|pipe")  # until somebody opens its other end
_WAIT4, _P_PID = (61, 260), 1  # numbers of the call on x86_64 and aarch64; a type of waitid
_CONNECTS, _LISTENS = "02", "0A"  # states of TCP connections
_UNLOCKED_S = 0.5  # for the locks of a process
T = TypeVar("T")


class ProcessEntry(Struct, frozen=True):
    """A live process, as /proc/PID/stat has it; (pid, started) is never used twice."""

    pid: int
    name: str
    state: str  # D: in the kernel, uninterruptible; T: suspended
    parent: int
    group: int
    session: int
    started: int  # clock ticks since boot

    @property
    def key(self) -> tuple[int, int]:
        """The identity that no later process with the same number has."""
        return self.pid, self.started

    def __str__(self) -> str:
        stuck = ", stuck in the kernel (state D)" if self.state == "D" else f", state {self.state}"
        return f"pid {self.pid} ({self.name}{stuck})"


def parse_stat(text: str) -> ProcessEntry:
    """Parse one line of /proc/PID/stat; the name may itself hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return ProcessEntry(
        pid=int(pid),
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
    )


def readable() -> bool:
    """Whether /proc is there and shows our own pid namespace; in another's the numbers name strangers."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def require(who: str) -> None:
    """Raise NodeError where there is no /proc, without which they cannot work."""
    if not os.path.exists("/proc/self"):
        raise NodeError(f"/proc is not mounted, and {who} cannot run without it; mount it, or run elsewhere")


def read(pid: int, proc: str = "/proc") -> ProcessEntry | None:
    """Return one process, None when there is none."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            return parse_stat(file.read().decode(errors="replace"))
    except (OSError, *MALFORMED):  # it has ended, or a sandbox shows less than Linux
        return None


def unlocked(pid: int, default: T, look: Callable[..., T], *args: object) -> T:
    """The result of a look at a process; `default` where it holds a lock that the look waits for."""
    return in_time(f"pid {pid}", default, look, *args, wait_s=_UNLOCKED_S)


def environment(pid: int, proc: str = "/proc") -> dict[str, str] | None:
    """Return what a process was started with; None when it has ended, is locked, or is not ours to read."""
    return unlocked(pid, None, _environment, pid, proc)


def _environment(pid: int, proc: str) -> dict[str, str] | None:
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            entries = file.read(_MAX_BYTES).split(b"\0")
    except OSError:
        return None
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)


# Bits of /proc/PID/coredump_filter for memory that lies on persistent devices, which no training process has.
_MARKS = (0x100, 0x80)


@cache
def mark_descendants() -> int:
    """Mark all that this process starts from now on, and all that those start; return the mark, 0 where it cannot.

    It stays over `fork`, `exec`, a session of its own and an empty environment. What `kubectl exec` starts has
    another parent, and no mark. A launcher below another one takes the mark that it has not inherited.
    Where a sandbox has no marks, all descendants of ours count, also what `kubectl exec` has left to PID 1.
    """
    try:
        with open("/proc/self/coredump_filter", "r+", encoding="ascii") as file:
            value = int(file.read(), 16)
            mark = next((mark for mark in _MARKS if not value & mark), 0)
            file.seek(0)
            file.write(f"{value & ~sum(_MARKS) | mark:#x}")
    except (OSError, ValueError):  # a sandbox may show less than Linux
        return 0
    return mark


def mark_of(pid: int) -> int:
    """The mark of a process; 0: it has none, or has ended."""
    text = files.text(f"/proc/{pid}/coredump_filter").strip()
    return int(text, 16) & sum(_MARKS) if text else 0


def descendants(of: int, proc: str = "/proc", *, besides: Collection[int] = ()) -> tuple[ProcessEntry, ...]:
    """Return everything alive below process `of`, but for the processes `besides` and what is below them.

    Zombies are left out, what is below them is not.
    """
    entries: dict[int, ProcessEntry] = {}
    for _ in range(_TRIES):
        entries = {entry.pid: entry for entry in _scan(proc)}
        if all(entry.parent in entries for entry in entries.values() if entry.parent != 0):
            break
    below: dict[int, list[ProcessEntry]] = {}
    for entry in entries.values():
        below.setdefault(entry.parent, []).append(entry)
    entries_below, queue = [], [of]
    while queue:
        children = [child for child in below.get(queue.pop(), []) if child.pid not in besides]
        entries_below += children
        queue += [child.pid for child in children]
    return tuple(entry for entry in entries_below if entry.state not in "ZX")


def children(of: int, proc: str = "/proc") -> frozenset[int] | None:
    """Return the pids of a process's children, None where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    pids: set[int] = set()
    try:
        for task in os.listdir(f"{proc}/{of}/task"):
            with open(f"{proc}/{of}/task/{task}/children", "rb") as file:
                pids |= {int(word) for word in file.read().split()}
    except (OSError, ValueError):
        return None
    return frozenset(pids) if all(pid > 0 for pid in pids) else None  # 0 would be all of us


def bearing(of: int, names: Collection[str]) -> frozenset[tuple[int, int]]:
    """Return who below process `of` has a name of `names`, or such a one below it, and something else at its end.

    Those are a daemon with ranks, and the shell and the ssh session above it; a daemon without ranks is not.
    """
    entries = descendants(of)
    by_pid = {entry.pid: entry for entry in entries}
    above = {entry.pid: _above(entry, by_pid) for entry in entries}
    chain = {entry.pid for entry in entries if entry.name in names}
    chain |= {upper.pid for pid in chain for upper in above[pid]}
    borne = {upper for entry in entries if entry.pid not in chain for upper in above[entry.pid]}
    return frozenset(upper.key for upper in borne if upper.pid in chain)


def below(of: int, pids: Collection[int]) -> frozenset[tuple[int, int]]:
    """Return who below process `of` is also below one of these."""
    entries = descendants(of) if pids else ()
    by_pid = {entry.pid: entry for entry in entries}
    return frozenset(e.key for e in entries if any(upper.pid in pids for upper in _above(e, by_pid)))


def send(pid: int, number: int) -> bool:
    """Signal one process; whether it was there, and ours to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False


def sweep(look: Callable[[], Iterable[ProcessEntry]], tell: Callable[[ProcessEntry], object]) -> int:
    """Signal until a look finds nobody new, for what is forked meanwhile; return how many."""
    done: set[tuple[int, int]] = set()
    for _ in range(_SWEEPS):
        fresh = [entry for entry in look() if entry.key not in done]
        if not fresh:
            break
        for entry in fresh:
            tell(entry)
            done.add(entry.key)
    return len(done)


def kill(child: int, *, below_first: bool = True) -> None:
    """SIGKILL a child that nobody has waited for yet, all below it, and its group where it leads one."""
    below = () if below_first else descendants(child)
    if below_first:
        sweep(lambda: descendants(child), lambda entry: send(entry.pid, signal.SIGKILL))
    for pid in (child, *(entry.pid for entry in below)):
        send(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads none
        os.killpg(child, signal.SIGKILL)


def _above(entry: ProcessEntry, by_pid: Mapping[int, ProcessEntry]) -> tuple[ProcessEntry, ...]:
    chain: list[ProcessEntry] = []
    while entry.parent in by_pid and len(chain) < len(by_pid):
        entry = by_pid[entry.parent]
        chain.append(entry)
    return tuple(chain)


def _scan(proc: str) -> Iterator[ProcessEntry]:
    for name in os.listdir(proc):
        entry = read(int(name), proc) if name.isdigit() else None
        if entry is not None:  # None: it ended while we were reading
            yield entry


_THREADS = 64  # shown of each process
_LINES = 8  # of a kernel stack
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


def describe(pid: int) -> str:
    """All threads of a process, one line each, with their kernel stacks where those may be read."""
    return unlocked(pid, "  does not let itself be read\n", _described, pid)


def _described(pid: int) -> str:
    folder = f"/proc/{pid}/task"
    try:
        threads = sorted(map(int, os.listdir(folder)))
    except OSError:
        return "  gone\n"
    shown = [_thread(f"{folder}/{tid}", tid) for tid in threads[:_THREADS]]
    more = f"  and {counted(len(threads) - _THREADS, 'more thread')}\n" if len(threads) > _THREADS else ""
    return "".join(shown) + more


def sleeps_in(pid: int, proc: str = "/proc") -> str:
    """The kernel's function that the main thread sleeps in, "" when it runs or that may not be read."""
    return files.text(f"{proc}/{pid}/wchan").strip().strip("0")


def thread_named(pid: int, name: str) -> int | None:
    """The number of a process's thread of this name; None: it has none."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    return next((int(tid) for tid in tids if files.text(f"/proc/{pid}/task/{tid}/comm").strip() == name), None)


def catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether a process has a handler for a signal; who has none may die of it."""
    caught = _CAUGHT.search(files.text(f"{proc}/{pid}/status"))
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _thread(folder: str, tid: int) -> str:
    name = files.text(f"{folder}/comm").strip()
    state = (files.text(f"{folder}/stat").rpartition(")")[2].split() or ["?"])[0]
    call = files.text(f"{folder}/syscall").split()
    words = [f"  thread {tid} ({name}) state {state}", files.text(f"{folder}/wchan").strip().strip("0")]
    if call[:1] and call[0].lstrip("-").isdigit():
        words.append(f"system call {call[0]}")
    kernel = [f"      {line}\n" for line in files.text(f"{folder}/stack").splitlines()[:_LINES]]
    return " ".join(word for word in words if word) + "\n" + "".join(kernel)


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
    is_uninterruptible = files.text(f"{folder}/stat").rpartition(")")[2].split()[:1] == ["D"]
    if is_uninterruptible:
        return unlocked(pid, None, _call_in, folder, pid, is_uninterruptible)
    return _call_in(folder, pid, is_uninterruptible)


def _call_in(folder: str, pid: int, is_uninterruptible: bool) -> SystemCall | None:
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
    fds: tuple[int, ...] = ()
    with contextlib.suppress(OSError, struct.error):
        fds = tuple(_fds(pid, kind, arguments))
    links = tuple(link for fd in fds if (link := _link(pid, fd)))
    # wait4 has the pid first, waitid its type.
    child = arguments[0] if number in _WAIT4 else arguments[1] if arguments[:1] == [_P_PID] else 0
    child = child if kind is CallKind.CHILD and child < 1 << 31 else 0
    return SystemCall(kind, fds, links, child, is_uninterruptible)


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


def connections(pid: int) -> dict[str, int]:
    """The TCP connections of a process's network, as socket:[NUMBER], and the ports that they lead to."""
    rows = (row for row in _tcp(pid) if row[3] != _LISTENS)
    return {f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16) for row in rows}


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
    return unlocked(pid, b"", _memory_at, pid, address, size)


def _memory_at(pid: int, address: int, size: int) -> bytes:
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
