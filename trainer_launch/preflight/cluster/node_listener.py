"""A node's own listener: where others look for this node, and the socket on which pair tests accept."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

from trainer_launch.host.network import free_port, listen
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.preflight.cluster import preflight_messages as msg

_SEND_S = 0.5
_AGAIN_S = 0.5  # when the machine had no descriptor for a connection


class Listener:
    """Listens on the job's port if it is free here, else on one `among` those allowed; `here` says what to tell.

    Raises NodeError where none of these is free.
    """

    def __init__(self, port: int | None, here: Callable[[], msg.Here], among: PortRange | None = None) -> None:
        self._here = here
        self._sock = _opened(port, among)
        self.port = int(self._sock.getsockname()[1])
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for listened in (self._sock, self._wake):
            self._selector.register(listened, selectors.EVENT_READ)
        self._lock = threading.Lock()  # held by who may accept
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port; once is enough."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.send(b".")
        self._thread.join()
        for closed in (self._selector, self._sock, self._wake, self._waker):
            closed.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        """Let somebody else accept what comes: yields the socket's descriptor."""
        with self._lock:
            yield self._sock.fileno()

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._sock in ready and self._lock.acquire(timeout=0.05):  # else it is lent
                try:
                    self._answer()
                finally:
                    self._lock.release()

    def _answer(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors or memory, and it would be so again at once
            self._closing.wait(_AGAIN_S)
            return
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_SEND_S)
            sock.sendall(msg.render(self._here()))
            sock.shutdown(socket.SHUT_WR)


def _opened(port: int | None, among: PortRange | None) -> socket.socket:
    if port is not None:
        with contextlib.suppress(NodeError):  # with hostNetwork or in a rehearsal another node has it
            return listen(Endpoint("", port))
    return listen(Endpoint("", 0 if among is None else free_port(among)))
