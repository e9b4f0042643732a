"""Tell PID 1 what it cannot see: generations, and workers that torch starts. Lines in the run's private folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from trainer_launch import run_folder
from trainer_launch.coordinator import protocol as say
from trainer_launch.coordinator.client import Client, Disconnected, News


def tell(event: str, **values: str | int | None) -> None:
    """Add a line; nobody is waited for, and a full disk is nobody's failure."""
    folder = os.environ.get(run_folder.VARIABLE)
    if not folder:
        return
    with contextlib.suppress(OSError):
        line = json.dumps({"time_s": time.time(), "event": event, **values})
        run_folder.append(f"{folder}/{run_folder.NEWS}", line)


def tell_start(envs: Mapping[int, Mapping[str, str]]) -> None:
    """Workers are about to start, with these environments by local rank."""
    ranks = sorted(int(env["RANK"]) for env in envs.values() if env.get("RANK", "").isdigit())
    first_rank = ranks[0] if ranks else None
    tell("workers_started", workers=len(envs), first_rank=first_rank)


class TellingClient(Client):
    """A client of the coordinator; what it hears and says is told on."""

    def send(self, message: say.FromNode) -> None:
        """Send it, and tell of a failure."""
        if isinstance(message, say.Failed):
            tell(
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
                tell("generation_formed", generation=number, node_index=rank, nodes=size, restarts=restarts)
            case say.Restart(generation=number, reason=reason):
                tell("generation_ended", generation=number, reason=reason)
            case say.GiveUp(reason=reason):
                tell("given_up", reason=reason)
            case Disconnected(reason=reason):
                tell("coordinator_away", reason=reason)
        return news
