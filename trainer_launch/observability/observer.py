"""Observe a run: keep the node's view, and pass events to the log, the metrics and the TrainJob status.

The supervisor's loop calls it and never waits: it notes values, writes one small file when something has changed,
and leaves the rest to threads, which exist only when an event log, an endpoint or a port was asked for. So does the
code: what nobody asked for is not loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_launch.contracts.trainer_status import StatusEndpoint
from trainer_launch.model import Outcome, Verdict
from trainer_launch.observability import node_view
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.state import State

if TYPE_CHECKING:
    from trainer_launch.observability import events, progress
    from trainer_launch.observability.event_writer import Teller
    from trainer_launch.observability.metrics_server import Server
    from trainer_launch.observability.trainjob_status import Poster

_PATIENCE_S = 2.0  # at the end, with whoever reads or listens; kubelet's own SIGKILL must not come first
_LAST_EXITS = 20


class Observer:
    """The observer of one run."""

    def __init__(self, view: node_view.View) -> None:
        self.view = view
        self._teller: Teller | None = None
        self._poster: Poster | None = None
        self._server: Server | None = None
        node_view.write(view)

    def latest(self) -> progress.Progress | None:
        """What the lowest rank of this node has reported last."""
        from trainer_launch.observability import progress

        return progress.first(progress.read(self.view.run_dir))

    def progress_and_age(self) -> tuple[float | None, float] | None:
        """The same for the coordinator's table: the part that is done, and how long ago that was said."""
        latest = self.latest()
        return None if latest is None else (latest.progress, max(0.0, time.monotonic() - latest.at_s))

    # -- who wants to know --------------------------------------------------------------------

    def write_events(self, write: Callable[[bytes], None], started: Mapping[str, events.Value]) -> None:
        """Tell everything to an event log, from now on."""
        from trainer_launch.observability.event_writer import Teller

        self._teller = Teller(write, self.view.run_dir, self.view.node_rank)
        self._teller.begin(started)

    def serve_metrics(self, port: int) -> None:
        """Answer Prometheus."""
        from trainer_launch.observability.metrics_server import Server

        self._server = Server(port, self.metrics)
        self._note(metrics_port=self._server.start())

    def post_to(self, endpoint: StatusEndpoint) -> None:
        """Post progress to the TrainJob's status."""
        from trainer_launch.observability.trainjob_status import Poster

        self._poster = Poster(endpoint, self.latest)
        self._poster.start()

    def metrics(self) -> str:
        """This node in Prometheus' words; called by the server's threads."""
        from trainer_launch.observability import progress, prometheus, runtime_events

        folder = self.view.run_dir
        clocks = {"now_s": time.time(), "at_s": time.monotonic()}
        return prometheus.text(self.view, runtime_events.standing(folder), progress.read(folder), **clocks)

    # -- what happens -------------------------------------------------------------------------

    def begun(self, state: State) -> None:
        """The plan is about to run."""
        if self._teller is not None:
            self._teller.begun(state)
        self._see(state)

    def stepped(self, event: ev.Event, before: State, after: State) -> None:
        """Something happened."""
        if self._teller is not None:
            self._teller.stepped(event, before, after)
        self._see(after)

    def spawned(self, process: str, pid: int) -> None:
        """A process was started."""
        if self._teller is not None:
            self._teller.spawned(process, pid)
        others = tuple(entry for entry in self.view.processes if entry[0] != process)
        self._note(processes=(*others, (process, pid)))

    def coordinator_said(self, text: str) -> None:
        """The coordinator that this node hosts said something; called by its thread."""
        teller = self._teller
        if teller is not None:
            teller.coordinator_said(text)

    def finished(self, outcome: Outcome) -> None:
        """The run is over: the termination message to everybody who asked, within a short time for all."""
        end_s = time.monotonic() + _PATIENCE_S
        if self._poster is not None:
            self._poster.close(_PATIENCE_S / 2, succeeded=outcome.verdict is Verdict.SUCCEEDED)
        self._end_story(max(0.1, end_s - time.monotonic()), outcome)
        self.close()

    def refused(self, message: str, code: int) -> None:
        """Nothing could be started."""
        if self._teller is not None:
            self._teller.refused(message, code)

    def close(self) -> None:
        """End the threads and give the port back; nothing after `finished`."""
        self._end_story(_PATIENCE_S, None)
        if self._server is not None:
            self._server.close()
            self._server = None

    def _end_story(self, wait_s: float, outcome: Outcome | None) -> None:
        teller, self._teller = self._teller, None
        if teller is not None:
            teller.close(wait_s, outcome)

    def _see(self, state: State) -> None:
        alive = tuple((name, pid) for name, pid in self.view.processes if name in state.alive)
        exits = tuple((end.process, end.exit_code) for end in state.exits[-_LAST_EXITS:])
        changed = state.phase.value != self.view.phase
        self._note(
            phase=state.phase.value,
            since_s=time.time() if changed else self.view.since_s,
            attempt=1 + state.restarts,
            processes=alive,
            exits=exits,
            ended=len(state.exits),
            asked_to_stop_by=state.stop_signal,
        )

    def _note(self, **changes: object) -> None:
        view = replace(self.view, **changes)  # type: ignore[arg-type]
        if view != self.view:
            self.view = view
            node_view.write(view)
