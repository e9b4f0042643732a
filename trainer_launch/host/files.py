"""Files: read so that neither a FIFO nor a huge file can hold us up, and replaced whole or not at all.

Little is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from trainer_launch.host.slow_files import WAIT_S, in_time, within
from trainer_launch.model.errors import NodeError, UsageError

JOB_SECRET = "/etc/trainer-launch/job-secret"  # the job's secret, without an option
MAX_SECRET_BYTES = 4096
_IS_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_LABEL = b"trainer-launch: the job's secret"  # what is derived of a key for it fits nothing else
_OPENED = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO holds nobody up
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # a new file: nobody else's, and no link
_APPENDED = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_TEXT_BYTES = 1 << 26  # of what the kernel tells
_BLOCK_BYTES = 1 << 16
_START_S = 600.0  # for what a launcher reads before it starts anything: many pods may ask a slow server at once
T = TypeVar("T")


class LiveFiles:
    """The container's file system, for reading; no more than `limit` bytes of any file."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def read(self, path: str, offset: int = 0) -> bytes | None:
        """A regular file, cut at the limit; None when it cannot be read, or its server does not answer.

        `offset` is where to begin, in bytes; below 0 it counts from the end.
        """
        return within(path, None, _read, path, self._limit, offset, _OPENED)

    def exists(self, path: str) -> bool:
        """Whether the path is there."""
        return within(path, False, os.path.exists, path)


def read(path: str, most: int, offset: int = 0, *, wait_s: float = WAIT_S) -> bytes | None:
    """At most so many bytes of a file that somebody else may have put there, such as a worker; `offset` likewise.

    None also where it is a symbolic link: what that leads to may be a device, or nobody's to show.
    """
    return within(path, None, _read, path, most, offset, _OPENED | os.O_NOFOLLOW, wait_s=wait_s)


def named(path: str, where: str, most: int) -> bytes:
    """A file that the user named, of at most so many bytes; `where` begins the error.

    Raises:
        UsageError: it is no regular file, is larger, or cannot be read, or its file server does not answer.
    """
    try:
        data = answer(path, _named, path, most + 1)
    except OSError as problem:
        raise UsageError(f"{where} cannot be read: {problem.strerror}") from None
    if len(data) > most:
        raise UsageError(f"{where} is larger than {most} bytes")
    return data


def _named(path: str, most: int) -> bytes:
    data = _read(path, most, 0, _OPENED)
    if data is None:
        is_there = os.path.exists(path)
        why = "it is not a regular file that this user may read" if is_there else os.strerror(errno.ENOENT)
        raise OSError(errno.EINVAL, why)
    return data


def _read(path: str | os.PathLike[str], most: int, offset: int, flags: int) -> bytes | None:
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError):
        return None
    try:
        status, blocks = os.fstat(descriptor), []
        if not stat.S_ISREG(status.st_mode):
            return None
        if offset:
            os.lseek(descriptor, offset if offset > 0 else max(0, status.st_size + offset), os.SEEK_SET)
        while most > 0 and (block := os.read(descriptor, min(most, _BLOCK_BYTES))):
            blocks.append(block)
            most -= len(block)
        return b"".join(blocks)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def text(path: str | os.PathLike[str]) -> str:
    """The text of a file, "" when it cannot be read."""
    return (_read(path, _TEXT_BYTES, 0, _OPENED) or b"").decode(errors="replace")


def appended(path: str, mode: int = 0o600) -> int:
    """A descriptor that adds to a regular file, which is made where there is nothing.

    Raises:
        OSError: it cannot be opened or made, or something else is there: a FIFO would hold us up.
    """
    return answer(path, _appended, path, mode)


def answer(path: str, call: Callable[..., T], *args: object) -> T:
    """What the call returns, which is not None.

    Raises:
        OSError: the file server does not answer; or what the call raises.
    """
    result = within(path, None, call, *args)
    if result is None:
        raise TimeoutError(errno.ETIMEDOUT, "its file server does not answer", path)
    return result


def at_start(what: str, call: Callable[..., T], *args: object) -> T:
    """What the call returns, which is not None; in a thread, as this one has to hear a request to stop.

    Raises:
        NodeError: it takes too long; or what the call raises.
    """
    result = in_time(what, None, call, *args, wait_s=_START_S)
    if result is None:
        raise NodeError(f"{what} took more than {_START_S:g} s: a file server may be gone; run on another node")
    return result


def check_program(word: str, env: Mapping[str, str] | None) -> None:
    """See that a program's file server answers: whoever starts it waits in `vfork`, and all threads with it.

    Raises:
        OSError: it does not answer.
    """
    folders = [""] if "/" in word else os.get_exec_path(env)
    any(answer(file, _can_be_opened, file) for file in (os.path.join(folder, word) for folder in folders))


def _can_be_opened(path: str) -> bool:
    try:
        os.close(os.open(path, _OPENED))
    except (OSError, ValueError):
        return False
    return True


def _appended(path: str, mode: int) -> int:
    try:
        descriptor = os.open(path, _APPENDED, mode)
    except OSError as problem:
        if problem.errno not in (errno.ENXIO, errno.ELOOP):  # a FIFO that nobody reads; a link
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def replace(path: str, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, with these permissions whatever the umask; nothing is left beside it.

    Raises:
        OSError: the folder is not there, not writable or full; what was at `path` is still there.
    """
    answer(path, _replace, path, data, mode)


def _replace(path: str, data: bytes, mode: int) -> bool:
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name[:200]}.{os.urandom(6).hex()}")  # a name has at most 255 bytes
    descriptor = os.open(beside, _FLAGS, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise
    return True


def remove_tree(path: str) -> None:
    """Remove a directory with all that is in it, or what a worker has put in its place; what cannot be, stays."""
    import shutil  # workers do without

    try:
        os.unlink(path)  # rmtree() would wait at a FIFO
    except OSError:  # a directory
        shutil.rmtree(path, ignore_errors=True)


def overwrite(path: str, data: bytes, *, may_make: bool = True) -> None:
    """Write `data` in place: a bind mount can be neither removed nor replaced. A pipe or a device gets it as well.

    Raises:
        OSError: it cannot be written, or nobody reads there.
    """
    answer(path, _overwrite, path, data, os.O_CREAT if may_make else 0)


def _overwrite(path: str, data: bytes, create: int) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | create, 0o644)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 0)
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
    return True


def read_secret(path: str) -> bytes:
    """The job's secret, a small file that every pod mounts; the path may be told, the secret never.

    Of a private key, which ssh needs too, the secret is a hash.

    Raises:
        UsageError: there is no such file, or it is empty or too large.
    """
    content = LiveFiles(MAX_SECRET_BYTES + 1).read(path)
    if content is None:
        raise UsageError(f"the job's secret {path} cannot be read; mount the job's Secret there in every pod")
    if len(content) > MAX_SECRET_BYTES:
        raise UsageError(
            f"the job's secret {path} is larger than {MAX_SECRET_BYTES} bytes; put a shorter one there"
        )
    secret = content.strip()
    if not secret:
        raise UsageError(f"the job's secret {path} is empty; put one there, the same in every pod")
    return hmac.digest(secret, _KEY_LABEL, "sha256") if _IS_KEY.match(secret) else secret


def take_streams(streams: Mapping[int, int]) -> None:
    """Put these descriptors where a process has its output."""
    for number, fd in streams.items():
        os.dup2(fd, number)


def close_descriptors(keep: Collection[int] = ()) -> None:
    """Close all but the three streams and these.

    Raises:
        OSError: /proc does not show which are open.
    """
    for word in os.listdir("/proc/self/fd"):
        if int(word) > 2 and int(word) not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(word))
