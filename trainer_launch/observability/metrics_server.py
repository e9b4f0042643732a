"""Serve one text over HTTP: one bounded answer per connection, no CPU time without requests."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from trainer_launch.host import network
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HEAD_BYTES = 8192
PATIENCE_S = 5.0  # with one client, from its connection to its end
AT_ONCE = 16
_LAST_BYTES = 65_536  # of what a client says after its request
_CLOSED = (errno.EINVAL, errno.EBADF)
_log = logging.getLogger(__name__)


class Server:
    """Answers GET /metrics with what `text` returns."""

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._port = port
        self._text = text
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> int | None:
        """Listen on every address; the port, or None when that is not possible, which is no reason to end a job."""
        try:
            self._listener = network.listen(Endpoint("", self._port), "--metrics-port")
        except NodeError as problem:
            _log.warning("%s; the job continues without metrics", problem)
            return None
        self._listener.setblocking(True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
            self._thread.join(1.0)
            self._listener.close()
            self._listener = None

    # -- in threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        listener = self._listener
        assert listener is not None
        pause = threading.Event()
        while True:
            try:
                sock, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as problem:
                if listener.fileno() < 0 or problem.errno in _CLOSED:
                    return
                pause.wait(1.0)  # out of descriptors: the job needs them more than we do
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="metrics client", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        until_s = time.monotonic() + PATIENCE_S
        try:
            with contextlib.closing(sock):
                head = _head(sock, until_s)
                if head is None:
                    return
                sock.settimeout(max(0.1, until_s - time.monotonic()))
                sock.sendall(answer(head, self._text))
                sock.shutdown(socket.SHUT_WR)
                _drain(sock, until_s)  # closing over unread bytes would void what we said
        except OSError:
            pass  # the client is gone, or too slow
        finally:
            self._room.release()


def answer(head: bytes, text: Callable[[], str]) -> bytes:
    """The whole response to a request's head."""
    words = head.split(b"\r\n", 1)[0].split()
    if len(head) > HEAD_BYTES:
        return _response("431 Request Header Fields Too Large", "the request is too long\n")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response("400 Bad Request", "that is not HTTP\n")
    method, target = words[0], words[1].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", "only GET\n", "Allow: GET, HEAD\r\n")
    if target != PATH.encode():
        return _response("404 Not Found", f"see {PATH}\n", is_head=method == b"HEAD")
    return _response("200 OK", text(), is_head=method == b"HEAD")


def _response(status: str, text: str, extra: str = "", *, is_head: bool = False) -> bytes:
    content = text.encode(errors="replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(content)}\r\n{extra}"
    return f"{head}Connection: close\r\n\r\n".encode() + (b"" if is_head else content)


def _head(sock: socket.socket, until_s: float) -> bytes | None:
    """All up to the empty line; None when the client ends before it."""
    data = b""
    while b"\r\n\r\n" not in data and len(data) <= HEAD_BYTES:
        sock.settimeout(max(0.01, until_s - time.monotonic()))
        more = sock.recv(HEAD_BYTES)
        if not more or time.monotonic() > until_s:
            return None
        data += more
    return data


def _drain(sock: socket.socket, until_s: float) -> None:
    left = _LAST_BYTES
    while left > 0 and time.monotonic() < until_s:
        sock.settimeout(max(0.01, until_s - time.monotonic()))
        more = sock.recv(left)
        if not more:
            return
        left -= len(more)
