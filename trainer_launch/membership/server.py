"""Serve the coordinator: one daemon thread that sleeps until a line, a connection or a deadline, and steps on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from trainer_launch.host.network import NO_ROOM, make_room
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.candidates import CandidateWatch
from trainer_launch.membership.election import wanted_candidates
from trainer_launch.membership.membership import begin, step
from trainer_launch.membership.server_connections import Complaints, Connection, ServerConnections, hang_up
from trainer_launch.membership.state import (
    Close,
    Connected,
    Disconnect,
    Event,
    Gone,
    Progress,
    Said,
    Say,
    Send,
    Settings,
    Tick,
    answer,
    deadline_s,
)
from trainer_launch.model import Endpoint, Hosting, Seats
from trainer_launch.model.errors import NodeError
from trainer_launch.model.json_lines import MessageError

_log = logging.getLogger(__name__)


class Server(ServerConnections[msg.Message, msg.FromServer]):
    """The coordinator of one job. Its state belongs to its thread."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        secret: bytes | None = None,
        log: Callable[[str], None] = print,
        progress: Callable[[], Progress | None] = lambda: None,
        seats: Seats | None = None,
    ) -> None:
        super().__init__(
            msg.parse,
            msg.render,
            secret=secret,
            silence_s=2 * settings.lease_s,
            complain=Complaints("coordinator", log),
        )
        self._settings = settings
        self._endpoint = endpoint
        self._log = self.warn = log  # `warn` is told what is not the job's ordinary way
        self._progress = progress
        self._candidates = CandidateWatch(seats, settings.job, secret, self._nudge)
        self._state = begin(settings)
        self._events: deque[Event] = deque()
        self._close_reason: str | None = None

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        port = self._open(self._endpoint)
        self._candidates.start()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        return port

    def give_up(self, reason: str) -> None:
        """The job has failed; nodes that call later hear it, too. From any thread."""
        self._events.append(Close(reason))
        self._nudge()

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
            hang_up([c for c in self._connections.values() if c.is_greeted], time.monotonic() + timeouts.HANG_UP_S)
        finally:
            self._candidates.close()
            self._close()

    def _turn(self) -> None:
        """Everything that was said is heard before time passes: being late ourselves is nobody's silence."""
        self._wait(deadline_s(self._state))
        self._events.extend(self._candidates.found())
        now_s = time.monotonic()
        due_s = deadline_s(self._state)
        if due_s is not None and due_s <= now_s:
            self._events.append(Tick())
        self._drop_silent(now_s)
        self._work_off()
        self._candidates.want(wanted_candidates(self._state))

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
                case Say(text, warns):
                    (self.warn if warns else self._log)(text)

    # -- connections --------------------------------------------------------------------------

    def _came(self, connection: Connection) -> None:
        self._events.append(Connected(connection.peer))

    def _gone(self, connection: Connection, *, ended: bool) -> None:
        self._events.append(Gone(connection.peer, ended))

    def _heard(self, connection: Connection, message: msg.Message) -> None:
        if not connection.is_greeted:
            self._greet(connection, message)
        if not connection.is_closing:
            self._events.append(Said(connection.peer, message))

    def _greet(self, connection: Connection, message: msg.Message) -> None:
        if isinstance(message, msg.Time):  # a node in preflight, which then asks how the job stands
            self._send(connection.peer, msg.Refused("the job is already running", retry=True))
            return self._close_after_flush(connection.peer)
        if not isinstance(message, msg.Hello | msg.StatusQuery):
            raise MessageError("said something before Hello")
        who = message.incarnation if isinstance(message, msg.Hello) else msg.ASKING
        if not self._is_proven(connection, message.proof, self._settings.job, who):
            self._send(connection.peer, msg.Refused("its secret differs from the job's", retry=False))
            return self._close_after_flush(connection.peer)
        if isinstance(message, msg.StatusQuery):
            self._send(connection.peer, answer(message, self._state, time.monotonic(), self._progress()))
            return self._close_after_flush(connection.peer)
        return self._greeted(connection)


# -- for a launcher that hosts it --------------------------------------------------------------


@contextlib.contextmanager
def serve(
    hosting: Hosting,
    secret: bytes | None,
    heard: Callable[[str], None] = lambda text: None,
    progress: Callable[[], Progress | None] = lambda: None,
) -> Iterator[Server | None]:
    """Serve the job's nodes in a thread of this process; `heard` is called with what it says.

    Raises:
        NodeError: the port is taken; a standby goes without.
    """
    settings = Settings(
        job=hosting.job,
        min_nodes=hosting.nodes.min,
        max_nodes=hosting.nodes.max,
        rejoin_timeout_s=hosting.rejoin_timeout_s,
        max_restarts=hosting.max_restarts,
        window_s=hosting.restart_window_s,
        shrink_after_s=hosting.shrink_after_s,
        candidate=None if hosting.seats is None else hosting.seat,
    )

    def say(text: str, level: int = logging.INFO) -> None:
        _log.log(level, "%s", text)
        heard(text)

    def warn(text: str) -> None:
        say(text, logging.WARNING)

    if not make_room(hosting.nodes.max):
        _log.warning(NO_ROOM, hosting.nodes.max)
    server = Server(settings, Endpoint(hosting.host, hosting.port), secret, say, progress, hosting.seats)
    server.warn = warn
    try:
        server.start()
    except NodeError as problem:
        if hosting.seat == 0:
            raise
        _log.warning("%s; so the others cannot go on here without node 0", problem)
        yield None
        return
    timer = _deadline(hosting.deadline_s, server)
    try:
        yield server
    finally:
        timer.cancel()
        server.stop()


def _deadline(deadline_s: float | None, server: Server) -> threading.Timer:
    """The timer that ends the job; without a deadline it is never started."""
    reason = f"the job took longer than active_deadline_seconds, {deadline_s or 0:g} s"
    timer = threading.Timer(deadline_s or 0, server.give_up, [reason])
    timer.daemon = True
    if deadline_s is not None:
        timer.start()
    return timer
