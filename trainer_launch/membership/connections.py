"""What every server of ours does with its connections: let them in, hear them, answer, drop who misbehaves.

One thread owns a switchboard and sleeps in `_wait` until a line, a connection, a nudge or a deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer_launch.membership import timeouts
from trainer_launch.membership.connection import Connection
from trainer_launch.membership.dropped_connections import Complaints
from trainer_launch.membership.protocol import Challenge
from trainer_launch.membership.socket_options import listen, spare_files, tune
from trainer_launch.model import Endpoint
from trainer_launch.model.json_lines import MessageError

MAX_CONNECTIONS = 8192
MAX_UNGREETED = 200
_Heard = TypeVar("_Heard")  # what is said to a server
_Said = TypeVar("_Said")  # what it says itself


class Switchboard(ABC, Generic[_Heard, _Said]):
    """The connections of one server, numbered in the order in which they came."""

    def __init__(
        self,
        parse: Callable[[bytes], _Heard],
        render: Callable[[_Said | Challenge], bytes],
        *,
        secret: bytes | None,
        silence_s: float,  # until the kernel ends a connection whose other end does not answer
        grumble: Complaints,
    ) -> None:
        self._parse = parse
        self._render = render
        self._secret = secret
        self._silence_s = silence_s
        self._grumble = grumble
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._ungreeted: dict[int, Connection] = {}  # oldest first
        self._to_flush: dict[int, Connection] = {}
        self._last_peer = 0
        self._rendered: tuple[object, bytes] = (None, b"")
        self._is_accepting = False
        self._accept_again_s: float | None = None
        self._stopping = threading.Event()
        self._max_connections = max(64, min(MAX_CONNECTIONS, spare_files()))

    # -- what a server makes of it ------------------------------------------------------------

    @abstractmethod
    def _came(self, connection: Connection) -> None:
        """Somebody is there, and has been sent a challenge."""

    @abstractmethod
    def _heard(self, connection: Connection, message: _Heard) -> None:
        """Somebody said something; a MessageError ends the connection."""

    @abstractmethod
    def _gone(self, connection: Connection, *, ended: bool) -> None:
        """A connection is over; `ended`: by an orderly end of the other side."""

    # -- its beginning and its end ------------------------------------------------------------

    def _open(self, endpoint: Endpoint) -> int:
        """Listen, or raise NodeError; returns the port."""
        self._listener = listen(endpoint)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept(True)
        return int(self._listener.getsockname()[1])

    def _nudge(self) -> None:
        """End the thread's sleep, from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _close(self) -> None:
        """Close all, unheard and unsaid words with it."""
        for connection in self._connections.values():
            connection.sock.close()
        for sock in (self._listener, self._wake, self._waker):
            sock.close()
        self._selector.close()

    # -- its turns ----------------------------------------------------------------------------

    def _wait(self, due_s: float | None) -> None:
        """Sleep until something comes or is due, and hear everybody who has something to say."""
        for key, mask in self._selector.select(self._sleep_s(due_s)):
            if key.fileobj is self._listener:
                self._take_connections()
            elif isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)

    def _sleep_s(self, due_s: float | None) -> float | None:
        times = [due_s, self._accept_again_s]
        for oldest in self._ungreeted.values():
            times.append(oldest.at_s + self._patience_s())
            break
        first_s = min((at_s for at_s in times if at_s is not None), default=None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    def _drop_silent(self, now_s: float) -> None:
        """Drop who has not said who it is in time, or soon enough while others wait; then there is room again."""
        for connection in list(self._ungreeted.values()):
            if connection.at_s + self._patience_s() > now_s:
                break
            self._drop(connection, "did not say who it is")
        if self._accept_again_s is not None:
            if now_s < self._accept_again_s:
                return
            self._accept_again_s = None
        self._accept(self._has_room())

    def _flush_all(self) -> None:
        """Send what is to be sent; it may bring news of those that are gone."""
        due, self._to_flush = self._to_flush, {}
        for connection in due.values():
            self._serve(connection, selectors.EVENT_WRITE)

    # -- who is let in ------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._ungreeted) < MAX_UNGREETED and len(self._connections) < self._max_connections

    def _patience_s(self) -> float:
        """How long a connection may be without its first words."""
        return timeouts.GREET_S if self._is_accepting or self._accept_again_s is not None else timeouts.CROWD_S

    def _accept(self, wanted: bool) -> None:
        if wanted and not self._is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not wanted and self._is_accepting:
            self._selector.unregister(self._listener)
        self._is_accepting = wanted

    def _take_connections(self) -> None:
        while self._has_room():
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:  # out of descriptors or memory: the ones we have come first
                self._grumble(f"cannot take it: {problem.strerror}", "anywhere")
                self._accept_again_s = time.monotonic() + timeouts.ACCEPT_AGAIN_S
                self._accept(False)
                return
            self._welcome(sock, str(address[0]).removeprefix("::ffff:"))
        self._accept(False)  # until somebody has said who it is, or is dropped

    def _welcome(self, sock: socket.socket, address: str) -> None:
        self._last_peer += 1
        nonce = secrets.token_hex(16) if self._secret is not None else ""
        connection = Connection(sock, self._last_peer, address, nonce, time.monotonic())
        try:
            sock.setblocking(False)
            tune(sock, self._silence_s)
        except OSError:
            sock.close()
            return
        self._connections[connection.peer] = self._ungreeted[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._came(connection)
        self._send(connection.peer, Challenge(nonce))

    def _is_proven(self, connection: Connection, proof: str | None, job: str, who: str) -> bool:
        """Whether `who` shows by its first words that it knows the job's secret; complains if not."""
        is_proven = connection.is_proven(proof, self._secret, job, who)
        if not is_proven:
            self._grumble("its secret differs from the job's", connection.address)
        return is_proven

    def _greeted(self, connection: Connection) -> None:
        connection.is_greeted = True
        self._ungreeted.pop(connection.peer, None)

    # -- lines in, lines out ------------------------------------------------------------------

    def _serve(self, connection: Connection, mask: int) -> None:
        if connection.peer not in self._connections:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                self._hear(connection)
        except OSError:
            self._drop(connection)
        except MessageError as problem:
            self._drop(connection, str(problem))

    def _hear(self, connection: Connection) -> None:
        lines = connection.read()
        if lines is None:
            return self._drop(connection, ended=True)
        for line in lines:
            message = self._parse(line)
            if connection.is_closing:
                return None
            self._heard(connection, message)
        return None

    def _send(self, peer: int, message: _Said | Challenge) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        if message is not self._rendered[0]:  # many are sent the same one
            self._rendered = (message, self._render(message))
        if connection.write(self._rendered[1]):
            self._to_flush[peer] = connection
        else:
            self._drop(connection, "does not read what it is sent")

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        if connection.is_closing and not connection.has_unsent:
            return self._drop(connection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)
        return None

    def _close_after_flush(self, peer: int) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.is_closing = True
            self._to_flush[peer] = connection

    def _drop(self, connection: Connection, why: str | None = None, *, ended: bool = False) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        self._ungreeted.pop(connection.peer, None)
        self._to_flush.pop(connection.peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        self._gone(connection, ended=ended)
        if why is not None:
            self._grumble(why, connection.address)
