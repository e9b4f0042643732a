"""Shared memory that dead processes of this run have left behind, and nothing else, is removed.

A segment is ours to remove when all of this holds:

- its name is one that a framework gives to what its processes share (`FAMILIES`), so a data set that somebody
  copied into /dev/shm stays, and so does every name that we do not know;
- it belongs to our user, is a regular file with one name, and was not there before this run began;
- the kernel grants a write lease on it. It does so only when no process on this machine has the file open or
  mapped: not in our pid namespace, not in a sidecar that shares the pod's /dev/shm, not on the host with hostIPC.
  So no list of processes is trusted: one that we cannot see, or may not look into, still counts. A kernel without
  leases means: keep;
- a pid in its name (`torch_<pid>_…`) is of no process that we can see: its maker may still hand it to another one.

"Before this run began" is what lay there at our first start. In a pod /dev/shm outlives the container: when the
container was killed, its successor continues with what its predecessor had written down as there before it
(`Ground`). It trusts that note only as PID 1 of a pid namespace, when it has our host name and user, and when the
lock on it is free: then everything that the predecessor had started died with it. At a good end the note goes.

What remains: a neighbour's segment that was made since, between its maker's close and its reader's open. A note
that cannot be written (the Flux contract mounts /dev/shm read-only) only means no memory across restarts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
from collections.abc import Collection

from trainer_launch.host import shm
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass
from trainer_launch.model.units import in_units

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
# Whoever opens a leased file signals the holder: by default with SIGIO, of which it dies. This one is harmless.
_LEASE_SIGNAL = signal.SIGCHLD

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Removed:
    """What one sweep took away."""

    count: int = 0
    size_bytes: int = 0

    def __str__(self) -> str:
        noun = "segment" if self.count == 1 else "segments"
        return f"removed {self.count} shared memory {noun} ({in_units(self.size_bytes)}) of dead workers"


def sweep(before: Collection[Key], folder: str = shm.FOLDER) -> Removed:
    """Remove what dead processes of this run have left; `before` was there when it began."""
    old, count, size_bytes = frozenset(before), 0, 0
    left = [segment for segment in shm.segments(folder) if segment.key not in old and _may_be_ours(segment)]
    if not left:
        return Removed()
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return Removed()
    try:
        for segment in left:
            if _take(place, segment, remove=True):
                count, size_bytes = count + 1, size_bytes + segment.size_bytes
    finally:
        os.close(place)
    return Removed(count, size_bytes)


def unheld(folder: str = shm.FOLDER) -> tuple[shm.Segment, ...]:
    """Find what dead processes have left, whoever's; nothing is removed."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        found = (segment for segment in shm.segments(folder) if _may_be_ours(segment))
        return tuple(segment for segment in found if _take(place, segment, remove=False))
    finally:
        os.close(place)


def _may_be_ours(segment: shm.Segment) -> bool:
    known = FAMILIES.fullmatch(segment.name)
    if known is None or segment.uid != os.geteuid():
        return False
    return known["pid"] is None or not os.path.exists(f"/proc/{known['pid']}")


def _take(place: int, segment: shm.Segment, *, remove: bool) -> bool:
    """Tell whether nobody on this machine has it, and remove it then; the lease is held over the removal."""
    try:
        held = os.open(segment.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return False
    try:
        seen = os.fstat(held)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1 or seen.st_ino != segment.inode:
            return False
        fcntl.fcntl(held, fcntl.F_SETSIG, _LEASE_SIGNAL)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if remove:
            os.unlink(segment.name, dir_fd=place)
    except OSError:  # somebody has it, the kernel grants no leases, or the folder is read-only
        return False
    finally:
        os.close(held)
    return True


class Ground:
    """What lay in /dev/shm before this run: known to the end, and as PID 1 over a container's restart."""

    def __init__(self, hostname: str, folder: str = shm.FOLDER, *, is_pid1: bool | None = None) -> None:
        self._hostname = hostname
        self._folder = folder
        self._note = -1
        self.removed = Removed()  # of a predecessor in this pod
        found = self._predecessors() if (os.getpid() == 1 if is_pid1 is None else is_pid1) else None
        if found is not None:
            self.removed = sweep(found, folder)
        self.before = frozenset(found if found is not None else (s.key for s in shm.segments(folder)))
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
        seen = os.fstat(note)
        try:
            if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_nlink != 1:
                raise OSError
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            said = os.read(note, _MAX_NOTE_BYTES)
        except OSError:  # another launcher lives beside us and shares this folder: its note
            os.close(note)
            return None
        self._note = note
        return _parsed(said, self._hostname)

    def _write(self) -> None:
        if self._note >= 0:
            text = json.dumps({"hostname": self._hostname, "before": sorted(self.before)}).encode()
            with contextlib.suppress(OSError):  # full: then there is no memory over a restart
                os.truncate(self._note, 0)
                os.pwrite(self._note, text, 0)


def _parsed(said: bytes, hostname: str) -> frozenset[Key] | None:
    try:
        note = json.loads(said)
        if note["hostname"] != hostname:
            return None
        return frozenset((str(name), int(inode)) for name, inode in note["before"])
    except MALFORMED:
        return None
