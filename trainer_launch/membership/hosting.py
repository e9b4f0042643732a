"""Host the coordinator in this process while a plan runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from trainer_launch.membership.server import Server
from trainer_launch.membership.socket_options import NO_ROOM, make_room
from trainer_launch.membership.state import Progress, Settings
from trainer_launch.model import Endpoint, Hosting
from trainer_launch.model.errors import NodeError

_log = logging.getLogger(__name__)


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
        seat=None if hosting.seats is None else hosting.seat,
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
