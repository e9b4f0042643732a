"""How workers of this node die, where torch names them, and what the others are told of a death."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from trainer_launch import exits
from trainer_launch.coordinator import protocol as say
from trainer_launch.supervisor.symptoms import error_name

HowItDied = tuple[int | None, int | None] | None  # (code, None) or (None, signal); None: torch was faster than we


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """How the first worker of this node failed, as far as it is known."""

    rank: int | None = None  # in the job
    local_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None  # what it said itself, in torch's error file
    lines: tuple[str, ...] = ()  # its traceback, likewise
    reason: str | None = None  # where more is known than how it ended

    @property
    def code(self) -> int:
        """The exit code that says it."""
        return exits.of_signal(self.signal) if self.signal is not None else self.exit_code or exits.FAILED

    def failed(self, generation: int) -> say.Failed:
        """Tell it to the coordinator, which decides whether to start again can help."""
        said = self.message or ""
        return say.Failed(generation, self.rank, self.exit_code, self.signal, said, error_name(said))


def how_it_died(pid: int) -> HowItDied:
    """How a child died, left for torch to collect; it only calls `os`."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return (ended.si_status, None) if ended.si_code == os.CLD_EXITED else (None, ended.si_status)


class Starts(logging.Handler):
    """Tells pid, rank and local rank of each worker that torch starts: torch's own events say it."""

    def __init__(self, destination: str, started: Callable[[int, int, int], None]) -> None:
        super().__init__()
        self._started = started
        self._events = logging.getLogger(f"torchelastic-events-{destination}")
        self._events.addHandler(self)

    def close(self) -> None:
        """Listen to torch no more."""
        self._events.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """One event of torch's."""
        event = json.loads(record.getMessage())
        about = event.get("metadata", {})
        if event.get("name", "").endswith(".START") and str(about.get("worker_id", "")).isdigit():
            local_rank = json.loads(about["metadata"])["local_rank"][0]
            self._started(int(about["worker_id"]), int(about["global_rank"]), int(local_rank))
