"""Sockets around the cluster preflight: a thread on node 0 that waits for a line, a connection or a deadline."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from trainer_launch.membership.protocol import Hello, StatusQuery
from trainer_launch.membership.server import Complaints, Connection, ServerConnections, hang_up
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import MALFORMED
from trainer_launch.preflight.cluster import nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import ClusterPreflight
from trainer_launch.preflight.cluster.node_link import look_at_all

_HANG_UP_S = 2.0  # for the termination message
_SILENCE_S = 20.0  # until the kernel ends a connection whose other end does not answer
_log = logging.getLogger(__name__)


class PreflightServer(ServerConnections[msg.Message, msg.FromServer]):
    """The cluster preflight of one job, on the port that its nodes meet at; it is free again after `stop`."""

    def __init__(self, settings: nodes.Settings, endpoint: Endpoint, secret: bytes | None = None) -> None:
        super().__init__(
            msg.parse,
            msg.render,
            secret=secret,
            silence_s=_SILENCE_S,
            complain=Complaints("cluster preflight", lambda text: _log.info("%s", text)),
        )
        self._settings = settings
        self._endpoint = endpoint
        self._looked: SimpleQueue[nodes.Looked] = SimpleQueue()
        self._is_over = False

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        port = self._open(self._endpoint)
        self.preflight = ClusterPreflight(self._settings, time.monotonic())  # to be read after its verdict
        self._thread = threading.Thread(target=self._run, name="cluster preflight", daemon=True)
        self._thread.start()
        return port

    def stop(self) -> None:
        """Close the port. What was said last still goes out, but nobody is waited for for long."""
        self._stopping.set()
        self._nudge()
        self._thread.join()

    # -- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._is_over:
                self._turn()
            self._accept(False)
            self._listener.close()
            hang_up(list(self._connections.values()), time.monotonic() + _HANG_UP_S)
        finally:
            self._listener.close()
            self._stopping.wait()  # the waker is used until then
            self._close()

    def _turn(self) -> None:
        """What was said is heard before time passes: being late ourselves is nobody's silence."""
        self._wait(self.preflight.due_s())
        with contextlib.suppress(Empty):
            while True:
                self._tell(self._looked.get_nowait())
        due_s = self.preflight.due_s()
        if due_s is not None and due_s <= time.monotonic():
            self._tell(nodes.Tick())
        self._drop_silent(time.monotonic())
        while self._to_flush:
            self._flush_all()

    def _tell(self, event: nodes.Event) -> None:
        try:
            replies = self.preflight.step(event, time.monotonic())
        except MALFORMED as mistake:  # ours: a thread that dies in silence would blame node 0
            _log.exception("cluster preflight: internal error")
            replies = self.preflight.break_off(mistake)
        for reply in replies:
            self._do(reply)

    def _do(self, reply: nodes.Reply) -> None:
        match reply:
            case nodes.Send(peer, message):
                self._send(peer, message)
            case nodes.Drop(peer):
                self._close_after_flush(peer)
            case nodes.Look(places, limit_s):
                threading.Thread(target=self._look_at, args=(places, limit_s), daemon=True, name="look").start()
            case nodes.Over():
                self._is_over = True

    def _look_at(self, places: Sequence[Endpoint | None], limit_s: float) -> None:
        self._looked.put(nodes.Looked(look_at_all(places, limit_s)))
        self._nudge()

    # -- connections --------------------------------------------------------------------------

    def _gone(self, connection: Connection, *, ended: bool) -> None:
        if not self._is_over:
            self._tell(nodes.Gone(connection.peer))

    def _heard(self, connection: Connection, message: msg.Message) -> None:
        if isinstance(message, msg.Time):
            now = time.time()
            self._send(connection.peer, msg.TimeIs(message.sent, now, time.time()))
        elif isinstance(message, StatusQuery):
            self._send(connection.peer, nodes.NOT_YET)
            self._close_after_flush(connection.peer)
        elif connection.is_greeted or self._is_let_in(connection, message):
            self._tell(nodes.Said(connection.peer, connection.address, message))

    def _is_let_in(self, connection: Connection, message: msg.Message) -> bool:
        """Whether its first words are those of a node of this job."""
        if not isinstance(message, msg.Present | Hello):
            raise MessageError("did not say first who it is")
        if self._is_admitted(connection, message, nodes.other_version(message)):
            self._greeted(connection)
            return True
        return False
