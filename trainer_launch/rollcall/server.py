"""Sockets around a Hall: one daemon thread on node 0 that sleeps until a line, a connection or a deadline."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from trainer_launch.coordinator.connection import Connection, hang_up
from trainer_launch.coordinator.protocol import Challenge, Hello, ProtocolError
from trainer_launch.coordinator.sockets import listen, tune
from trainer_launch.measures import Measure
from trainer_launch.model import Endpoint
from trainer_launch.rollcall import protocol as msg
from trainer_launch.rollcall.hall import Hall
from trainer_launch.rollcall.stages import Stuck, look_at_all
from trainer_launch.rollcall.state import Drop, Event, Gone, Look, Looked, Over, Reply, Said, Send, Settings, Tick

MAX_CONNECTIONS = 8192
MAX_UNGREETED = 200
GREET_S = 5.0  # for a Present
_CROWD_S = 0.2  # for the oldest without one, while others wait to be let in
_HANG_UP_S = 2.0  # for the last words
_SILENCE_S = 20.0  # until the kernel ends a connection whose other end does not answer
_log = logging.getLogger(__name__)

LookAtAll = Callable[[Sequence[Endpoint | None], float], Sequence[Stuck]]


class Server:
    """The roll call of one job, on the port that its nodes meet at; that port is free again after `stop`."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        secret: bytes | None = None,
        look: LookAtAll = look_at_all,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._secret = secret
        self._look = look
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._ungreeted: dict[int, Connection] = {}  # oldest first
        self._to_flush: dict[int, Connection] = {}
        self._looked: SimpleQueue[Looked] = SimpleQueue()
        self._last_peer = 0
        self._is_accepting = False
        self._is_over = False
        self._stopping = threading.Event()

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        self._listener = listen(self._endpoint)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept(True)
        self._hall = Hall(self._settings, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="roll call", daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def measured(self) -> list[Measure]:
        """What the nodes have measured; after the verdict."""
        return self._hall.measured()

    def stop(self) -> None:
        """Close the port. What was said last still goes out, but nobody is waited for for long."""
        self._stopping.set()
        self._nudge()
        self._thread.join()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._is_over:
                self._turn()
            self._accept(False)
            self._listener.close()
            hang_up(list(self._connections.values()), time.monotonic() + _HANG_UP_S)
        finally:
            for connection in self._connections.values():
                connection.sock.close()
            self._listener.close()
            self._stopping.wait()  # the waker is used until then
            for sock in (self._wake, self._waker):
                sock.close()
            self._selector.close()

    def _turn(self) -> None:
        """What was said is heard before time passes: being late ourselves is nobody's silence."""
        for key, mask in self._selector.select(self._sleep_s()):
            if key.fileobj is self._listener:
                self._take_connections()
            elif isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
        with contextlib.suppress(Empty):
            while True:
                self._tell(self._looked.get_nowait())
        due_s = self._hall.due_s()
        if due_s is not None and due_s <= time.monotonic():
            self._tell(Tick())
        self._drop_silent(time.monotonic())
        due, self._to_flush = self._to_flush, {}
        for connection in due.values():
            self._serve(connection, selectors.EVENT_WRITE)

    def _sleep_s(self) -> float | None:
        due_s = self._hall.due_s()
        times = [] if due_s is None else [due_s]
        times += [oldest.at_s + self._patience_s() for oldest in list(self._ungreeted.values())[:1]]
        return None if not times else max(0.0, min(times) - time.monotonic())

    def _tell(self, event: Event) -> None:
        for reply in self._hall.step(event, time.monotonic()):
            self._do(reply)

    def _do(self, reply: Reply) -> None:
        match reply:
            case Send(peer, message):
                self._send(peer, message)
            case Drop(peer):
                connection = self._connections.get(peer)
                if connection is not None:
                    connection.is_closing = True
                    self._to_flush[peer] = connection
            case Look(places, limit_s):
                threading.Thread(target=self._look_at, args=(places, limit_s), daemon=True, name="look").start()
            case Over():
                self._is_over = True

    def _look_at(self, places: Sequence[Endpoint | None], limit_s: float) -> None:
        self._looked.put(Looked(self._look(places, limit_s)))
        self._nudge()

    # -- connections --------------------------------------------------------------------------

    def _accept(self, wanted: bool) -> None:
        if wanted and not self._is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not wanted and self._is_accepting:
            self._selector.unregister(self._listener)
        self._is_accepting = wanted

    def _take_connections(self) -> None:
        while len(self._ungreeted) < MAX_UNGREETED and len(self._connections) < MAX_CONNECTIONS:
            try:
                sock, address = self._listener.accept()
            except OSError:  # nobody waits any more, or there is no descriptor: who is here comes first
                return
            self._welcome(sock, str(address[0]).removeprefix("::ffff:"))
        self._accept(False)  # until somebody has said who it is, or is dropped

    def _welcome(self, sock: socket.socket, address: str) -> None:
        self._last_peer += 1
        nonce = secrets.token_hex(16) if self._secret is not None else ""
        connection = Connection(sock, self._last_peer, address, nonce, time.monotonic())
        try:
            sock.setblocking(False)
            tune(sock, _SILENCE_S)
        except OSError:
            sock.close()
            return
        self._connections[connection.peer] = self._ungreeted[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        connection.write(msg.render(Challenge(nonce)))
        self._to_flush[connection.peer] = connection

    def _patience_s(self) -> float:
        return GREET_S if self._is_accepting else _CROWD_S

    def _drop_silent(self, now_s: float) -> None:
        for connection in list(self._ungreeted.values()):
            if connection.at_s + self._patience_s() > now_s:
                break
            self._drop(connection, "did not say who it is")
        self._accept(len(self._ungreeted) < MAX_UNGREETED and len(self._connections) < MAX_CONNECTIONS)

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
        except ProtocolError as problem:
            self._drop(connection, str(problem))

    def _hear(self, connection: Connection) -> None:
        lines = connection.read()
        if lines is None:
            return self._drop(connection)
        for line in lines:
            message = msg.parse(line)
            if connection.is_closing:
                return None
            if isinstance(message, msg.Time):
                now = time.time()
                self._send(connection.peer, msg.TimeIs(message.sent, now, time.time()))
            elif connection.is_greeted or self._is_let_in(connection, message):
                self._tell(Said(connection.peer, connection.address, message))
        return None

    def _is_let_in(self, connection: Connection, message: msg.Message) -> bool:
        """Whether its first words are those of a node of this job."""
        if not isinstance(message, msg.Present | Hello):
            raise ProtocolError("did not say first who it is")
        if not connection.is_proven(message.proof, self._secret, self._settings.job, message.incarnation):
            _log.warning("roll call: %s does not know the job's secret", connection.address)
            self._send(connection.peer, msg.Refused("its secret is not the job's", retry=False))
            self._do(Drop(connection.peer))
            return False
        connection.is_greeted = True
        self._ungreeted.pop(connection.peer, None)
        return True

    def _send(self, peer: int, message: msg.FromServer) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        if connection.write(msg.render(message)):
            self._to_flush[peer] = connection
        else:
            self._drop(connection, "does not read what it is told")

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        if connection.is_closing and not connection.has_unsent:
            return self._drop(connection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)
        return None

    def _drop(self, connection: Connection, why: str = "") -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        self._ungreeted.pop(connection.peer, None)
        self._to_flush.pop(connection.peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if why:
            _log.info("roll call: dropped a connection from %s: %s", connection.address, why)
        if not self._is_over:
            self._tell(Gone(connection.peer))
