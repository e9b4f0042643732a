"""The messages that a server sends over a connection, and the ends that it may have."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError

_READ_BYTES = 65536
_M = TypeVar("_M")  # the messages of a conversation


class LostError(Exception):
    """This connection is over; its text says at which stage and why."""


@contextlib.contextmanager
def abort_when_lost(sock: socket.socket) -> Iterator[None]:
    """Let an orderly end mean that this process has ended, or said so: one that goes elsewhere resets."""
    try:
        yield
    except LostError:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise


class Lines(Generic[_M]):
    """The messages of a connection; what is no message of ours ends it."""

    def __init__(self, sock: socket.socket, parse: Callable[[bytes], _M], who: str) -> None:
        self._sock = sock
        self._parse = parse
        self._who = who  # is at the other end, for people
        self._ready: deque[_M] = deque()
        self._rest = b""

    def ready(self) -> list[_M]:
        """What has come so far."""
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def next(self, until_s: float) -> _M:
        """The next message, or LostError when it does not come in time."""
        while not self._ready:
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            self.fill()
            if not self._ready and time.monotonic() > until_s:
                raise LostError(f"{self._who} accepts connections but does not answer")
        return self._ready.popleft()

    def fill(self) -> None:
        """Read once."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except TimeoutError:
            raise LostError(f"{self._who} accepts connections but does not answer") from None
        except OSError as problem:
            raise LostError(f"lost {self._who}: {problem.strerror}") from None
        if not data:
            raise LostError(f"{self._who} has closed the connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            self._ready.extend(map(self._parse, lines))
        except MessageError as problem:
            raise LostError(f"{self._who} sent an invalid message: {problem}") from None
        if len(self._rest) > MAX_LINE_BYTES:
            raise LostError(f"{self._who} sent an invalid message: its line has no end")
