"""Variables, and files of the private directory of a run, that our own processes leave for each other.

PID 1, the workers and `status` tell each other things here; nobody else writes to it.
Messages are in `membership/protocol.py`, `preflight/cluster/preflight_messages.py` and `pytorch/messages.py`. What
a child is told when it is started is a value that `model/codec.py` prints, or its arguments.
Little is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

from trainer_launch.host import files
from trainer_launch.host.slow_files import within
from trainer_launch.model.errors import UsageError

START = "trainer-launch-"  # how the directory's name begins
SHM = "/dev/shm"  # where it is when nothing else may be written

# Variables: who sets it, and what for.
VARIABLE = "TRAINER_LAUNCH_RUN_DIR"  # PID 1, for all that it starts: the directory, by which they are the run's own
MPI_RUN = "TRAINER_LAUNCH_MPI_RUN"  # PID 1, for ranks: of which job they are, so that they are found on hosts
NODE_LABEL = "TRAINER_LAUNCH_NODE_LABEL"  # a rehearsal, for its launchers: what their lines begin with
INSIDE = "TRAINER_LAUNCH_INSIDE"  # a rehearsal, for itself in namespaces of its own: the number that it has there
IN_COLOR = "TRAINER_LAUNCH_IN_COLOR"  # a rehearsal on a terminal, for its launchers: prefixes are colored
GENERATION = "TRAINER_LAUNCH_GENERATION"  # PID 1, for its workers: the number of their first one
KEPT = "TRAINER_LAUNCH_KEPT"  # how many ranks of it have kept their state
LISTEN_AT = "TRAINER_LAUNCH_LISTEN_AT"  # a rehearsal, for a pod's sshd: the pod's own address on loopback
# Files, or how their names begin: who writes it, and who reads it.
LAUNCHER = "launcher.json"  # PID 1, for status: how it stands
FAILURE = "failure.json"  # torchrun, for PID 1: the first failure
NEWS = "news.jsonl"  # PID 1, for itself, status, a rehearsal: generations and starts, by line
REQUESTS = "requests"  # `incidents collect`, for PID 1: a FIFO in which a line asks for an incident
STACKS = "stacks."  # a forked worker, by local rank, for PID 1: what its threads do, when PID 1 asks
PROGRESS, PROGRESS_END = "progress-", ".json"  # a worker, by local rank, for PID 1 and status: from `report()`
PRINTED = "printed.json"  # PID 1, for status: the step that its workers have printed last
FUNCTION = "function."  # launch(), its launcher and its workers: programs, call, results, report, each apart
# What programs of others write or read there.
ERRORS = "torch"  # the errors that torch's @record in a worker leaves, unless the user names a directory
SSH = "ssh"  # keys and configuration
HOROVOD = "horovod"  # what horovodrun finds as ssh, and the hosts that it asks for
SHIMS = "shims"  # a torchrun, an mpirun, … that use the launcher, for the scripts that call them
HOSTFILE = "hostfile"  # of mpirun's present start
HOME = "home"  # of a user who has none


def errors_in(folder: str) -> str:
    """Where torch keeps its workers' error files, unless the user names a folder for them."""
    return f"{folder}/{ERRORS}"


def progress_file(folder: str, local_rank: int) -> str:
    """The file of a worker's `report()`."""
    return f"{folder}/{PROGRESS}{local_rank}{PROGRESS_END}"


def tell(folder: str, event: str, **values: str | float | None) -> None:
    """Add a line to the news; nobody is waited for, and a full disk is nobody's failure. "": nobody is told."""
    if not folder:
        return
    line = json.dumps({"time_s": time.time(), "event": event, **values})
    with contextlib.suppress(OSError):
        within(folder, None, _append, f"{folder}/{NEWS}", line.encode() + b"\n")


def hear_requests(folder: str) -> int:
    """A descriptor that has something to read whenever somebody wants an incident.

    Raises:
        OSError: there can be no FIFO here.
    """
    os.mkfifo(f"{folder}/{REQUESTS}", 0o600)
    return os.open(f"{folder}/{REQUESTS}", os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def request(folder: str, line: bytes = b"\n") -> bool:
    """Ask for an incident; whether there is a launcher that hears it, in whatever PID namespace. b"": only that."""
    try:
        fd = os.open(f"{folder}/{REQUESTS}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, line)
        return True
    except OSError:  # it is full, or none of ours
        return False
    finally:
        os.close(fd)


def _append(path: str, data: bytes) -> None:
    fd = files.appended(path)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


# A run locks its folder as long as it lives, also when it is killed. So PID 1 may remove those of its user that are
# locked by nobody: all that a predecessor had started died with it, and a neighbour in the pod holds its own.
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
            made = _make(SHM)
        except OSError as problem:
            raise UsageError(f"no writable directory ({problem}); mount an emptyDir at /tmp") from None
    if os.getpid() == 1:
        forget_killed(os.path.dirname(made))
    return made


def forget_killed(place: str) -> None:
    """Remove the folders in this one that killed runs of our user have left."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in list(entries):
            is_run = entry.name.startswith(START) and entry.is_dir(follow_symlinks=False)
            if is_run and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                _forget(entry.path)


def _make(place: str | None) -> str:
    import tempfile  # workers do without

    new = tempfile.mkdtemp(prefix=_NEW + START, dir=place)
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
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
