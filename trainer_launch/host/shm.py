"""The memory file system at /dev/shm: its room, what lies in it, and making it larger; what dead workers leave.

Its pages count against the container's memory limit, like any other memory. In Kubernetes all containers of a pod
share one (the pod sandbox's, 64 MiB, or an emptyDir that they mount), and it outlives a container's restart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from trainer_launch.host import files
from trainer_launch.host.slow_files import within
from trainer_launch.model.errors import MALFORMED, NodeError
from trainer_launch.model.units import counted, in_units

FOLDER = "/dev/shm"
MAX_SEGMENTS = 20_000  # that one look reads; llm-d#352 counted hundreds after a night in a crash loop
_CAPABILITIES = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_CAP_SYS_ADMIN = 21
_log = logging.getLogger(__name__)
_MS_REMOUNT = 32
_MS_RELATIME = 1 << 21
_ST_RELATIME = 4096
_SAME_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # ro, nosuid, nodev, noexec, noatime, nodiratime: ST_ and MS_ agree


class Space(Struct, frozen=True):
    """How much there is and how much of it is free."""

    size_bytes: int
    free_bytes: int


class Segment(Struct, frozen=True):
    """A file of the memory file system, as `lstat` has it."""

    name: str
    inode: int
    device: int
    uid: int
    size_bytes: int  # pages that it takes, not its length

    @property
    def key(self) -> tuple[str, int]:
        """The identity that no later segment of the same name has."""
        return self.name, self.inode


def space(folder: str = FOLDER) -> Space | None:
    """Measure; None where there is no such folder."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def segments(folder: str = FOLDER) -> tuple[Segment, ...]:
    """List the regular files directly in it, the largest first; links and folders are no segments."""
    try:
        with os.scandir(folder) as entries:
            listing = [
                segment for _, entry in zip(range(MAX_SEGMENTS), entries, strict=False) for segment in _of(entry)
            ]
    except OSError:
        return ()
    return tuple(sorted(listing, key=lambda segment: (-segment.size_bytes, segment.name)))


def _of(entry: os.DirEntry[str]) -> Iterator[Segment]:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # it went away while we were looking
        return
    if stat.S_ISREG(status.st_mode):
        taken = status.st_blocks * 512
        yield Segment(entry.name, status.st_ino, status.st_dev, status.st_uid, taken)


def may_enlarge(root: Path = Path("/")) -> bool:
    """Whether this process may try: it can mount, and what is there is a writable memory file system."""
    capabilities = _CAPABILITIES.search(files.text(root / "proc/self/status"))
    mounts = files.text(root / "proc/self/mounts").splitlines()
    mounted = [fields for fields in map(str.split, mounts) if fields[1:2] == [FOLDER]]
    if not mounted or len(mounted[-1]) < 4 or not capabilities:
        return False
    kind, options = mounted[-1][2:4]  # the last one covers the others
    return (
        bool(int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1) and kind == "tmpfs" and "ro" not in options.split(",")
    )


def enlarge(size_bytes: int) -> Space:
    """Give the memory file system this size, if it is smaller; what lies in it stays.

    Raises:
        NodeError: the kernel refuses; only a container with CAP_SYS_ADMIN may.
    """
    before = space(FOLDER)
    if before is None:
        raise NodeError(
            f"{FOLDER} is not there, so it cannot be made larger; mount an emptyDir with medium: Memory"
        )
    if before.size_bytes < size_bytes:
        _remount(size_bytes)
    return space(FOLDER) or before


def _remount(size_bytes: int) -> None:
    import ctypes  # 10 ms, and hardly anybody comes here

    flags = os.statvfs(FOLDER).f_flag
    kept = flags & _SAME_FLAGS | (_MS_RELATIME if flags & _ST_RELATIME else 0)  # what is not named again is dropped
    mount = ctypes.CDLL(None, use_errno=True).mount
    mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    if mount(b"tmpfs", FOLDER.encode(), b"tmpfs", _MS_REMOUNT | kept, b"size=%d" % size_bytes) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NodeError(f"{FOLDER} cannot be made larger ({why}); mount an emptyDir with medium: Memory there")


def write_error(size_bytes: int, folder: str = FOLDER) -> int | None:
    """Really write so much: the errno of what failed, None when all went well. Nothing stays."""
    # Not our pid: containers of a pod share this folder, and each has a process 1.
    name = os.path.join(folder, f".trainer-launch-probe-{os.urandom(8).hex()}")
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(name)
            block = bytes(min(size_bytes, 1 << 20))
            written = 0
            while written < size_bytes:
                written += os.write(file, block[: size_bytes - written])
        finally:
            os.close(file)
    except OSError as problem:
        return problem.errno or 0
    return None


# A segment is removed when a dead process of this run has left it behind, which means that all of this holds:
#
# - its name is one that a framework gives to what its processes share (`FAMILIES`); every other name stays;
# - it belongs to our user, is a regular file with one name, and was not there before this run began;
# - the kernel grants a write lease on it, which it does only when no process on this machine has the file open or
#   mapped: also none of another pid namespace, of a sidecar, or of the host. A kernel without leases means: keep;
# - a pid in its name (`torch_<pid>_…`) is of no process that we can see: its maker may still hand it on.
#
# What was there before is what lay there at our first start. In a pod /dev/shm outlives a killed container, whose
# successor reads the note that `Baseline` has written. It trusts the note only as PID 1 of a pid namespace, with
# our host name and user, and a free lock: then all that the predecessor had started died with it.
#
# What remains: a neighbour's segment that was made since, between its maker's close and its reader's open.
FAMILIES = re.compile(
    r"torch_(?P<pid>\d+)_\d+(_\d+)?"  # torch's tensors by the file_system strategy
    r"|psm_[0-9a-f]+"  # Python's SharedMemory
    r"|sem\.(mp|loky)-[\w-]+"  # Python's and joblib's semaphores and locks
    r"|nccl-(shm-(send|recv)-[\w-]+|\w{6})"
    r"|(vader|sm)_segment\.[\w.-]+"  # Open MPI 3 to 5
    r"|ucx_shm_posix_[0-9a-f]+"
    r"|(Intel_MPI|mpich_shm|mpich_shar_tmp)\w+"
)
_NOTE = ".trainer-launch-before"
_MAX_NOTE_BYTES = 4_194_304
_LETS_GO_S = 0.05
# Whoever opens a leased file signals the holder: by default with SIGIO, of which it dies. This one is harmless.
_LEASE_SIGNAL = signal.SIGCHLD

Key = tuple[str, int]


class Removed(Struct, frozen=True):
    """The result of a sweep."""

    count: int = 0
    size_bytes: int = 0

    def __str__(self) -> str:
        removed = counted(self.count, "shared memory segment")
        return f"removed {removed} ({in_units(self.size_bytes)}) of dead workers"


def sweep(before: Collection[Key], folder: str = FOLDER) -> Removed:
    """Remove what dead processes of this run have left; `before` was there when it began."""
    left = [segment for segment in segments(folder) if segment.key not in before and _may_be_ours(segment)]
    gone = _remove_unheld(left, folder)
    if len(gone) < len(left):
        # Whoever reads /proc/PID/stat of a killed process keeps its memory a moment longer than it lives.
        time.sleep(_LETS_GO_S)
        gone += _remove_unheld([segment for segment in left if segment not in gone], folder)
    return Removed(len(gone), sum(segment.size_bytes for segment in gone))


def _remove_unheld(candidates: Collection[Segment], folder: str) -> tuple[Segment, ...]:
    if not candidates:
        return ()
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        return tuple(segment for segment in candidates if _take(place, segment))
    finally:
        os.close(place)


def _may_be_ours(segment: Segment) -> bool:
    family = FAMILIES.fullmatch(segment.name)
    if family is None or segment.uid != os.geteuid():
        return False
    return family["pid"] is None or not os.path.exists(f"/proc/{family['pid']}")


def _take(place: int, segment: Segment) -> bool:
    """Remove it unless somebody on this machine has it; the lease is held over the removal. Whether it is gone."""
    try:
        held = os.open(segment.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return False
    try:
        status = os.fstat(held)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_ino != segment.inode:
            return False
        fcntl.fcntl(held, fcntl.F_SETSIG, _LEASE_SIGNAL)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.unlink(segment.name, dir_fd=place)
    except OSError:  # somebody has it, the kernel grants no leases, or the folder is read-only
        return False
    finally:
        os.close(held)
    return True


class Baseline:
    """The contents of /dev/shm before this run: remembered to the end, and as PID 1 over a container's restart."""

    def __init__(self, hostname: str, folder: str = FOLDER, *, is_pid1: bool | None = None) -> None:
        self._hostname = hostname
        self._folder = folder
        self._note = -1
        self.removed = Removed()  # of a predecessor in this pod
        inherited = self._predecessors() if (os.getpid() == 1 if is_pid1 is None else is_pid1) else None
        if inherited is not None:
            self.removed = sweep(inherited, folder)
        self.before = frozenset(inherited if inherited is not None else (s.key for s in segments(folder)))
        self._write()

    def sweep(self) -> Removed:
        """Remove what was left since."""
        return sweep(self.before, self._folder)

    def close(self) -> None:
        """Forget: an orderly end leaves nothing to know."""
        if self._note >= 0:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, _NOTE))
            os.close(self._note)
            self._note = -1

    def _predecessors(self) -> frozenset[Key] | None:
        """Open and lock the note; return what it says, None when it is new or not to be trusted."""
        path = os.path.join(self._folder, _NOTE)
        try:
            note = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        status = os.fstat(note)
        try:
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
                raise OSError
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = os.read(note, _MAX_NOTE_BYTES)
        except OSError:  # another launcher lives beside us and shares this folder: its note
            os.close(note)
            return None
        self._note = note
        return _parsed(content, self._hostname)

    def _write(self) -> None:
        if self._note >= 0:
            text = json.dumps({"hostname": self._hostname, "before": sorted(self.before)}).encode()
            with contextlib.suppress(OSError):  # full: then there is no memory over a restart
                os.truncate(self._note, 0)
                os.pwrite(self._note, text, 0)


def _parsed(content: bytes, hostname: str) -> frozenset[Key] | None:
    try:
        note = json.loads(content)
        if note["hostname"] != hostname:
            return None
        return frozenset((str(name), int(inode)) for name, inode in note["before"])
    except MALFORMED:
        return None


# In the folder for temporary files `multiprocessing` makes `pymp-…`, and torch's manager of shared memory
# `torch-shm-dir-…`, each with its sockets; they remove them at an orderly end. Such a folder is a dead process's if
# no socket in it has a listener: no process of this network namespace has bound it, and the kernel refuses a
# connection. One without a socket proves nothing.
TMP_VARIABLES = ("TMPDIR", "TEMP", "TMP")  # as Python's tempfile reads them
MOST_TMP_BYTES = 107 - len("/torch-shm-dir-123456/manager.sock")  # of a folder's path, for sockets' in it
_SOCKET_FOLDERS = re.compile(r"pymp-\w{8}|torch-shm-dir-\w{6}")
_MOST_FOLDERS = 1000  # that one sweep looks at


def too_long_for_sockets(env: Mapping[str, str]) -> str | None:
    """Why sockets cannot be made in the folder for temporary files, by the length of its path."""
    name = next((name for name in TMP_VARIABLES if env.get(name)), None)
    size = 0 if name is None else len(os.fsencode(env[name]))
    if size <= MOST_TMP_BYTES:
        return None
    return (
        f"{name} is a path of {size} bytes, and sockets in it need one of at most {MOST_TMP_BYTES}: data loaders "
        f"with workers and torch.multiprocessing may hang or fail"
    )


def sweep_sockets(place: str) -> int:
    """Remove those of our user in this folder that dead processes have left; how many."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        chosen = [entry.path for entry in entries if _SOCKET_FOLDERS.fullmatch(entry.name)][:_MOST_FOLDERS]
        bound = files.text("/proc/net/unix") if chosen else ""
        return sum(_remove_folder(path, bound) for path in chosen)
    return 0


def _remove_folder(folder: str, bound: str) -> bool:
    """Remove a dead process's folder; whether it was and is gone."""
    try:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        paths = [os.path.join(folder, name) for name in os.listdir(folder)]
        if not paths or not all(f" {path}\n" not in bound and _has_no_listener(path) for path in paths):
            return False
        for path in paths:
            os.unlink(path)
        os.rmdir(folder)
    except OSError:
        return False
    return True


def _has_no_listener(path: str) -> bool:
    """Whether this is a socket without a listener."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


@contextlib.contextmanager
def kept_clean() -> Iterator[Callable[[], None]]:
    """Remove what a killed predecessor left; yield what removes our dead workers' share, and do that at the end."""
    baseline, place = Baseline(os.uname().nodename), ""
    with contextlib.suppress(FileNotFoundError):  # no folder takes files: workers leave none there
        place = tempfile.gettempdir()

    def sweep_folders() -> None:
        folders = within(place, 0, sweep_sockets, place) if place else 0
        if folders:
            _log.info("removed %s of dead workers from %s", counted(folders, "folder"), place)

    def sweep() -> None:
        removed = baseline.sweep()
        if removed.count:
            _log.info("%s", removed)
        sweep_folders()

    if baseline.removed.count:
        _log.info("%s of this container's previous run", baseline.removed)
    sweep_folders()
    try:
        yield sweep
    finally:
        sweep()
        baseline.close()
