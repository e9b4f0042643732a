"""The memory file system at /dev/shm: its room, what lies in it, who uses that, and making it larger.

Its pages count against the container's memory limit, like any other memory. In Kubernetes all containers of a pod
share one (the pod sandbox's, 64 MiB, or an emptyDir that they mount), and it outlives a container's restart.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from trainer_launch.model.errors import NodeError
from trainer_launch.model.frozen import dataclass

FOLDER = "/dev/shm"
MAX_SEGMENTS = 20_000  # that one look reads; llm-d#352 counted hundreds after a night in a crash loop
_CAPABILITIES = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_CAP_SYS_ADMIN = 21
_MS_REMOUNT = 32
_MS_RELATIME = 1 << 21
_ST_RELATIME = 4096
_SAME_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # ro, nosuid, nodev, noexec, noatime, nodiratime: ST_ and MS_ agree


@dataclass(frozen=True, slots=True)
class Room:
    """How much there is and how much of it is free."""

    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the memory file system, as `lstat` has it."""

    name: str
    inode: int
    device: int
    uid: int
    size_bytes: int  # pages that it takes, not its length

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from a later one of the same name."""
        return self.name, self.inode


def room(folder: str = FOLDER) -> Room | None:
    """Measure; None where there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def segments(folder: str = FOLDER) -> tuple[Segment, ...]:
    """List the regular files directly in it, the largest first; links and folders are no segments."""
    try:
        with os.scandir(folder) as entries:
            found = [
                segment for _, entry in zip(range(MAX_SEGMENTS), entries, strict=False) for segment in _of(entry)
            ]
    except OSError:
        return ()
    return tuple(sorted(found, key=lambda segment: (-segment.size_bytes, segment.name)))


def _of(entry: os.DirEntry[str]) -> Iterator[Segment]:
    try:
        seen = entry.stat(follow_symlinks=False)
    except OSError:  # it went away while we were looking
        return
    if stat.S_ISREG(seen.st_mode):
        taken = seen.st_blocks * 512
        yield Segment(entry.name, seen.st_ino, seen.st_dev, seen.st_uid, taken)


def holders(of: Collection[Segment], proc: str = "/proc") -> dict[tuple[str, int], tuple[int, ...]]:
    """Find who has these mapped or open now, among the processes that we can see and may look into."""
    wanted = {(segment.device, segment.inode): segment.key for segment in of}
    found: dict[tuple[str, int], list[int]] = {}
    for name in _listed(proc):
        if name.isdigit():
            files = set(_mapped(f"{proc}/{name}/maps")) | set(_opened(f"{proc}/{name}/fd"))
            for file in files & wanted.keys():
                found.setdefault(wanted[file], []).append(int(name))
    return {key: tuple(sorted(pids)) for key, pids in found.items()}


def _mapped(path: str) -> Iterator[tuple[int, int]]:
    """Devices and inodes in /proc/PID/maps: `range perms offset major:minor inode path`."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[4] != b"0":
            major, _, minor = fields[3].partition(b":")
            with contextlib.suppress(ValueError, OverflowError):
                yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])


def _opened(folder: str) -> Iterator[tuple[int, int]]:
    for number in _listed(folder):
        try:
            seen = os.stat(f"{folder}/{number}")
        except OSError:  # it was closed meanwhile
            continue
        yield seen.st_dev, seen.st_ino


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def may_enlarge(root: Path = Path("/")) -> bool:
    """Whether this process may try: it can mount, and what is there is a writable memory file system."""
    try:
        status = (root / "proc/self/status").read_text(encoding="ascii", errors="replace")
        mounts = (root / "proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    capabilities = _CAPABILITIES.search(status)
    mounted = [fields for fields in map(str.split, mounts) if fields[1:2] == [FOLDER]]
    if not mounted or len(mounted[-1]) < 4 or not capabilities:
        return False
    kind, options = mounted[-1][2:4]  # the last one covers the others
    return (
        bool(int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1) and kind == "tmpfs" and "ro" not in options.split(",")
    )


def enlarge(size_bytes: int, folder: str = FOLDER) -> Room:
    """Give the memory file system this size, if it is smaller; what lies in it stays.

    Raises:
        NodeError: the kernel refuses; only a container with CAP_SYS_ADMIN may.
    """
    before = room(folder)
    if before is None:
        raise NodeError(
            f"{folder} is not there, so it cannot be made larger; mount an emptyDir with medium: Memory"
        )
    if before.size_bytes < size_bytes:
        _remount(folder, size_bytes)
    return room(folder) or before


def _remount(folder: str, size_bytes: int) -> None:
    import ctypes  # 10 ms, and hardly anybody comes here

    flags = os.statvfs(folder).f_flag
    kept = flags & _SAME_FLAGS | (_MS_RELATIME if flags & _ST_RELATIME else 0)  # what is not named again is dropped
    mount = ctypes.CDLL(None, use_errno=True).mount
    mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    if mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_REMOUNT | kept, b"size=%d" % size_bytes) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NodeError(f"{folder} cannot be made larger ({why}); mount an emptyDir with medium: Memory there")


def write_trouble(size_bytes: int, folder: str = FOLDER) -> int | None:
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
