"""A connection to a server of ours: its messages, how it is lost, and the thread that makes it again."""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, Queue
from typing import Generic, TypeVar

from trainer_launch.membership.protocol import Challenge, prove
from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError

_READ_BYTES = 65536
_M = TypeVar("_M")  # the messages of a conversation
_Said = TypeVar("_Said")  # those of the client
_News = TypeVar("_News")  # what the client tells


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


def proof(challenge: object, secret: bytes | None, job: str, who: str, otherwise: str) -> str | None:
    """What `who` answers to the server's first message; None where no secret is needed.

    Raises:
        LostError: it is no challenge.
    """
    if not isinstance(challenge, Challenge):
        raise LostError(otherwise)
    return prove(secret, challenge.nonce, job, who) if secret is not None and challenge.nonce else None


class ReconnectingClient(ABC, Generic[_M, _Said, _News]):
    """The client of a server of ours: one daemon thread, which connects again whenever its connection is lost.

    `wake` is called by the thread after each piece of news, for who sleeps elsewhere than in `receive`.
    """

    def __init__(
        self, server: str, render: Callable[[_Said], bytes], pause_s: float, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._server = server  # for people
        self._render = render
        self._first_pause_s = pause_s
        self._news: Queue[_News] = Queue()  # Python 3.10's SimpleQueue may wait for ever for a time that is over
        self._unsent: deque[_Said] = deque()
        self._lock = threading.Lock()
        self._is_over = False  # the server has said the last word
        self._heard_s = time.monotonic()  # when it said something last
        self._closing = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._wake_reader = wake
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"{server.removeprefix('the ')} client", daemon=True)

    @abstractmethod
    def _connect_once(self) -> bool:
        """Use one connection to its end; whether it was any good."""

    @abstractmethod
    def _next_pause_s(self, before_s: float) -> float:
        """How long to wait before the next attempt but one."""

    @abstractmethod
    def _take(self, message: _M) -> None:
        """Act on what the server says."""

    def send(self, message: _Said) -> None:
        """Send a message now, or when the server is in reach again."""
        with self._lock:
            self._unsent.append(message)
        self._nudge()

    def receive(self, timeout_s: float | None = None) -> _News | None:
        """The next news, None when there is none in time."""
        try:
            return self._news.get(timeout=timeout_s)
        except Empty:
            return None
        except RuntimeError as torn:  # a signal's handler raised while the queue had let its lock go
            raise torn.__context__ or torn from None

    def close(self) -> None:
        """End the connection. Never blocks for long: the thread may hang in the resolver."""
        self._closing.set()
        self._nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._first_pause_s
        try:
            while not self._closing.is_set() and not self._is_over:
                if self._connect_once():
                    pause_s = self._first_pause_s
                if not self._is_over:
                    self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # so that a thousand do not come at once
                    pause_s = self._next_pause_s(pause_s)
        finally:
            with self._lock:
                self._wake.close()
                self._waker.close()

    def _write(self, sock: socket.socket, *messages: _Said) -> None:
        try:
            sock.sendall(b"".join(map(self._render, messages)))
        except OSError as problem:
            raise LostError(f"lost {self._server}: {problem.strerror or 'it does not read'}") from None

    def _talk(
        self, sock: socket.socket, lines: Lines[_M], alive: _Said, every_s: float, silence_s: float = math.inf
    ) -> None:
        """Send and hear until one side ends; `alive` is sent so often, and a silent server is lost."""
        with selectors.DefaultSelector() as selector:  # select() itself ends at descriptor 1024
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            self._heard_s = time.monotonic()
            due_s = self._heard_s + every_s
            while not self._is_over:
                if self._flush(sock):
                    due_s = time.monotonic() + every_s
                if self._closing.is_set():
                    self._flush(sock)  # what was said since
                    return
                for message in lines.ready():
                    self._take(message)
                    if self._is_over:
                        return
                wait_s = min(due_s, self._heard_s + silence_s) - time.monotonic()
                readable = [key.fileobj for key, _ in selector.select(max(0.0, wait_s))]
                if self._wake in readable:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                if sock in readable:
                    lines.fill()
                    self._heard_s = time.monotonic()
                elif time.monotonic() - self._heard_s > silence_s:
                    raise LostError(f"no message from {self._server} for {silence_s:g} s")
                if time.monotonic() >= due_s:
                    with self._lock:
                        self._unsent.append(alive)

    def _flush(self, sock: socket.socket) -> bool:
        with self._lock:
            messages, self._unsent = self._unsent, deque()
        self._write(sock, *messages)
        return bool(messages)

    def _tell(self, news: _News) -> None:
        self._news.put(news)
        self._wake_reader()

    def _nudge(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full: it is due to wake up anyway; closed: nobody is there
            self._waker.send(b".")
