"""Messages between PID 1 and its fork server: a length, a JSON object, and descriptors beside the first bytes.

Both ends are of one version of this package; the version in each message says so.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, TypeAlias

from trainer_launch.model.frozen import dataclass

VERSION = 1
MAX_BYTES = 1 << 24
_LENGTH_BYTES = 4
_MAX_FDS = 253  # the kernel's limit for one call


class MessageError(Exception):
    """The other end has sent something that is not a message of this version, or only a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedWorker:
    """What one worker has for itself."""

    local_rank: int
    environment: Mapping[str, str]  # in addition to what all workers get
    streams: tuple[int, ...] = ()  # which of 1 and 2 are passed as descriptors, in this order
    stacks: str | None = None  # the file that faulthandler writes to on SIGRTMAX-1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorkers:
    """Fork these workers. Their streams' descriptors come with the message, in the workers' order.

    The last descriptor is a pipe, from which each process reads a byte before it goes on; its end means: exit.
    """

    argv: tuple[str, ...]  # the ordinary command: `python -u [-m] program args...`
    environment: Mapping[str, str]  # complete, but for what each worker has for itself
    cwd: str
    workers: tuple[ForkedWorker, ...]
    must_fork: bool = False  # a worker that needs a new interpreter fails

    @property
    def fds(self) -> int:
        """How many descriptors come with it."""
        return sum(len(worker.streams) for worker in self.workers) + 1


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Start a process with a store, on a port from `low` to `high`, or on any free one; a pipe comes with it."""

    low: int | None = None
    high: int | None = None

    @property
    def fds(self) -> int:
        """How many descriptors come with it."""
        return 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The server can fork; the files that it has loaded, with their change times in ns and their sizes."""

    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unfit:
    """Workers cannot be forked from this server."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forked:
    """The workers are children of the launcher; their pids in the order of the request."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreOpen:
    """The store's process is a child of the launcher, and listens."""

    pid: int
    port: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request was not carried out, and nothing of it is left."""

    reason: str


def cannot_fork(reason: str) -> str:
    """The error where the user wants forked workers."""
    return f"--start-method is forkserver, but {reason}; set it to auto, or remove the cause"


Message: TypeAlias = "ForkWorkers | OpenStore | Ready | Unfit | Forked | StoreOpen | Failed"


# -- values -----------------------------------------------------------------------------------


def printed(message: Message) -> bytes:
    """The JSON object of a message."""
    return json.dumps({"v": VERSION, "kind": type(message).__name__, **asdict(message)}).encode()


def parsed(data: bytes) -> Message:
    """The message that a JSON object is.

    Raises:
        MessageError: it is none.
    """
    try:
        values = json.loads(data)
        if values["v"] != VERSION:
            raise MessageError(f"a message of version {values['v']!r}: expected version {VERSION}")
        return _PARSERS[values["kind"]](values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise MessageError(f"an invalid message: {type(problem).__name__}: {problem}") from None


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80}: expected {kind.__name__}")
    return value


def _words(value: Any) -> tuple[str, ...]:
    return tuple(_is(str, word) for word in _is(list, value))


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_is(int, number) for number in _is(list, value))


def _variables(value: Any) -> dict[str, str]:
    return {_is(str, name): _is(str, word) for name, word in _is(dict, value).items()}


def _optional(kind: type, value: Any) -> Any:
    return None if value is None else _is(kind, value)


def _files(value: Any) -> dict[str, tuple[int, int]]:
    files = {}
    for name, numbers in _is(dict, value).items():
        mtime_ns, size = _numbers(numbers)
        files[name] = (mtime_ns, size)
    return files


def _worker(values: Any) -> ForkedWorker:
    streams = _numbers(values["streams"])
    if not set(streams) <= {1, 2} or len(set(streams)) != len(streams):
        raise ValueError(f"streams {streams}: expected 1, 2, or both")
    return ForkedWorker(
        local_rank=_is(int, values["local_rank"]),
        environment=_variables(values["environment"]),
        streams=streams,
        stacks=_optional(str, values["stacks"]),
    )


def _fork_workers(values: Any) -> ForkWorkers:
    return ForkWorkers(
        argv=_words(values["argv"]),
        environment=_variables(values["environment"]),
        cwd=_is(str, values["cwd"]),
        workers=tuple(map(_worker, _is(list, values["workers"]))),
        must_fork=_is(bool, values["must_fork"]),
    )


_PARSERS: dict[str, Callable[[Any], Message]] = {
    "ForkWorkers": _fork_workers,
    "OpenStore": lambda values: OpenStore(_optional(int, values["low"]), _optional(int, values["high"])),
    "Ready": lambda values: Ready(_files(values["files"])),
    "Unfit": lambda values: Unfit(_is(str, values["reason"])),
    "Forked": lambda values: Forked(_numbers(values["pids"])),
    "StoreOpen": lambda values: StoreOpen(_is(int, values["pid"]), _is(int, values["port"])),
    "Failed": lambda values: Failed(_is(str, values["reason"])),
}


# -- on a socket ------------------------------------------------------------------------------


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors.

    Raises:
        OSError: the other end is gone, or does not read.
    """
    data = printed(message)
    data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
    batches = [fds[start : start + _MAX_FDS] for start in range(0, len(fds), _MAX_FDS)]
    for number, batch in enumerate(batches):
        socket.send_fds(connection, [data[number : number + 1]], batch)
    connection.sendall(data[len(batches) :])


def receive(connection: socket.socket, within_s: float | None = None) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors, which are closed at an exec; None when the other end is gone.

    Raises:
        MessageError: it is not a message.
        OSError: the connection is broken, or nothing comes in time.
    """
    end_s = None if within_s is None else time.monotonic() + within_s
    fds: list[int] = []
    try:
        length = _exactly(connection, _LENGTH_BYTES, fds, end_s)
        if not length:
            return None
        size = int.from_bytes(length, "big")
        if size > MAX_BYTES:
            raise MessageError(f"a message of {size} bytes: expected at most {MAX_BYTES}")
        return parsed(_exactly(connection, size, fds, end_s)), fds
    except (OSError, MessageError):
        for fd in fds:
            os.close(fd)
        raise


def _exactly(connection: socket.socket, size: int, fds: list[int], end_s: float | None) -> bytes:
    """Exactly so many bytes; none when the other end is gone before the first of a message."""
    data = b""
    while len(data) < size:
        connection.settimeout(None if end_s is None else max(0.001, end_s - time.monotonic()))
        more, passed, _, _ = socket.recv_fds(connection, size - len(data), _MAX_FDS)
        for fd in passed:
            os.set_inheritable(fd, False)
        fds += passed
        if not more:
            if data or size != _LENGTH_BYTES:
                raise MessageError("only a part of a message: the other end is gone")
            return b""
        data += more
    return data
