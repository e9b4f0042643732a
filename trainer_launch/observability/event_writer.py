"""Write a run's events to the event log: the supervisor's, warnings, and what the runtime directory shows."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from trainer_launch.host import logs as our_log
from trainer_launch.model import Outcome
from trainer_launch.observability import events, progress, runtime_events
from trainer_launch.observability.event_log import Journal
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.state import State

PROGRESS_S = 10.0  # between two lines of progress


class Teller:
    """Turns what happens into events; never waits."""

    def __init__(self, write: Callable[[bytes], None], folder: str, node_rank: int | None) -> None:
        self._journal = Journal(write, node_rank, _Look(folder).news)
        self._open = contextlib.ExitStack()

    def begin(self, started: Mapping[str, events.Value]) -> None:
        """The first line, and from now on every warning."""
        self._journal.add(("started", started))
        warnings = _Warnings(self._journal)
        logger = logging.getLogger(our_log.NAME)
        logger.addHandler(warnings)
        self._open.callback(logger.removeHandler, warnings)

    def begun(self, state: State) -> None:
        """The plan is about to run."""
        if state.plan.wait_for:
            self._journal.add(("waiting", {"names": state.plan.wait_for}))

    def stepped(self, event: ev.Event, before: State, after: State) -> None:
        """Something happened."""
        for told in events.of_step(event, before, after):
            self._journal.add(told)

    def spawned(self, process: str, pid: int) -> None:
        """A process was started."""
        self._journal.add(("spawned", {"process": process, "pid": pid}))

    def coordinator_said(self, text: str) -> None:
        """The coordinator that this node hosts said something."""
        self._journal.add(("coordinator", {"text": text}))

    def refused(self, message: str, code: int) -> None:
        """Nothing could be started: the last line."""
        self._journal.add(("finished", {"verdict": "NotStarted", "exit_code": code, "message": message}))

    def close(self, wait_s: float, outcome: Outcome | None) -> None:
        """Write what is left, and how the run ended if it did."""
        self._open.close()
        self._journal.close(wait_s, None if outcome is None else events.of_outcome(outcome))


class _Look:
    """What training processes and the worker group have left in the run's folder since the last look."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tail = runtime_events.Tail(folder)
        self._told_at_s = -PROGRESS_S
        self._told: progress.Progress | None = None

    def news(self, is_last: bool) -> list[runtime_events.News]:
        told = self._tail.read()
        latest = progress.first(progress.read(self._folder))
        if latest is None or latest == self._told:
            return told
        if is_last or time.monotonic() >= self._told_at_s + PROGRESS_S:
            self._told, self._told_at_s = latest, time.monotonic()
            told.append(runtime_events.News(latest.time_s, events.of_progress(latest)))
        return told


class _Warnings(logging.Handler):
    """What the launcher itself warns of."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self._journal.add(("warning", {"text": record.getMessage()}))
