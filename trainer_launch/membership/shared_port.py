"""One port for the coordinator and the workers' store: scripts may meet at the address that was typed for torchrun.

A launcher knocks with a newline, torch begins with a byte of its own and is led to the present store. Who says
nothing for a moment waits for our first message: `status`, or a launcher of another version.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

KNOCK = b"\n"
_OF_TORCH = b"\0"  # the first query of TCPStore's clients
_SILENT_S = 0.5
_SEND_S = 10.0  # for one end to take what the other one has said
_READ_BYTES = 65536
Place = tuple[str, int]


class SharedPort:
    """Takes connections that were accepted, in a thread of its own, and hands on those that are for `welcome`."""

    def __init__(self, welcome: Callable[[socket.socket, str], None], store: Callable[[], Place | None]) -> None:
        """`welcome` is called in the thread; `store` tells where the present one is."""
        self._welcome, self._store = welcome, store
        self._new: deque[tuple[socket.socket, str]] = deque()
        self._guests: dict[socket.socket, tuple[str, float]] = {}  # addresses, and until when one may be silent
        self._others: dict[socket.socket, socket.socket] = {}  # the other ends of those that are led to the store
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="shared port", daemon=True)
        self._thread.start()

    def take(self, sock: socket.socket, address: str) -> None:
        """One more; from any thread."""
        self._new.append((sock, address))
        self._waker.send(b".")

    def close(self) -> None:
        """End all connections that are ours."""
        self._is_closing = True
        self._waker.send(b".")
        self._thread.join()
        for sock in (*self._guests, *self._others, self._wake, self._waker):
            sock.close()
        self._selector.close()

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            first_s = min((until_s for _, until_s in self._guests.values()), default=None)
            for key, _ in self._selector.select(first_s and max(0.0, first_s - time.monotonic())):
                sock = key.fileobj
                if sock is self._wake:
                    self._wake.recv(4096)
                elif sock in self._guests:
                    self._admit(sock)
                elif sock in self._others:
                    self._pass_on(sock, self._others[sock])
            for sock in [sock for sock, (_, until_s) in self._guests.items() if until_s <= time.monotonic()]:
                self._hand_on(sock)
            while self._new:
                sock, address = self._new.popleft()
                sock.setblocking(False)
                self._guests[sock] = address, time.monotonic() + _SILENT_S
                self._selector.register(sock, selectors.EVENT_READ)

    def _admit(self, sock: socket.socket) -> None:
        first = b""
        with contextlib.suppress(OSError):
            first = sock.recv(1, socket.MSG_PEEK)
            if first == KNOCK:
                sock.recv(1)
        if first == _OF_TORCH:
            del self._guests[sock]
            self._lead(sock)
        else:
            self._hand_on(sock)

    def _hand_on(self, sock: socket.socket) -> None:
        address, _ = self._guests.pop(sock)
        self._selector.unregister(sock)
        self._welcome(sock, address)

    def _lead(self, sock: socket.socket) -> None:
        """Connect it to the store; without one it is closed, and torch tries again."""
        place = self._store()
        try:
            store = socket.create_connection(place, _SEND_S) if place else None
        except OSError:
            store = None
        if store is None:
            self._selector.unregister(sock)
            return sock.close()
        for near, far in ((sock, store), (store, sock)):
            near.settimeout(_SEND_S)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._others[near] = far
        self._selector.register(store, selectors.EVENT_READ)
        return None

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        try:
            data = near.recv(_READ_BYTES)
            far.sendall(data)
        except OSError:
            data = b""
        if not data:
            for sock in (near, far):
                self._others.pop(sock, None)
                self._selector.unregister(sock)
                sock.close()
