"""Sockets around the cluster preflight: a thread on node 0 that waits for a line, a connection or a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from trainer_launch.membership.protocol import Hello, StatusQuery
from trainer_launch.membership.server import Complaints, Connection, ServerConnections, hang_up
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import MALFORMED
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import (
    NOT_YET,
    TICK_S,
    ClusterPreflight,
    PreflightPhase,
    other_version,
)
from trainer_launch.preflight.cluster.nodes import ClusterSettings
from trainer_launch.preflight.cluster.present_nodes import look_at_all

_HANG_UP_S = 2.0  # for the termination message
_SILENCE_S = 20.0  # until the kernel ends a connection whose other end does not answer
_log = logging.getLogger(__name__)


class PreflightServer(ServerConnections[msg.Message, msg.FromServer]):
    """The cluster preflight of one job, on the port that its nodes meet at; it is free again after `stop`."""

    def __init__(self, settings: ClusterSettings, endpoint: Endpoint, secret: bytes | None = None) -> None:
        complain = Complaints("cluster preflight", lambda text: _log.info("%s", text))
        super().__init__(msg.parse, msg.render, secret=secret, silence_s=_SILENCE_S, complain=complain)
        self._settings = settings
        self._endpoint = endpoint
        self._tick_at_s = 0.0

    def start(self) -> int:
        """Listen, or raise NodeError; returns the port."""
        port = self._open(self._endpoint)
        # To be read after its verdict.
        self.preflight = ClusterPreflight(self._settings, time.monotonic(), self._say, self._look)
        self._thread = threading.Thread(target=self._run, name="cluster preflight", daemon=True)
        self._thread.start()
        return port

    def stop(self) -> None:
        """Close the port. What was said last still goes out, but nobody is waited for for long."""
        self._stopping.set()
        self._nudge()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self.preflight.phase is not PreflightPhase.OVER:
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
        self._wait(self._tick_at_s)
        now_s = time.monotonic()
        if now_s >= self._tick_at_s:
            self._tick_at_s = now_s + TICK_S
            self._events.append(self.preflight.tick)
        self._drop_silent(now_s)
        self._work_off()

    def _play(self, event: Callable[[float], None]) -> None:
        try:
            event(time.monotonic())
        except MALFORMED as mistake:  # ours: a thread that dies in silence would blame node 0
            _log.exception("cluster preflight: internal error")
            self.preflight.break_off(mistake)

    def _say(self, peer: int, message: msg.FromServer | None) -> None:
        if message is None:
            self._close_after_flush(peer)
        else:
            self._send(peer, message)

    def _look(self, places: Sequence[Endpoint | None], limit_s: float) -> None:
        def look() -> None:
            stuck = look_at_all(places, limit_s)
            self._events.append(lambda now_s: self.preflight.looked(stuck))

        threading.Thread(target=look, daemon=True, name="look").start()

    def _gone(self, connection: Connection, *, ended: bool) -> None:
        self._events.append(lambda now_s: self.preflight.lose(connection.peer, now_s))

    def _heard(self, connection: Connection, message: msg.Message) -> None:
        peer, address = connection.peer, connection.address
        if isinstance(message, msg.Time):
            now = time.time()
            self._send(peer, msg.TimeIs(message.sent, now, time.time()))
            return
        if isinstance(message, StatusQuery):
            self._send(peer, NOT_YET)
            self._close_after_flush(peer)
            return
        if not connection.is_greeted:
            if not isinstance(message, msg.Present | Hello):
                raise MessageError("did not say first who it is")
            if not self._is_admitted(connection, message, other_version(message)):
                return
            self._greeted(connection)
        self._events.append(lambda now_s: self.preflight.hear(peer, address, message, now_s))
