"""What happens to the job, as lines of the run's folder: the event log, `status` and rehearsals read them."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from trainer_launch.host import runtime_directory
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client, Disconnected, News


def tell(folder: str, event: str, **values: str | int | None) -> None:
    """Add a line; nobody is waited for, and a full disk is nobody's failure. Without a folder nobody is told."""
    if not folder:
        return
    with contextlib.suppress(OSError):
        line = json.dumps({"time_s": time.time(), "event": event, **values})
        runtime_directory.append(f"{folder}/{runtime_directory.NEWS}", line)


class TellingClient(Client):
    """A client of the coordinator; what it hears and says is told on."""

    def __init__(self, folder: str, *args: Any, **kwargs: Any) -> None:
        """Tell it in this folder; the rest is the client's."""
        self._folder = folder
        super().__init__(*args, **kwargs)

    def send(self, message: say.FromNode) -> None:
        """Send it, and tell of a failure."""
        if isinstance(message, say.Failed):
            tell(
                self._folder,
                "worker_failed",
                generation=message.generation,
                rank=message.rank,
                exit_code=message.exit_code,
                signal=message.signal,
                message=message.message or None,
            )
        super().send(message)

    def receive(self, timeout_s: float | None) -> News | None:
        """The next news, told on."""
        news = super().receive(timeout_s)
        match news:
            case say.Formed(generation=number, group_rank=rank, size=size, restarts=restarts):
                where = {"node_index": rank, "nodes": size}
                tell(self._folder, "generation_formed", generation=number, restarts=restarts, **where)
            case say.Restart(generation=number, reason=reason):
                tell(self._folder, "generation_ended", generation=number, reason=reason)
            case say.GiveUp(reason=reason):
                tell(self._folder, "given_up", reason=reason)
            case Disconnected(reason=reason):
                tell(self._folder, "coordinator_away", reason=reason)
        return news
