"""The messages that come to a node, and the end of its connection."""

from __future__ import annotations

import socket
import time
from collections import deque

from trainer_launch.coordinator.protocol import MAX_LINE_BYTES, ProtocolError
from trainer_launch.rollcall import protocol as msg


class LostError(Exception):
    """This connection is over; its text says why."""


class Lines:
    """The messages of a connection; what is none of ours ends it."""

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
        """The next message; LostError when it does not come in time."""
        while not self._ready:
            if time.monotonic() >= until_s:
                raise LostError("node 0 accepts connections, and says nothing")
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            self.fill()
        return self._ready.popleft()

    def fill(self) -> None:
        """Read once."""
        try:
            data = self._sock.recv(65536)
        except TimeoutError:
            raise LostError("node 0 accepts connections, and says nothing") from None
        except OSError as problem:
            raise LostError(f"lost node 0: {problem.strerror}") from None
        if not data:
            raise LostError("node 0 has ended the connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            self._ready.extend(map(msg.parse, lines))
        except ProtocolError as problem:
            raise LostError(f"node 0 said what is not a message: {problem}") from None
        if len(self._rest) > MAX_LINE_BYTES:
            raise LostError("node 0 said what is not a message: its line has no end")
