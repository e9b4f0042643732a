"""Sockets around `machine.step`: one daemon thread that sleeps until a line, a connection or a deadline."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from trainer_launch.coordinator import protocol as msg
from trainer_launch.coordinator import table
from trainer_launch.coordinator.claims import wanted_seats
from trainer_launch.coordinator.complaints import Complaints
from trainer_launch.coordinator.connection import Connection, hang_up
from trainer_launch.coordinator.machine import begin, step
from trainer_launch.coordinator.scout import Scout
from trainer_launch.coordinator.sockets import listen, spare_files, tune
from trainer_launch.coordinator.state import (
    Close,
    Connected,
    Disconnect,
    Event,
    Gone,
    Said,
    Say,
    Send,
    Settings,
    Tick,
    deadline_s,
)
from trainer_launch.model import Endpoint, Seats

MAX_CONNECTIONS = 8192
MAX_UNGREETED = 200
GREET_S = 5.0  # for a valid Hello
CROWD_S = 0.2  # the oldest without a Hello has this long when MAX_UNGREETED are there and more wait
_ACCEPT_AGAIN_S = 0.5  # when the machine had no descriptor for a connection
_HANG_UP_S = 1.0  # for last words when stopping


class Server:
    """The coordinator of one job. Its state belongs to its thread."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        secret: bytes | None = None,
        log: Callable[[str], None] = print,
        progress: Callable[[], table.Progress | None] = lambda: None,
        seats: Seats | None = None,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._secret = secret
        self._log = log
        self._progress = progress
        self._scout = Scout(seats, self._nudge)
        self._state = begin(settings)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._ungreeted: dict[int, Connection] = {}  # oldest first
        self._to_flush: dict[int, Connection] = {}
        self._events: deque[Event] = deque()
        self._last_peer = 0
        self._is_accepting = False
        self._accept_again_s: float | None = None
        self._grumble = Complaints(log)
        self._stopping = threading.Event()
        self._close_reason: str | None = None
        self._max_connections = max(64, min(MAX_CONNECTIONS, spare_files()))

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        self._listener = listen(self._endpoint)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept(True)
        self._scout.start()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def stop(self, reason: str | None = None) -> None:
        """End the connections and the thread. With a reason the job is given up; without, its nodes wait for us."""
        self._close_reason = reason
        self._stopping.set()
        self._nudge()
        self._thread.join()

    # -- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            if self._close_reason is not None:
                self._events.append(Close(self._close_reason))
                self._work_off()
            hang_up([c for c in self._connections.values() if c.is_greeted], time.monotonic() + _HANG_UP_S)
        finally:
            self._scout.close()
            for connection in self._connections.values():
                connection.sock.close()
            for sock in (self._listener, self._wake, self._waker):
                sock.close()
            self._selector.close()

    def _turn(self) -> None:
        """Everything that was said is heard before time passes: being late ourselves is nobody's silence."""
        for key, mask in self._selector.select(self._sleep_s()):
            if key.fileobj is self._listener:
                self._take_connections()
            elif isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                self._wake.recv(4096)
        self._events.extend(self._scout.found())
        now_s = time.monotonic()
        due_s = deadline_s(self._state)
        if due_s is not None and due_s <= now_s:
            self._events.append(Tick())
        self._drop_silent(now_s)
        self._work_off()
        self._scout.want(wanted_seats(self._state))

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _sleep_s(self) -> float | None:
        times = [deadline_s(self._state), self._accept_again_s]
        for oldest in self._ungreeted.values():
            times.append(oldest.at_s + self._patience_s())
            break
        due_s = min((at_s for at_s in times if at_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _work_off(self) -> None:
        while self._events or self._to_flush:
            if self._events:
                self._play(self._events.popleft())
            else:
                self._flush_all()  # may bring news of those that are gone

    def _play(self, event: Event) -> None:
        self._state, replies = step(self._state, event, time.monotonic())
        for reply in replies:
            match reply:
                case Send(peer, message):
                    self._send(peer, message)
                case Disconnect(peer):
                    self._close_after_flush(peer)
                case Say(text):
                    self._log(text)

    # -- connections --------------------------------------------------------------------------

    def _accept(self, wanted: bool) -> None:
        if wanted and not self._is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not wanted and self._is_accepting:
            self._selector.unregister(self._listener)
        self._is_accepting = wanted

    def _take_connections(self) -> None:
        while len(self._ungreeted) < MAX_UNGREETED and len(self._connections) < self._max_connections:
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:  # out of descriptors or memory: the ones we have come first
                self._grumble(f"cannot take it: {problem.strerror}", "anywhere")
                self._accept_again_s = time.monotonic() + _ACCEPT_AGAIN_S
                self._accept(False)
                return
            self._welcome(sock, str(address[0]))
        self._accept(False)  # until somebody has said Hello or is dropped

    def _welcome(self, sock: socket.socket, address: str) -> None:
        self._last_peer += 1
        nonce = secrets.token_hex(16) if self._secret is not None else ""
        connection = Connection(sock, self._last_peer, address, nonce, time.monotonic())
        try:
            sock.setblocking(False)
            tune(sock, 2 * self._settings.lease_s)
        except OSError:
            sock.close()
            return
        self._connections[connection.peer] = self._ungreeted[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._events.append(Connected(connection.peer))
        self._send(connection.peer, msg.Challenge(nonce))

    def _patience_s(self) -> float:
        """How long a connection may go without a Hello."""
        return GREET_S if self._is_accepting or self._accept_again_s is not None else CROWD_S

    def _drop_silent(self, now_s: float) -> None:
        """Drop who has not said Hello in time, or soon enough while others wait; then there is room again."""
        for connection in list(self._ungreeted.values()):
            if connection.at_s + self._patience_s() > now_s:
                break
            self._drop(connection, "said no Hello")
        if self._accept_again_s is not None:
            if now_s < self._accept_again_s:
                return
            self._accept_again_s = None
        self._accept(len(self._ungreeted) < MAX_UNGREETED and len(self._connections) < self._max_connections)

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
        except msg.ProtocolError as problem:
            self._drop(connection, str(problem))

    def _hear(self, connection: Connection) -> None:
        lines = connection.read()
        if lines is None:
            return self._drop(connection, ended=True)
        for line in lines:
            message = msg.parse(line)
            if connection.is_closing:
                return None
            if not connection.is_greeted:
                self._greet(connection, message)
            if not connection.is_closing:
                self._events.append(Said(connection.peer, message))
        return None

    def _greet(self, connection: Connection, message: msg.Message) -> None:
        if not isinstance(message, msg.Hello | msg.StatusQuery):
            raise msg.ProtocolError("said something before Hello")
        who = message.incarnation if isinstance(message, msg.Hello) else msg.ASKING
        if not connection.is_proven(message.proof, self._secret, self._settings.job, who):
            self._grumble("its secret is not the job's", connection.address)
            self._send(connection.peer, msg.Refused("the secret is not the job's", retry=False))
            return self._close_after_flush(connection.peer)
        if isinstance(message, msg.StatusQuery):
            self._send(connection.peer, table.answer(message, self._state, time.monotonic(), self._progress()))
            return self._close_after_flush(connection.peer)
        connection.is_greeted = True
        self._ungreeted.pop(connection.peer, None)
        return None

    def _send(self, peer: int, message: msg.FromServer) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        if connection.write(msg.render(message)):
            self._to_flush[peer] = connection
        else:
            self._drop(connection, "does not read what it is sent")

    def _flush_all(self) -> None:
        due, self._to_flush = self._to_flush, {}
        for connection in due.values():
            self._serve(connection, selectors.EVENT_WRITE)

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
        self._events.append(Gone(connection.peer, ended))
        if why is not None:
            self._grumble(why, connection.address)
