"""A node's side of the control plane: a daemon thread that stays in touch whatever happens to the coordinator."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, Queue
from typing import TypeAlias

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.election import remember
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.server_messages import Lines, LostError, abort_when_lost
from trainer_launch.membership.socket_options import tune
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.frozen import dataclass

_MAX_SEATS = 64  # that are asked for a coordinator


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator has welcomed this node, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The coordinator is out of reach; the client goes on trying."""

    reason: str


News: TypeAlias = msg.FromServer | Connected | Disconnected


class Client:
    """Talks to the coordinator for one node. `hello` says who it is; its proof is filled in here.

    `wake` is called by the client's thread after each piece of news, for who sleeps elsewhere than in `receive`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: msg.Hello,
        secret: bytes | None = None,
        say: Callable[[str], None] = lambda text: None,
        seats: Seats | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._home = self._endpoint = endpoint
        self._seats = seats
        self._away_s = time.monotonic()  # since when there has been no coordinator
        self._own_address: str | None = None
        self._hello = hello
        self._secret = secret
        self._say = say
        self._said = ""
        self._news: Queue[News] = Queue()  # Python 3.10's SimpleQueue may wait for ever for a time that is over
        self._unsent: deque[msg.FromNode] = deque()
        self._lock = threading.Lock()
        self._wish: msg.Join | None = None  # said again on a new connection until it is granted
        self._joined_after = -1  # the generation of the last Join
        self._lease_s = timeouts.LEASE_S
        self._is_over = False  # the coordinator has said the last word
        self._closing = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._wake_reader = wake
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="coordinator client", daemon=True)
        self._thread.start()

    def send(self, message: msg.FromNode) -> None:
        """Send a message now, or when the coordinator is in reach again.

        Raises:
            MessageError: it is not one that the coordinator would take.
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
        except RuntimeError as torn:  # a signal's handler raised while the queue had let its lock go
            raise torn.__context__ or torn from None

    def where(self) -> tuple[Endpoint, str | None]:
        """The coordinator that was there last, and the address that this node had towards it."""
        return self._endpoint, self._own_address

    def own_address(self, given: str | None, name: str) -> str:
        """How other nodes reach this one: as given, else by its address towards node 0; node 0 itself by its name.

        `name` is this node's own.
        """
        if given:
            return given
        coordinator, own = self.where()
        try:
            found = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_STREAM)
        except OSError:  # a resolver that fails for a moment; the name was found when we connected
            found = []
        if own is not None and all(own != address[0] for *_, address in found):
            return own
        return name if coordinator.is_loopback else coordinator.host

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
        pause_s = timeouts.FIRST_PAUSE_S
        try:
            while not self._closing.is_set() and not self._is_over:
                if any(self._try_once(endpoint) for endpoint in self._candidates()):
                    pause_s, self._away_s = timeouts.FIRST_PAUSE_S, time.monotonic()
                if not self._is_over:
                    self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # so that a thousand do not come at once
                    is_soon = time.monotonic() - self._away_s < timeouts.SOON_S
                    pause_s = min(2 * pause_s, timeouts.SOON_PAUSE_S if is_soon else timeouts.LONGEST_PAUSE_S)
        finally:
            with self._lock:
                self._wake.close()
                self._waker.close()

    def _candidates(self) -> Iterator[Endpoint]:
        """Node 0's first, always; the others' seats only when it has been away for longer than a pod's restart."""
        last = self._endpoint
        yield self._home
        if self._seats is None:
            return
        if time.monotonic() - self._away_s <= timeouts.TAKEOVER_S:
            if last != self._home:
                yield last
            return
        for rank in range(1, min(self._seats.count, _MAX_SEATS)):
            if not self._closing.is_set() and not self._is_over:
                yield self._seats.endpoint(rank)

    def _try_once(self, endpoint: Endpoint) -> bool:
        """Use one connection to its end; whether it was any good."""
        welcomed = False
        try:
            with self._connect(endpoint) as sock, abort_when_lost(sock):
                self._greet(sock, lines := Lines(sock, msg.parse, "the coordinator"), endpoint)
                welcomed = True
                self._endpoint, self._own_address = endpoint, str(sock.getsockname()[0])
                self._change("connected" if endpoint == self._home else f"connected to {endpoint}")
                self._tell(Connected())
                self._talk(sock, lines)
        except (LostError, OSError) as problem:  # it has ended after its first word, or we have no descriptor
            reason = str(problem) if isinstance(problem, LostError) else f"no connection: {problem.strerror}"
            if not self._is_over:
                if endpoint == self._home or welcomed:
                    self._change(reason)
                if welcomed:
                    self._tell(Disconnected(reason))
        return welcomed

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        """Ask for the address each time: a pod that comes back has a new one."""
        try:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise LostError(f"no address for {endpoint.host} yet: {why}") from None
        why = "no address"
        for family, _, _, _, address in found:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeouts.CONNECT_S if self._seats is None else timeouts.CONNECT_TO_CANDIDATE_S)
                sock.connect(address)
                tune(sock, self._lease_s)
                return sock
            except OSError as problem:
                sock.close()
                why = problem.strerror or "no answer in time"
        raise LostError(f"cannot connect to the coordinator at {endpoint}: {why}")

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message], endpoint: Endpoint) -> None:
        until_s = time.monotonic() + timeouts.GREETING_S
        challenge = lines.next(until_s)
        if not isinstance(challenge, msg.Challenge):
            raise LostError(f"what listens at {endpoint} is not a coordinator")
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
                self._tell(answer)
            raise LostError(f"refused by the coordinator for now: {answer.reason}")
        if not isinstance(answer, msg.Welcome):
            raise LostError(f"what listens at {endpoint} is not a coordinator")
        self._lease_s = answer.lease_s
        sock.settimeout(max(1.0, self._lease_s))
        tune(sock, self._lease_s)
        with self._lock:
            if self._wish is not None and self._wish not in self._unsent:
                self._unsent.appendleft(self._wish)

    def _talk(self, sock: socket.socket, lines: Lines[msg.Message]) -> None:
        with selectors.DefaultSelector() as selector:  # select() itself ends at descriptor 1024
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            self._talk_until_over(sock, lines, selector)

    def _talk_until_over(
        self, sock: socket.socket, lines: Lines[msg.Message], selector: selectors.BaseSelector
    ) -> None:
        every_s = max(timeouts.LEAST_RENEWAL_S, self._lease_s / timeouts.RENEWALS)
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
            raise LostError(f"lost the coordinator: {problem.strerror or 'it does not read'}") from None
        return bool(messages)

    def _take(self, message: msg.Message) -> None:
        """Remember what a next Hello must say, and drop what a later Join has answered already."""
        with self._lock:
            if isinstance(message, msg.Formed):
                self._hello = replace(self._hello, generation=message.generation, restarts=message.restarts)
                self._wish = None
                self._remember(message.claim)
            elif isinstance(message, msg.Go) and self._hello.claims[-1:]:
                last = self._hello.claims[-1]
                if last.generation == message.generation:
                    self._remember(last._replace(sure=True))
            if isinstance(message, msg.Restart) and message.generation <= self._joined_after:
                return
        if isinstance(message, msg.Formed):
            self._nudge()
        self._is_over = isinstance(message, msg.Finished | msg.GiveUp) or (
            isinstance(message, msg.Refused) and not message.retry
        )
        if isinstance(message, msg.FromServer):
            self._tell(message)

    def _remember(self, claim: Claim | None) -> None:
        """What this node says from now on wherever it goes; only then it says that it has taken it."""
        if claim is None:
            return
        self._hello = replace(self._hello, claims=remember(self._hello.claims, claim))
        if not claim.sure:
            self._unsent.append(msg.Took(claim.generation))

    def _tell(self, news: News) -> None:
        self._news.put(news)
        self._wake_reader()

    def _change(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _nudge(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full: it is due to wake up anyway; closed: nobody is there
            self._waker.send(b".")
