"""A node's side of the control plane: a daemon thread that stays in touch whatever happens to the coordinator."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeAlias

from trainer_launch.coordinator import protocol as msg
from trainer_launch.coordinator.sockets import tune
from trainer_launch.model import Endpoint

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_CONNECT_S = 5.0
_ANSWER_S = 5.0  # for the Challenge and for the Welcome
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator has welcomed this node, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The coordinator is out of reach; the client goes on trying."""

    reason: str


News: TypeAlias = msg.FromServer | Connected | Disconnected


class _Lost(Exception):
    """This connection is over; its text says at which stage and why."""


class Client:
    """Talks to the coordinator for one node. `hello` says who it is; its proof is filled in here."""

    def __init__(
        self,
        endpoint: Endpoint,
        hello: msg.Hello,
        secret: bytes | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._secret = secret
        self._say = say
        self._said = ""
        self._news: SimpleQueue[News] = SimpleQueue()
        self._unsent: deque[msg.FromNode] = deque()
        self._lock = threading.Lock()
        self._wish: msg.Join | None = None  # said again on a new connection until it is granted
        self._joined_after = -1  # the generation of the last Join
        self._lease_s = 3.0
        self._is_over = False  # the coordinator has said the last word
        self._closing = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="coordinator client", daemon=True)
        self._thread.start()

    def send(self, message: msg.FromNode) -> None:
        """Send a message now, or when the coordinator is in reach again.

        Raises:
            ProtocolError: it is not one that the coordinator would take.
        """
        msg.parse(msg.render(message))
        with self._lock:
            if isinstance(message, msg.Join):
                self._wish = message
                self._joined_after = message.generation
            self._unsent.append(message)
        self._nudge()

    def receive(self, timeout_s: float | None) -> News | None:
        """The next news, None when there is none in time."""
        try:
            return self._news.get(timeout=timeout_s)
        except Empty:
            return None

    def close(self, leave_reason: str | None = None) -> None:
        """End the connection, with a Leave if there is a reason to tell. Never blocks for long."""
        if leave_reason is not None:
            self.send(msg.Leave(leave_reason))
        self._closing.set()
        self._nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._closing.is_set() and not self._is_over:
                if self._try_once():
                    pause_s = _FIRST_PAUSE_S
                if not self._is_over:
                    self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # so that a thousand do not come at once
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            with self._lock:
                self._wake.close()
                self._waker.close()

    def _try_once(self) -> bool:
        """Use one connection to its end; whether it was any good."""
        welcomed = False
        try:
            with self._connect() as sock:
                self._greet(sock, lines := _Lines(sock))
                welcomed = True
                self._change("connected")
                self._news.put(Connected())
                self._talk(sock, lines)
        except _Lost as problem:
            reason = str(problem)
            if not self._is_over:
                self._change(reason)
                if welcomed:
                    self._news.put(Disconnected(reason))
        return welcomed

    def _connect(self) -> socket.socket:
        """Ask for the address each time: a pod that comes back has a new one."""
        try:
            found = socket.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise _Lost(f"no address for {self._endpoint.host} yet: {why}") from None
        why = "no address"
        for family, _, _, _, address in found:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(_CONNECT_S)
                sock.connect(address)
                tune(sock, self._lease_s)
                return sock
            except OSError as problem:
                sock.close()
                why = problem.strerror or "no answer in time"
        raise _Lost(f"cannot connect to the coordinator at {self._endpoint}: {why}")

    def _greet(self, sock: socket.socket, lines: _Lines) -> None:
        until_s = time.monotonic() + _ANSWER_S
        challenge = lines.next(until_s)
        if not isinstance(challenge, msg.Challenge):
            raise _Lost(f"what listens at {self._endpoint} is not a coordinator")
        hello = self._hello
        proof = None
        if self._secret is not None and challenge.nonce:
            proof = msg.prove(self._secret, challenge.nonce, hello.job, hello.incarnation)
        sock.sendall(msg.render(replace(hello, proof=proof)))
        answer = lines.next(until_s)
        if isinstance(answer, msg.Refused):
            if not answer.retry:
                self._is_over = True
                self._change(f"refused by the coordinator: {answer.reason}")
                self._news.put(answer)
            raise _Lost(f"refused by the coordinator for now: {answer.reason}")
        if not isinstance(answer, msg.Welcome):
            raise _Lost(f"what listens at {self._endpoint} is not a coordinator")
        self._lease_s = answer.lease_s
        sock.settimeout(max(1.0, self._lease_s))
        tune(sock, self._lease_s)
        with self._lock:
            if self._wish is not None and self._wish not in self._unsent:
                self._unsent.appendleft(self._wish)

    def _talk(self, sock: socket.socket, lines: _Lines) -> None:
        with selectors.DefaultSelector() as selector:  # select() itself ends at descriptor 1024
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            self._talk_until_over(sock, lines, selector)

    def _talk_until_over(self, sock: socket.socket, lines: _Lines, selector: selectors.BaseSelector) -> None:
        every_s = self._lease_s / 3
        renew_s = time.monotonic() + every_s
        while True:
            if self._flush(sock):
                renew_s = time.monotonic() + every_s
            if self._closing.is_set():
                self._flush(sock)  # what was said since
                return
            for message in lines.ready():
                self._take(message)
                if self._is_over:
                    return
            ready = selector.select(max(0.0, renew_s - time.monotonic()))
            readable = [key.fileobj for key, _ in ready]
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
            if sock in readable:
                lines.fill()
            if time.monotonic() >= renew_s:
                with self._lock:
                    self._unsent.append(msg.Renew())

    def _flush(self, sock: socket.socket) -> bool:
        with self._lock:
            messages, self._unsent = self._unsent, deque()
        try:
            sock.sendall(b"".join(map(msg.render, messages)))
        except OSError as problem:
            raise _Lost(f"lost the coordinator: {problem.strerror or 'it does not read'}") from None
        return bool(messages)

    def _take(self, message: msg.Message) -> None:
        """Remember what a next Hello must say, and drop what a later Join has answered already."""
        with self._lock:
            if isinstance(message, msg.Formed):
                self._hello = replace(self._hello, generation=message.generation, restarts=message.restarts)
                self._wish = None
            if isinstance(message, msg.Restart) and message.generation <= self._joined_after:
                return
        self._is_over = isinstance(message, msg.Finished | msg.GiveUp) or (
            isinstance(message, msg.Refused) and not message.retry
        )
        if isinstance(message, msg.FromServer):
            self._news.put(message)

    def _change(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _nudge(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full: it is due to wake up anyway; closed: nobody is there
            self._waker.send(b".")


class _Lines:
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
        """The next message, or _Lost when it does not come in time."""
        while not self._ready:
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            self.fill()
        return self._ready.popleft()

    def fill(self) -> None:
        """Read once."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except TimeoutError:
            raise _Lost("the coordinator accepts connections but says nothing") from None
        except OSError as problem:
            raise _Lost(f"lost the coordinator: {problem.strerror}") from None
        if not data:
            raise _Lost("the coordinator has closed the connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            self._ready.extend(map(msg.parse, lines))
        except msg.ProtocolError as problem:
            raise _Lost(f"the coordinator said what is not a message: {problem}") from None
        if len(self._rest) > msg.MAX_LINE_BYTES:
            raise _Lost("the coordinator said what is not a message: its line has no end")
