"""Clients of our servers: a daemon thread stays in touch whatever happens to the server; a node's above all."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Queue
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host.network import addresses_of, connected, is_here, may_share, mesh_port, tune
from trainer_launch.host.runtime_directory import tell
from trainer_launch.host.slow_files import WAIT_S
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.authentication import (
    MAX_SIGNED_BYTES,
    Channel,
    FirstMessage,
    SignatureError,
)
from trainer_launch.membership.election import remember
from trainer_launch.membership.protocol import Claim
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import NodeError
from trainer_launch.model.exit_codes import MISCONFIGURED
from trainer_launch.model.units import counted

_READ_BYTES = 65536
_MAX_SEATS = 64  # that are asked for a coordinator before node 0 is asked again
# A proxy takes connections for who is not there, and closes them or lets them wait.
_THROUGH_MESH = (
    "the proxy of a service mesh listens on port %d of this pod: exclude the job's port from it (Istio: "
    "traffic.sidecar.istio.io/excludeInboundPorts and excludeOutboundPorts), or take the pods out of the mesh "
    '(sidecar.istio.io/inject: "false")'
)
_NAMELESS = (
    "; this node itself is the coordinator, to which all connect by that name: the job's headless Service gives it "
    "an address, with the pods' subdomain and publishNotReadyAddresses: true"
)
_MISPLACED = (
    "node 0's address %s leads to this node, whose rank is %s, and no other launcher listens here; "
    "set MASTER_ADDR, PET_MASTER_ADDR or --master-addr to the address at which all nodes reach node 0"
)
_log = logging.getLogger(__name__)
_M = TypeVar("_M")  # the messages of a conversation
_Sent = TypeVar("_Sent")  # those of the client
_News = TypeVar("_News")  # what the client tells


class LostError(Exception):
    """The connection is over; the text says at which stage and why."""


class UnprovenError(LostError):
    """The server does not show that it knows the job's secret; `refused` is what it says all the same."""

    def __init__(self, text: str, refused: msg.Refused | None) -> None:
        super().__init__(text)
        self.refused = refused


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
    """The messages of a connection; what is no message of ours ends it, and so does a wrong signature."""

    def __init__(
        self, sock: socket.socket, parse: Callable[[bytes], _M], who: str, secret: bytes | None = None
    ) -> None:
        self._sock = sock
        self._channel = Channel(secret)
        self._parser = parse
        self._who = who  # is at the other end, for people
        self._ready: deque[_M] = deque()
        self._rest = b""

    def ready(self) -> list[_M]:
        """The messages that have come so far."""
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
        for line in lines:
            self._ready.append(self._read(line))
        if len(self._rest) > MAX_SIGNED_BYTES:
            raise LostError(f"{self._who} sent an invalid message: its line has no end")

    def challenged(self, until_s: float, otherwise: str) -> None:
        """Hear the server's first message; LostError where it is no challenge, or one that proves nothing."""
        try:
            first = self.next(until_s)
        except LostError as problem:
            if (port := mesh_port()) is None:
                raise
            raise LostError(f"{problem}; {_THROUGH_MESH % port}") from None
        if not isinstance(first, msg.Challenge):
            raise LostError(otherwise)
        why = self._channel.challenged(first.nonce)
        if why is not None:
            raise UnprovenError(f"{self._who}{self._place()} {why}", None)

    def introduce(self, message: FirstMessage, render: Callable[[Any], bytes]) -> None:
        """Say who this is, with a proof where it is needed; from now on lines are signed."""
        self._send(render(self._channel.introduced(message)))

    def say(self, *lines: bytes) -> None:
        """Send these lines."""
        self._send(b"".join(map(self._channel.sign, lines)))

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as problem:
            raise LostError(f"lost {self._who}: {problem.strerror or 'it does not read'}") from None

    def _parse(self, line: bytes) -> _M:
        message = self._parser(line)
        if isinstance(message, msg.Refused):
            message = replace(message, reason=msg.with_own_version(message.reason))
        return message

    def _read(self, line: bytes) -> _M:
        try:
            return self._parse(self._channel.check(line))
        except SignatureError as problem:
            if self._channel.has_proved_itself:
                raise LostError(f"lost {self._who}: {problem}") from None
            raise self._unproven(line) from None
        except MessageError as problem:
            raise LostError(f"{self._who} sent an invalid message: {problem}") from None

    def _unproven(self, line: bytes) -> UnprovenError:
        """The error for a server without the secret, which may say why: other secrets, other versions."""
        message: object = None
        with contextlib.suppress(MessageError):
            message = self._parse(line)
        refused = message if isinstance(message, msg.Refused) else None
        why = "its secret differs, or it is another program" if refused is None else f"it says: {refused.reason}"
        return UnprovenError(
            f"what answers as {self._who}{self._place()} does not know the job's secret: {why}", refused
        )

    def _place(self) -> str:
        try:
            host, port, *_ = self._sock.getpeername()
        except (OSError, ValueError):  # it is gone; a pair of sockets has no address
            return ""
        return f" at {Endpoint(host, port)}"


def inquire(
    endpoint: Endpoint, job: str, secret: bytes | None = None, timeout_s: float = timeouts.STATUS_S
) -> msg.Message:
    """The coordinator's answer to the question how the job stands; launchers of all versions understand it.

    Raises:
        NodeError: nobody answers there.
    """
    until_s = time.monotonic() + timeout_s
    try:
        with connected(endpoint, timeout_s) as sock:
            lines = Lines(sock, msg.parse, "the coordinator", secret)
            lines.challenged(until_s, "its first message is not a challenge")
            lines.introduce(msg.StatusQuery(msg.VERSION, job), msg.render)
            return lines.next(until_s)
    except (OSError, UnicodeError, LostError) as problem:
        why = "no answer in time" if isinstance(problem, TimeoutError) else getattr(problem, "strerror", None)
        raise NodeError(f"the coordinator at {endpoint} cannot be asked: {why or problem}") from None


class ReconnectingClient(ABC, Generic[_M, _Sent, _News]):
    """The client of a server of ours: one daemon thread, which connects again whenever its connection is lost.

    `wake` is called by the thread after each piece of news, for who sleeps elsewhere than in `receive`.
    """

    def __init__(
        self, server: str, render: Callable[[_Sent], bytes], pause_s: float, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._server = server  # for people
        self._render = render
        self._first_pause_s = pause_s
        self._news: Queue[_News] = Queue()  # Python 3.10's SimpleQueue may wait for ever for a time that is over
        self._unsent: deque[_Sent] = deque()
        self._lock = threading.Lock()
        self._is_over = False  # the server has said the last word
        self._was_let_in = False
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

    def send(self, message: _Sent) -> None:
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

    def _run(self) -> None:
        pause_s = self._first_pause_s
        try:
            while not self._closing.is_set() and not self._is_over:
                if self._is_attended() and self._connect_once():
                    pause_s = self._first_pause_s
                if not self._is_over:
                    self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # so that a thousand do not come at once
                    pause_s = self._next_pause_s(pause_s)
        finally:
            with self._lock:
                self._wake.close()
                self._waker.close()

    def _introduced(self, lines: Lines[_M], hello: msg.Hello, until_s: float) -> _M | msg.Refused:
        """The answer to our Hello. Until a server has let this node in, a refusal needs no signature."""
        lines.introduce(hello, self._render)
        try:
            return lines.next(until_s)
        except UnprovenError as problem:
            if problem.refused is None or self._was_let_in:
                raise
            return problem.refused

    def _talk(
        self, sock: socket.socket, lines: Lines[_M], alive: _Sent, every_s: float, silence_s: float = math.inf
    ) -> None:
        """Send and hear until one side ends; `alive` is sent so often, and a silent server is lost."""
        with selectors.PollSelector() as selector:  # takes no descriptor; select() itself ends at number 1024
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            self._heard_s = time.monotonic()
            due_s = self._heard_s + every_s
            while not self._is_over:
                if self._flush(lines):
                    due_s = time.monotonic() + every_s
                if self._closing.is_set():
                    self._flush(lines)  # what was said since
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
                    self._on_silence(sock, f"no message from {self._server} for {silence_s:g} s")
                    self._heard_s = time.monotonic()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + every_s
                    if self._is_attended():
                        with self._lock:
                            self._unsent.append(alive)

    def _on_silence(self, sock: socket.socket, text: str) -> None:
        """The server has said nothing for long; LostError where it should have."""
        raise LostError(text)

    def _flush(self, lines: Lines[_M]) -> bool:
        with self._lock:
            messages, self._unsent = self._unsent, deque()
        lines.say(*map(self._render, messages))
        return bool(messages)

    def _is_attended(self) -> bool:
        """Whether somebody still hears the news; if not, nothing is said in its name."""
        return True

    def _tell(self, news: _News) -> None:
        self._news.put(news)
        self._wake_reader()

    def _nudge(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full: it is due to wake up anyway; closed: nobody is there
            self._waker.send(b".")


class Connected(Struct, frozen=True):
    """The coordinator has welcomed this node, for the first time or again."""


class Disconnected(Struct, frozen=True):
    """The coordinator is out of reach; the client goes on trying."""

    reason: str


News: TypeAlias = msg.FromServer | Connected | Disconnected


class Client(ReconnectingClient[msg.Message, msg.FromNode, News]):
    """Talks to the coordinator for one node. `hello` says who it is; its proof is filled in here.

    What it hears and says of the job is told in the runtime directory, if there is one.
    """

    def __init__(  # noqa: PLR0913
        self,
        endpoint: Endpoint,
        hello: msg.Hello,
        secret: bytes | None = None,
        say: Callable[[str], None] = lambda text: None,
        seats: Seats | None = None,
        wake: Callable[[], None] = lambda: None,
        run_dir: str = "",
        notes: Callable[[], Mapping[str, object]] = dict,
        answer: Callable[[msg.Note], msg.Note | None] = lambda note: None,
    ) -> None:
        """`notes` gives what a Join carries when it is sent, `answer` what is said to a note at once, or None."""
        super().__init__("the coordinator", self._rendered, timeouts.FIRST_PAUSE_S, wake)
        self._home = self._endpoint = endpoint
        self._seats = seats
        self._away_s = time.monotonic()  # since when there has been no coordinator
        self._is_refused = False  # node 0's address has refused the latest attempt: no launcher listens there
        self._next_rank = 1  # whose seat is asked next, when node 0 stays away
        self._own_address: str | None = None
        self._hello = hello
        self._secret = secret
        self._say = say
        self.connection = ""  # how it is, in words
        self._run_dir = run_dir
        # Both are said again on a new connection, until the next generation: a reset may have lost them.
        self._wish: msg.Join | None = None
        self._end: msg.Failed | msg.Done | msg.Leave | None = None  # how this generation ended here
        self._joined_after = -1  # the generation of the last Join
        self._lease_s = timeouts.LEASE_S
        self._read_s = time.monotonic()  # when the node's loop looked for news last; inf: it waits for them
        self._notes, self._answer_to = notes, answer
        self._thread.start()

    def send(self, message: msg.FromNode) -> None:
        """Send a message now, or when the coordinator is in reach again.

        Raises:
            MessageError: it is not one that the coordinator would take.
        """
        msg.parse(msg.render(message))
        if isinstance(message, msg.Failed):
            tell(
                self._run_dir,
                "worker_failed",
                generation=message.generation,
                rank=message.rank,
                exit_code=message.exit_code,
                signal=message.signal,
                message=message.message or None,
            )
        with self._lock:
            if isinstance(message, msg.Join):
                if message.generation < self._hello.generation:
                    return  # it has been granted meanwhile
                self._wish, self._joined_after = message, message.generation
            elif isinstance(message, msg.Failed | msg.Done | msg.Leave):
                self._end = message
        super().send(message)

    def _is_attended(self) -> bool:
        """Whether the node's loop still runs: one that is stuck must lose its lease, though this thread lives."""
        unread_s = time.monotonic() - self._read_s
        if unread_s > timeouts.LOOK_S:
            self._wake_reader()  # it may only have had nothing to do
        return unread_s <= timeouts.STUCK_S

    def receive(self, timeout_s: float | None = None) -> News | None:
        """The next news, None when there is none in time; it is logged, and told on."""
        self._read_s = math.inf
        news = super().receive(timeout_s)
        self._read_s = time.monotonic()
        match news:
            case msg.Formed(generation=number, group_rank=rank, size=size, restarts=restarts, kept=kept):
                where = {"node_index": rank, "nodes": size, "kept": kept}
                tell(self._run_dir, "generation_formed", generation=number, restarts=restarts, **where)
            case msg.Waiting(present=present, wanted=wanted, missing=missing) if missing and not self._is_beside:
                _log.info("%d of %d nodes are here; missing: %s", present, wanted, ", ".join(missing))
            case msg.Waiting(present=size, wanted=wanted, running=True) if size == wanted:
                _log.info("this node is a spare: the job runs on %d other nodes", size)
            case msg.Waiting(present=size, running=True):
                _log.info("the job runs on %s until this node can start workers", counted(size, "other node"))
            case msg.Restart(generation=number, reason=reason):
                tell(self._run_dir, "generation_ended", generation=number, reason=reason)
            case msg.GiveUp(reason=reason):
                tell(self._run_dir, "given_up", reason=reason)
            case Connected():
                place = self._endpoint
                tell(self._run_dir, "coordinator_found", host=place.host, port=place.port)
            case Disconnected(reason=reason):
                _log.warning("the coordinator is unreachable: %s", reason)
                tell(self._run_dir, "coordinator_away", reason=reason)
        return news

    @property
    def _is_beside(self) -> bool:
        """Whether the coordinator is in this launcher, and logs the same."""
        rank = self._hello.node_rank
        if rank == 0 or rank is None or self._seats is None:
            return rank == 0 and self._endpoint == self._home
        return self._endpoint == self._seats.endpoint(rank)

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
        addresses: list[str] = []
        with contextlib.suppress(OSError):  # the name was found when we connected; a resolver may fail for a moment
            addresses = addresses_of(coordinator.host, WAIT_S)
        if own is not None and own not in addresses:
            return own
        return name if coordinator.is_loopback else coordinator.host

    def _rendered(self, message: msg.FromNode) -> bytes:
        """A Join may have waited for a coordinator for long: its notes are of now."""
        if isinstance(message, msg.Join):
            message = replace(message, notes={**message.notes, **self._notes()})
        return msg.render(message)

    def _connect_once(self) -> bool:
        is_good = any(self._try_once(endpoint) for endpoint in self._candidates())
        if is_good:
            self._away_s, self._next_rank = time.monotonic(), 1
        return is_good

    def _next_pause_s(self, before_s: float) -> float:
        is_soon = time.monotonic() - self._away_s < timeouts.SOON_S
        return min(2 * before_s, timeouts.SOON_PAUSE_S if is_soon else timeouts.LONGEST_PAUSE_S)

    def _candidates(self) -> Iterator[Endpoint]:
        """Node 0's first, always; the other candidates once it has been away for longer than a restart."""
        last = self._endpoint
        yield self._home
        if self._seats is None or self._hello.node_rank == 0:  # its own coordinator lives as long; see election.py
            return
        if time.monotonic() - self._away_s <= self._takeover_s:
            if last != self._home:
                yield last
            return
        ranks = range(self._next_rank, self._seats.count)[:_MAX_SEATS]
        for rank in ranks:
            if not self._closing.is_set() and not self._is_over:
                yield self._seats.endpoint(rank)
        self._next_rank = ranks.stop if ranks.stop < self._seats.count else 1

    @property
    def _takeover_s(self) -> float:
        """How long node 0 is waited for: not for long by a node that could go on elsewhere at once."""
        with self._lock:
            waits = self._wish is not None and self._hello.generation > 0
        return timeouts.TAKEOVER_REFUSED_S if waits and self._is_refused else timeouts.TAKEOVER_S

    def _try_once(self, endpoint: Endpoint) -> bool:
        """Use one connection to its end; whether it was any good."""
        welcomed = False
        try:
            with self._connect(endpoint) as sock, abort_when_lost(sock):
                tune(sock, self._lease_s)
                self._greet(sock, lines := Lines(sock, msg.parse, self._server, self._secret), endpoint)
                welcomed = True
                self._endpoint, self._own_address = endpoint, str(sock.getsockname()[0])
                self._change("connected" if endpoint == self._home else f"connected to {endpoint}")
                self._tell(Connected())
                every_s = max(timeouts.LEAST_RENEWAL_S, self._lease_s / timeouts.RENEWALS)
                self._talk(sock, lines, msg.Renew(), every_s, timeouts.UNHEARD_S)
        except (LostError, OSError) as problem:  # it has ended after its first word, or we have no descriptor
            reason = str(problem) if isinstance(problem, LostError) else f"no connection: {problem.strerror}"
            if welcomed and not self._is_over:
                self._tell(Disconnected(reason))
            elif endpoint == self._home and not self._is_over:
                self._change(reason)
        return welcomed

    def _on_silence(self, sock: socket.socket, text: str) -> None:
        """Who waits for its word asks whether it lives: the kernel answers for a process that is frozen, too."""
        with self._lock:
            waits = self._wish is not None or self._end is not None
        if waits:
            host, port, *_ = sock.getpeername()
            try:
                inquire(Endpoint(host, port), self._hello.job, self._secret, timeouts.LOOK_ANSWER_S)
            except NodeError:
                raise LostError(f"{text}, and it answers no question") from None

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        """Ask for the address each time: a pod that comes back has a new one."""
        timeout_s = timeouts.CONNECT_S if self._seats is None else timeouts.CONNECT_TO_CANDIDATE_S
        is_home = endpoint == self._home
        self._is_refused = self._is_refused and not is_home
        try:
            return socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        except (socket.gaierror, UnicodeError) as problem:
            why = getattr(problem, "strerror", None) or problem
            more = _NAMELESS if self._is_beside else ""
            raise LostError(f"no address for {endpoint.host} yet: {why}{more}") from None
        except OSError as problem:
            self._is_refused = self._is_refused or (is_home and isinstance(problem, ConnectionRefusedError))
            if isinstance(problem, ConnectionRefusedError) and self._is_misplaced(endpoint):
                reason = _MISPLACED % (endpoint.host, self._hello.node_rank)
                self._is_over = True
                self._tell(msg.GiveUp(reason, exit_code=MISCONFIGURED, cause="Misconfigured"))
            why = problem.strerror or "no answer in time"
            raise LostError(f"cannot connect to the coordinator at {endpoint}: {why}") from None

    def _is_misplaced(self, endpoint: Endpoint) -> bool:
        """Whether node 0's address leads to this node, which is another one, and no other launcher comes here."""
        is_other = self._hello.node_rank not in (None, 0) and not (self._hello.arrives or self._was_let_in)
        is_late = time.monotonic() - self._away_s > timeouts.NODE_0_HERE_S
        host = endpoint.host
        return is_other and is_late and endpoint == self._home and is_here(host) and not may_share(host)

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message], endpoint: Endpoint) -> None:
        until_s = time.monotonic() + timeouts.GREETING_S
        other = f"what listens at {endpoint} is not a coordinator"
        lines.challenged(until_s, other)
        answer = self._answer(lines, until_s, endpoint)
        if isinstance(answer, msg.Refused):
            if not answer.retry:
                self._is_over = True
                self._change(f"refused by the coordinator: {answer.reason}")
                self._tell(answer)
            raise LostError(f"refused by the coordinator for now: {answer.reason}")
        if not isinstance(answer, msg.Welcome):
            raise LostError(other)
        self._lease_s, self._was_let_in = answer.lease_s, True
        sock.settimeout(max(1.0, self._lease_s))
        tune(sock, self._lease_s)
        with self._lock:
            for message in (self._wish, self._end):
                if message is not None and message not in self._unsent:
                    self._unsent.appendleft(message)

    def _answer(self, lines: Lines[msg.Message], until_s: float, endpoint: Endpoint) -> msg.Message:
        try:
            return self._introduced(lines, self._hello, until_s)
        except UnprovenError:
            raise
        except LostError:
            # A coordinator of another version may not understand a Hello of ours, but answers this.
            with contextlib.suppress(NodeError):
                answer = inquire(endpoint, self._hello.job, self._secret, timeouts.LOOK_ANSWER_S)
                if isinstance(answer, msg.Refused) and not answer.retry:
                    return answer
            raise

    def _take(self, message: msg.Message) -> None:
        """Remember what a next Hello must say, and drop what a later Join has answered already."""
        if isinstance(message, msg.Note) and (answer := self._answer_to(message)) is not None:
            return super().send(answer)
        with self._lock:
            if isinstance(message, msg.Formed):
                self._hello = replace(self._hello, generation=message.generation, restarts=message.restarts)
                if self._hello.arrives:
                    self._hello = replace(self._hello, node_rank=message.node_rank)
                self._wish = self._end = None
                self._remember(message.claim)
            elif isinstance(message, msg.Go) and self._hello.claims[-1:]:
                last = self._hello.claims[-1]
                if last.generation == message.generation:
                    self._remember(replace(last, sure=True))
            if isinstance(message, msg.Restart) and message.generation <= self._joined_after:
                return None
        if isinstance(message, msg.Formed):
            self._nudge()
        is_refused = isinstance(message, msg.Refused) and not message.retry
        self._is_over = is_refused or isinstance(message, msg.Finished | msg.GiveUp)
        if isinstance(message, msg.FromServer):
            self._tell(message)
        return None

    def _remember(self, claim: Claim | None) -> None:
        """Note a claim, which this node tells wherever it goes from now on; only then it says `Took`."""
        if claim is None:
            return
        self._hello = replace(self._hello, claims=remember(self._hello.claims, claim))
        if not claim.sure:
            self._unsent.append(msg.Took(claim.generation))

    def _change(self, text: str) -> None:
        if text != self.connection:
            self.connection = text
            self._say(text)
