"""The messages that a coordinator sends over a connection, and the ends that it may have."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

from trainer_launch.coordinator import protocol as msg

_READ_BYTES = 65536
_SILENT = "the coordinator accepts connections but says nothing"


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


class Lines:
    """The messages of a connection; what is no message of ours ends it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ready: deque[msg.Message] = deque()
        self._rest = b""

    def ready(self) -> list[msg.Message]:
        """What has come so far."""
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def next(self, until_s: float) -> msg.Message:
        """The next message, or LostError when it does not come in time."""
        while not self._ready:
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            self.fill()
            if not self._ready and time.monotonic() > until_s:
                raise LostError(_SILENT)
        return self._ready.popleft()

    def fill(self) -> None:
        """Read once."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except TimeoutError:
            raise LostError(_SILENT) from None
        except OSError as problem:
            raise LostError(f"lost the coordinator: {problem.strerror}") from None
        if not data:
            raise LostError("the coordinator has closed the connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            self._ready.extend(map(msg.parse, lines))
        except msg.ProtocolError as problem:
            raise LostError(f"the coordinator said what is not a message: {problem}") from None
        if len(self._rest) > msg.MAX_LINE_BYTES:
            raise LostError("the coordinator said what is not a message: its line has no end")
