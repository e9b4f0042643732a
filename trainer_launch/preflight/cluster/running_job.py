"""Whether an elastic job is at work without node 0, at another seat: a pod made again then only rejoins it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from trainer_launch.membership import status_query
from trainer_launch.model import Endpoint, NodeRange
from trainer_launch.model.errors import NodeError
from trainer_launch.preflight.cluster.node_names import Names

_MAX_SEATS = 8  # that are asked: the job goes on at the first that is left
_PAUSE_S = 1.0  # before each is asked
_ANSWER_S = 1.0


class Lookout:
    """A daemon thread that asks one seat after the other until `stop`; `found` is called with who is at work."""

    def __init__(
        self, seats: Sequence[Endpoint], job: str, secret: bytes | None, found: Callable[[str], None]
    ) -> None:
        self._seats, self._job, self._secret, self._found = seats, job, secret, found
        self._over = threading.Event()
        if seats:
            threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def stop(self) -> None:
        """Ask nobody any more."""
        self._over.set()

    def _run(self) -> None:
        while True:
            for seat in self._seats:
                if self._over.wait(_PAUSE_S):
                    return None
                if self._is_at_work(seat):
                    return self._found(seat.host)

    def _is_at_work(self, seat: Endpoint) -> bool:
        """A standby of a job that has not begun answers, too."""
        try:
            told = status_query.ask(seat, self._job, self._secret, _ANSWER_S)
        except NodeError:
            return False
        return told.generation > 0 and told.end is None


def seats(names: Names, nodes: NodeRange, own_rank: int) -> list[Endpoint]:
    """Where the job may be at work without node 0; nowhere, where it needs all nodes."""
    others = [rank for rank in range(1, min(nodes.max, _MAX_SEATS)) if rank != own_rank]
    places = [names.place(rank) for rank in others] if nodes.min < nodes.max else []
    return [place for place in places if place is not None]
