"""Sockets around the cluster preflight: a thread on node 0 that waits for a line, a connection or a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from trainer_launch.membership.protocol import StatusQuery, refused_version
from trainer_launch.membership.server import Connection, ServerConnections
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MessageError
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import NOT_YET, TICK_S, ClusterPreflight, PreflightPhase
from trainer_launch.preflight.cluster.nodes import ClusterSettings
from trainer_launch.preflight.cluster.present_nodes import look_at_all

_SILENCE_S = 20.0  # until the kernel ends a connection whose other end does not answer
_log = logging.getLogger(__name__)


class PreflightServer(ServerConnections[msg.Message, msg.FromServer]):
    """The cluster preflight of one job, on the port that its nodes meet at; its verdict frees the port."""

    _hang_up_s = 2.0  # for the termination message

    def __init__(self, settings: ClusterSettings, endpoint: Endpoint, secret: bytes | None = None) -> None:
        super().__init__(
            *("cluster preflight", msg.parse, msg.render),
            endpoint=endpoint,
            nodes=settings.max_nodes,
            secret=secret,
            silence_s=_SILENCE_S,
            log=lambda text, level: _log.log(level, "%s", text),
        )
        self._settings = settings
        self._tick_at_s = 0.0

    def _begin(self) -> None:
        # To be read after its verdict.
        self.preflight = ClusterPreflight(self._settings, time.monotonic(), self._say, self._look)

    def _is_over(self) -> bool:
        return self.preflight.phase is PreflightPhase.OVER

    def _end(self, defect: str) -> None:
        if defect:  # a thread that dies in silence would blame node 0
            self.preflight.break_off(defect)

    def _due_s(self) -> float:
        return self._tick_at_s

    def _tick(self, now_s: float) -> None:
        self._tick_at_s = now_s + TICK_S
        self.preflight.tick(now_s)

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
        if isinstance(message, StatusQuery):
            self._send(peer, NOT_YET)
            self._close_after_flush(peer)
            return
        if not connection.is_greeted:
            if not isinstance(message, msg.Hello):
                raise MessageError("did not say first who it is")
            # A node that looks for a coordinator is told to wait, whatever its version.
            is_here = message.listens is not None
            refused = refused_version("node 0", msg.VERSION, message.version) if is_here else None
            if not self._is_admitted(connection, message, refused):
                return
            self._greeted(connection)
        if isinstance(message, msg.Time):
            now = time.time()
            self._send(peer, msg.TimeIs(message.sent, now, time.time()))
        self._events.append(lambda now_s: self.preflight.hear(peer, address, message, now_s))
