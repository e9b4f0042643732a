"""One nonblocking connection of the server: lines in, lines out, both bounded."""

from __future__ import annotations

import hmac
import selectors
import socket
import time

from trainer_launch.membership.protocol import prove
from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError

MAX_UNSENT_BYTES = 1 << 20  # what a peer may leave unread before it is dropped
_READ_BYTES = 65536


class Connection:
    """What is read and not yet a line, what is written and not yet sent."""

    def __init__(self, sock: socket.socket, peer: int, address: str, nonce: str, at_s: float) -> None:
        self.sock = sock
        self.peer = peer
        self.address = address
        self.nonce = nonce
        self.at_s = at_s  # when it came
        self.is_greeted = False
        self.is_closing = False  # after what is unsent
        self._unread = bytearray()
        self._unsent = bytearray()

    def is_proven(self, proof: str | None, secret: bytes | None, job: str, who: str) -> bool:
        """Whether `who` shows by its first message that it knows the job's secret, if there is one."""
        if secret is None:
            return True
        want = prove(secret, self.nonce, job, who)
        return hmac.compare_digest(want.encode(), (proof or "").encode(errors="replace"))

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    def read(self) -> list[bytes] | None:
        """The lines that have come, None at the end. One read: nobody can keep the server busy alone."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            return None
        *lines, rest = (self._unread + data).split(b"\n")
        self._unread = rest
        if len(rest) >= MAX_LINE_BYTES:
            raise MessageError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        return [bytes(line) for line in lines]

    def write(self, line: bytes) -> bool:
        """Take a line for sending; False when too much is unsent."""
        self._unsent += line
        return len(self._unsent) <= MAX_UNSENT_BYTES

    def flush(self) -> None:
        """Send what there is room for."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self._unsent[:sent]


def hang_up(connections: list[Connection], until_s: float) -> None:
    """Send what is unsent, then wait for the others to end: closing over unread lines would void our last lines."""
    if not connections:
        return
    try:
        selector = selectors.DefaultSelector()
    except OSError:  # out of descriptors: they are closed without ceremony
        return
    with selector:
        for connection in connections:
            selector.register(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        while selector.get_map() and time.monotonic() < until_s:
            for key, mask in selector.select(max(0.0, until_s - time.monotonic())):
                try:
                    ended = mask & selectors.EVENT_READ and key.data.read() is None
                    if mask & selectors.EVENT_WRITE:
                        key.data.flush()
                        if not key.data.has_unsent:
                            selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                            key.data.sock.shutdown(socket.SHUT_WR)
                except (OSError, MessageError):
                    ended = True
                if ended:
                    selector.unregister(key.fileobj)
