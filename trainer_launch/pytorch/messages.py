"""Messages between PID 1 and its fork server: a length, a JSON object, and descriptors beside the first bytes.

Both ends are of one version of this package.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct

from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.codec import Codec, Count, MessageError, Port, Tagged

MAX_BYTES = 1 << 24
_LENGTH_BYTES = 4
_MAX_FDS = 253  # the kernel's limit for one call
_Streams: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=1, le=2)], ...], Meta(max_length=2)]


class ForkedWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker of a `ForkWorkers`."""

    local_rank: Count
    environment: Mapping[str, str]  # all of it
    streams: _Streams = ()  # which of 1 and 2 are passed as descriptors, in this order
    stacks: str | None = None  # the file that faulthandler writes to on SIGRTMAX-1
    recorder: bool = False  # whether a socket follows its streams, on which it answers PID 1's questions

    @property
    def fds(self) -> int:
        """How many descriptors come for it; the last is a socket on which PID 1 tells it of generations."""
        return len(self.streams) + self.recorder + 1


class ForkWorkers(Tagged, frozen=True, kw_only=True):
    """Fork these workers. Their descriptors come with the message, in the workers' order.

    The last descriptor is a pipe, from which each process reads a byte before it goes on; its end means: exit.
    """

    argv: tuple[str, ...]  # the ordinary command: `python -u [-m] program args...`
    cwd: str
    workers: tuple[ForkedWorker, ...]
    meet_at: Endpoint | None = None  # an address that leads to the store of the generation

    @property
    def fds(self) -> int:
        """How many descriptors come with it."""
        return sum(worker.fds for worker in self.workers) + 1


class OpenStore(Tagged, frozen=True):
    """Start a process with a store, on one of these ports, or on any free one; a pipe comes with it."""

    ports: PortRange | None = None
    fds: ClassVar[int] = 1


class Ready(Tagged, frozen=True):
    """The server has imported everything."""

    unfit: str | None = None  # why no worker can be forked from it


class Started(Tagged, frozen=True):
    """The new processes are children of the launcher; their pids in the order of the request."""

    pids: tuple[Count, ...]
    port: Port | None = None  # of a store


class RequestFailed(Tagged, frozen=True):
    """The request was not carried out, and nothing of it is left."""

    reason: str


Message: TypeAlias = ForkWorkers | OpenStore | Ready | Started | RequestFailed
_CODEC: Codec[Message] = Codec(Message, max_bytes=MAX_BYTES)
printed, parsed = _CODEC.encode, _CODEC.decode


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
