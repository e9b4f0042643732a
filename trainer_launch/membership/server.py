"""Servers of ours: what each does with its connections, and the coordinator's.

One thread owns a server, and sleeps in `_wait` until a line, a connection, a nudge or a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from trainer_launch.host.network import TOO_FEW_FILES, allow_connections, listen, spare_files, tune
from trainer_launch.membership import membership, timeouts
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.authentication import (
    MAX_SIGNED_BYTES,
    NO_SECRET,
    WRONG_SECRET,
    Channel,
    FirstMessage,
)
from trainer_launch.membership.candidates import CandidateWatch, look
from trainer_launch.membership.election import wanted_candidates
from trainer_launch.membership.notes import Judge
from trainer_launch.membership.protocol import Challenge, Refused
from trainer_launch.membership.state import (
    CoordinatorSettings,
    Looked,
    deadline_s,
    other_version,
    status,
    why_stranger,
)
from trainer_launch.model import Endpoint, Hosting, Seats
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import counted

MAX_CONNECTIONS = 8192
MAX_UNGREETED = 200
MAX_UNSENT_BYTES = 1 << 20  # what a peer may leave unread before it is dropped
_READ_BYTES = 65536
_OF_TORCH = b"\0"  # how each client of a TCPStore begins
_MANY_COMPLAINTS = 50
_log = logging.getLogger(__name__)
_Heard = TypeVar("_Heard")  # what is said to a server
_Sent = TypeVar("_Sent")  # what it says itself


class Connection:
    """Bytes that are read and not yet a line, bytes that are written and not yet sent."""

    def __init__(self, sock: socket.socket, peer: int, address: str, secret: bytes | None, at_s: float) -> None:
        self.sock = sock
        self.peer = peer
        self.address = address
        self.channel = Channel(secret)
        self.at_s = at_s  # when it came
        self.is_greeted = False
        self.is_closing = False  # after what is unsent
        self._unread = bytearray()
        self.unsent = bytearray()  # what waits for room

    def read(self) -> list[bytes] | None:
        """The lines that have come, None at the end. One read: nobody can keep the server busy alone."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            return None
        if not self.is_greeted and not self._unread and data.startswith(_OF_TORCH):
            raise MessageError(
                "it looks for torch's store, which is where MASTER_ADDR and MASTER_PORT of the workers say; "
                'call init_process_group with init_method="env://"'
            )
        *lines, rest = (self._unread + data).split(b"\n")
        self._unread = rest
        if len(rest) >= MAX_SIGNED_BYTES:
            raise MessageError(f"a line is longer than {MAX_SIGNED_BYTES} bytes")
        return [bytes(line) for line in lines]

    def flush(self) -> None:
        """Send what there is room for."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self.unsent[:sent]


class ServerConnections(ABC, Generic[_Heard, _Sent]):
    """A server and its connections, which are numbered in the order in which they came."""

    _hang_up_s = timeouts.HANG_UP_S

    def __init__(  # noqa: PLR0913
        self,
        name: str,  # for people
        parse: Callable[[bytes], _Heard],
        render: Callable[[_Sent | Challenge | Refused], bytes],
        *,
        endpoint: Endpoint,
        nodes: int,  # that may come
        secret: bytes | None,
        silence_s: float,  # until the kernel ends a connection whose other end does not answer
        log: Callable[[str, int], None],
    ) -> None:
        self._name, self._endpoint = name, endpoint
        self._parse = parse
        self._render = render
        self._secret = secret
        self._silence_s = silence_s
        self._log, self._complaints = log, set[str]()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._ungreeted: dict[int, Connection] = {}  # oldest first
        self._to_flush: dict[int, Connection] = {}
        self._last_peer = 0
        self._rendered: tuple[object, bytes] = (None, b"")
        self._events: deque[Callable[[float], None]] = deque()  # what has happened, each called with the time then
        self._is_accepting = False
        self._accept_again_s: float | None = None
        self._stopping = threading.Event()
        self._defect = ""  # of ours, which has ended what the server is for
        if not allow_connections(nodes):
            log(TOO_FEW_FILES % counted(nodes, "node"), logging.WARNING)
        self._max_connections = max(64, min(MAX_CONNECTIONS, spare_files()))

    @abstractmethod
    def _heard(self, connection: Connection, message: _Heard) -> None:
        """Somebody said something; a MessageError ends the connection."""

    @abstractmethod
    def _gone(self, connection: Connection, *, ended: bool) -> None:
        """A connection is over; `ended`: by an orderly end of the other side."""

    @abstractmethod
    def _due_s(self) -> float | None:
        """When `_tick` is to be called; None: never."""

    @abstractmethod
    def _tick(self, now_s: float) -> None:
        """Time has passed."""

    @abstractmethod
    def _end(self, defect: str) -> None:
        """Say the last words. After a defect of ours, too: no node may wait for an answer for ever."""

    def _is_over(self) -> bool:
        """Whether all is said, though nobody has stopped the server."""
        return False

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        self._listener = listen(self._endpoint)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept(True)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """End the thread, when what was said last has gone out; nobody is waited for for long."""
        self._stopping.set()
        self._nudge()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._is_over():
                self._turn()
            self._end("")
            self._work_off()
        except Exception as problem:  # noqa: BLE001 - a defect of ours, of which all nodes have to hear
            _log.critical("internal error in the %s", self._name, exc_info=True)
            self._events.clear()
            self._defect = f"internal error in the {self._name}: {type(problem).__name__}: {problem}"
            self._end(self._defect)
            self._work_off()
            while not self._stopping.is_set() and not self._is_over():  # who comes later has to hear of it, too
                self._wait(None)
                self._drop_silent(time.monotonic())
                self._work_off()
        finally:
            self._accept(False)
            self._listener.close()
            hang_up([c for c in self._connections.values() if c.is_greeted], time.monotonic() + self._hang_up_s)
            self._close()

    def _turn(self) -> None:
        """Everything that was said is heard before time passes: being late ourselves is nobody's silence."""
        self._wait(self._due_s())
        now_s, due_s = time.monotonic(), self._due_s()
        if due_s is not None and due_s <= now_s:
            self._events.append(self._tick)
        self._drop_silent(now_s)
        self._work_off()

    def _nudge(self) -> None:
        """End the thread's sleep, from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _close(self) -> None:
        """Close all, unheard and unsaid words with it."""
        for connection in self._connections.values():
            connection.sock.close()
        self._wake.close()
        self._waker.close()
        self._selector.close()

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
        oldest = next(iter(self._ungreeted.values()), None)
        times = (due_s, self._accept_again_s, None if oldest is None else oldest.at_s + self._patience_s())
        first_s = min((at_s for at_s in times if at_s is not None), default=None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    def _drop_silent(self, now_s: float) -> None:
        """Drop who has not said who it is in time, or soon enough while others wait; then there is room again."""
        for connection in list(self._ungreeted.values()):
            if connection.at_s + self._patience_s() > now_s:
                break
            self._drop(connection, "did not identify itself")
        if self._accept_again_s is not None:
            if now_s < self._accept_again_s:
                return
            self._accept_again_s = None
        self._accept(self._has_room())

    def _work_off(self) -> None:
        """Act on what has happened, then send what is unsent: it may bring news of those that are gone."""
        while self._events or self._to_flush:
            while self._events:
                self._events.popleft()(time.monotonic())
            due, self._to_flush = self._to_flush, {}
            for connection in due.values():
                self._serve(connection, selectors.EVENT_WRITE)

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
                self._complain(f"cannot take it: {problem.strerror}", "anywhere")
                self._accept_again_s = time.monotonic() + timeouts.ACCEPT_AGAIN_S
                self._accept(False)
                return
            self._welcome(sock, str(address[0]).removeprefix("::ffff:"))
        self._accept(False)  # until somebody has said who it is, or is dropped

    def _welcome(self, sock: socket.socket, address: str) -> None:
        self._last_peer += 1
        connection = Connection(sock, self._last_peer, address, self._secret, time.monotonic())
        try:
            sock.setblocking(False)
            tune(sock, self._silence_s)
        except OSError:
            sock.close()
            return
        self._connections[connection.peer] = self._ungreeted[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._send(connection.peer, Challenge(connection.channel.challenge()))

    def _refusal_of(
        self,
        connection: Connection,
        message: FirstMessage,
        refused: Refused | None,
        stranger: Refused | None = None,
    ) -> Refused | None:
        """Tell who comes why it is refused, also where it does not show that it knows the job's secret.

        `stranger` is what one of another job is told, whose secret differs of course. None: it is admitted.
        """
        if refused is None and not connection.channel.admits(message):
            refused = stranger or Refused(NO_SECRET if message.proof is None else WRONG_SECRET, retry=False)
            self._complain(refused.reason, connection.address)
        if refused is not None:
            self._send(connection.peer, refused)
            self._close_after_flush(connection.peer)
        return refused

    def _greeted(self, connection: Connection) -> None:
        connection.is_greeted = True
        self._ungreeted.pop(connection.peer, None)

    def _serve(self, connection: Connection, mask: int) -> None:
        if connection.peer not in self._connections:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            lines = connection.read() if mask & selectors.EVENT_READ else []
            for line in lines or ():
                message = self._parse(connection.channel.check(line))
                if connection.is_closing:
                    return
                self._heard(connection, message)
            if lines is None:
                self._drop(connection, ended=True)
        except OSError:
            self._drop(connection)
        except MessageError as problem:
            self._drop(connection, str(problem))

    def _send(self, peer: int, message: _Sent | Challenge | Refused) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        if message is not self._rendered[0]:  # many are sent the same one
            try:
                self._rendered = (message, self._render(message))
            except MessageError as problem:  # nodes have told too much; the others are served on
                self._drop(connection, f"cannot be answered: {problem}")
                return
        connection.unsent += connection.channel.sign(self._rendered[1])
        self._to_flush[peer] = connection
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._drop(connection, "does not read its messages")

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        if connection.is_closing and not connection.unsent:
            return self._drop(connection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
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
            self._complain(why, connection.address)

    def _complain(self, why: str, address: str) -> None:
        """Say why a connection was dropped, each reason once: a flood of strangers must not flood the log."""
        if why not in self._complaints and len(self._complaints) < _MANY_COMPLAINTS:
            self._complaints.add(why)
            self._log(f"{self._name}: dropped a connection from {address}: {why} (logged once)", logging.INFO)


def hang_up(connections: list[Connection], until_s: float) -> None:
    """Send what is unsent, then wait for the others to end: closing over unread lines would void our last lines."""
    for connection in connections:  # nobody waits for who does not read
        with contextlib.suppress(OSError):
            connection.flush()
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sock.settimeout(max(0.0, until_s - time.monotonic()))
            connection.sock.sendall(connection.unsent)
            connection.sock.shutdown(socket.SHUT_WR)
    for connection in connections:
        with contextlib.suppress(OSError):
            while time.monotonic() < until_s:
                connection.sock.settimeout(max(0.0, until_s - time.monotonic()))
                if not connection.sock.recv(_READ_BYTES):
                    break


def _say(text: str, level: int) -> None:
    _log.log(level, "%s", text)


class Coordinator(ServerConnections[msg.Message, msg.FromServer]):
    """The coordinator of one job. Its state belongs to its thread."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        endpoint: Endpoint,
        secret: bytes | None = None,
        log: Callable[[str, int], None] = _say,
        seats: Seats | None = None,
        judges: Sequence[Judge] = (),
    ) -> None:
        super().__init__(
            *("coordinator", msg.parse, msg.render),
            endpoint=endpoint,
            nodes=settings.all_nodes,
            secret=secret,
            silence_s=2 * settings.lease_s,
            log=log,
        )
        self._candidates = CandidateWatch(seats, settings.job, secret, self._looked)
        self._state = membership.begin(settings, self._send, self._close_after_flush, log, judges)

    def give_up(self, reason: str) -> None:
        """The job has failed; nodes that call later hear it, too. From any thread."""
        self._events.append(lambda _: membership.close(self._state, reason))
        self._nudge()

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        port = super().start()
        self._candidates.start()
        return port

    def _turn(self) -> None:
        super()._turn()
        self._candidates.want(wanted_candidates(self._state))

    def _due_s(self) -> float | None:
        return deadline_s(self._state)

    def _tick(self, now_s: float) -> None:
        membership.tick(self._state, now_s)

    def _end(self, defect: str) -> None:
        if defect:
            membership.close(self._state, defect)
            for peer in self._connections.keys() - self._state.peers.keys():
                self._close_after_flush(peer)  # it comes again, and hears of it

    def _close(self) -> None:
        self._candidates.close()
        super()._close()

    def _looked(self, looked: Looked) -> None:
        self._events.append(lambda now_s: membership.look(self._state, looked, now_s))
        self._nudge()

    def _gone(self, connection: Connection, *, ended: bool) -> None:
        if self._defect:
            return
        self._events.append(lambda now_s: membership.hang_up(self._state, connection.peer, now_s, ended=ended))

    def _heard(self, connection: Connection, message: msg.Message) -> None:
        if self._defect:
            return self._turn_away(connection, message)
        if not connection.is_greeted:
            self._greet(connection, message)
        if not connection.is_closing:
            self._events.append(lambda now_s: membership.hear(self._state, connection.peer, message, now_s))
        return None

    def _turn_away(self, connection: Connection, message: msg.Message) -> None:
        """Tell a node that comes after a defect of ours of it; what is known of the job is not used any more."""
        if isinstance(message, msg.Hello) and self._refusal_of(connection, message, other_version(message)) is None:
            self._send(connection.peer, msg.Welcome(self._state.settings.granted_lease_s))
            self._send(connection.peer, msg.GiveUp(self._defect))
        self._close_after_flush(connection.peer)

    def _greet(self, connection: Connection, message: msg.Message) -> None:
        if not isinstance(message, msg.Hello | msg.StatusQuery):
            raise MessageError("said something before Hello")
        stranger = why_stranger(self._state.settings.job, message)
        refused = self._refusal_of(connection, message, other_version(message), stranger)
        if refused is not None:
            if isinstance(message, msg.Hello):
                self._events.append(lambda _: membership.note_refused(self._state, message, refused, proven=False))
            return None
        if isinstance(message, msg.Hello) and message.listens is None:
            return self._greeted(connection)
        # A node in preflight learns, too, how the job stands: it does not join it yet.
        self._send(connection.peer, stranger or status(self._state, time.monotonic()))
        return self._close_after_flush(connection.peer)


@contextlib.contextmanager
def serve(
    hosting: Hosting,
    secret: bytes | None,
    heard: Callable[[str], None] = lambda text: None,
    judges: Sequence[Judge] = (),
) -> Iterator[Coordinator | None]:
    """Serve the job's nodes in a thread of this process; `heard` is called with what it says, `judges` judge notes.

    Raises:
        NodeError: the port is taken; a standby goes without, and so does who may join another launcher there.
    """
    settings = CoordinatorSettings(
        job=hosting.job,
        min_nodes=hosting.nodes.min,
        max_nodes=hosting.nodes.max,
        spares=hosting.spares,
        failing=hosting.failing,
        by_arrival=hosting.by_arrival,
        rejoin_timeout_s=hosting.rejoin_timeout_s,
        max_restarts=hosting.max_restarts,
        shrink_after_s=hosting.shrink_after_s,
        candidate=None if hosting.seats is None else hosting.seat,
    )

    def say(text: str, level: int) -> None:
        _say(text, level)
        heard(text)

    server = Coordinator(settings, Endpoint(hosting.host, hosting.port), secret, say, hosting.seats, judges)
    try:
        server.start()
    except NodeError as problem:
        if hosting.by_arrival and look({0: Endpoint("127.0.0.1", hosting.port)})[0]:
            _log.info("port %d of this machine is served by another launcher; this node joins it", hosting.port)
            yield None
            return
        if hosting.seat == 0:
            raise
        _log.warning("%s; so the other nodes cannot continue here without node 0", problem)
        yield None
        return
    deadline_s = hosting.deadline_s or 0.0
    reason = f"the job took longer than active_deadline_seconds, {deadline_s:g} s"
    timer = threading.Timer(deadline_s, server.give_up, [reason])
    timer.daemon = True
    if hosting.deadline_s is not None:
        timer.start()
    try:
        yield server
    finally:
        timer.cancel()
        server.stop()
