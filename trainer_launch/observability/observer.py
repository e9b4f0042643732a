"""Observe a run: keep the node's view, and pass events to the log, the metrics and the TrainJob status.

The supervisor's loop calls it and never waits: it notes values, writes one small file when something has changed,
and leaves the rest to threads, which exist only when an event log, an endpoint or a port was asked for. So does the
code: what nobody asked for is not loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.structs import replace

from trainer_launch import __version__
from trainer_launch.diagnosis.lateness import Lateness
from trainer_launch.host import process_tree
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.slow_files import within
from trainer_launch.model import Outcome, Plan, Verdict
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.redaction import redact_command
from trainer_launch.model.settings import Settings
from trainer_launch.observability import event_log, goodput, incident_watch, node_view, progress
from trainer_launch.observability.event_log import EventLog
from trainer_launch.observability.goodput import LedgerSummary
from trainer_launch.observability.goodput_keeper import GoodputKeeper
from trainer_launch.planning.task import Task
from trainer_launch.supervisor import inherited, outcome
from trainer_launch.supervisor.run_observer import RunObserver, RunPhase, StateKept, TimeKind
from trainer_launch.supervisor.system import System

if TYPE_CHECKING:
    from trainer_launch.observability.trainjob_status import Poster

_PATIENCE_S = 2.0  # at the end, with whoever reads or listens; kubelet's own SIGKILL must not come first
_LAST_EXITS = 20
_log = logging.getLogger(__name__)
STDOUT = "-"  # where events may go, in place of a file


class Observer(RunObserver):
    """The observer of one run."""

    def __init__(
        self, view: node_view.View, keeper: GoodputKeeper | None = None, termination_log: str | None = None
    ) -> None:
        self._termination_log = termination_log
        self.early = ""  # the termination message from a request to stop on
        self.view = view = view if keeper is None else replace(view, ledger=keeper.ledger)
        self.goodput = keeper  # None: what runs here trains nothing
        self.events: EventLog | None = None
        self.poster: Poster | None = None
        node_view.write(view)

    def latest(self) -> progress.Progress | None:
        """The last report of the lowest rank of this node."""
        return progress.first(event_log.reports(self.view.run_dir))

    def training(self) -> goodput.TrainingStatus:
        """The training as this node sees it, for the coordinator that it hosts."""
        latest, spent = self.latest(), None if self.goodput is None else self.goodput.totals()
        if latest is None:
            return goodput.TrainingStatus(goodput=spent)
        age_s = max(0.0, time.monotonic() - latest.at_s)
        return goodput.TrainingStatus(progress=latest.progress, progress_age_s=age_s, goodput=spent)

    def metrics(self) -> str:
        """The metrics of this node for Prometheus; called by the server's threads."""
        from trainer_launch.observability.metrics import metrics_text

        folder, now_s = self.view.run_dir, time.monotonic()
        spent = None if self.goodput is None else self.goodput.certain()
        return metrics_text(self.view, event_log.standing(folder), event_log.reports(folder), spent, now_s)

    def tell(self, event: str, **values: str | float | bool | tuple[str, ...] | None) -> None:
        """Something has happened, in the words of the event log."""
        self.tell_all(event, values)
        view, name = self.view, values.get("process")
        others = tuple(entry for entry in view.processes if entry[0] != name)
        match event, values:
            case "spawned", {"pid": int(pid)}:
                self.note(processes=(*others, (name, pid)))
            case "exited" | "spawn_failed", {"exit_code": code}:
                exits = (*view.exits, (name, code))[-_LAST_EXITS:]
                self.note(processes=others, exits=exits)
            case "restarting", {"restart": int(number)}:
                self.note(attempt=1 + number)
            case "state_kept", _:
                self.note(kept=convert(values, StateKept), times_kept=view.times_kept + 1)

    def enter(self, phase: RunPhase, use: TimeKind, since_s: float | None = None) -> None:
        """Where the run is from now on, and what its seconds are spent on."""
        if self.goodput is not None:
            self.goodput.enter(use, time.monotonic(), since_s)
            before, now = self.view.ledger, self.goodput.ledger
            trains_again = now.kind is TimeKind.TRAINING and now.has_trained
            if trains_again and (before is None or before.kind is not now.kind) and self.events is not None:
                self.tell_all("goodput", event_log.of_goodput(self.goodput.totals()))
            self.note(ledger=now)
        if phase.value != self.view.phase:
            self.note(phase=phase.value, since_s=time.time())

    def asked_to_stop(self, number: int) -> None:
        """A signal asks the run to stop, or says that nothing is to be started again."""
        if self._termination_log is not None and not self.view.asked_to_stop_by:  # we may be killed later
            view = self.view
            self.early = outcome.while_stopping(number, view.node_rank, view.host, time.time() - view.started_s)
            outcome.write_termination_message(self.early, self._termination_log)
        self.note(asked_to_stop_by=self.view.asked_to_stop_by or number)

    def look(self, collectives: int) -> None:
        """The workers have come so far."""
        if self.goodput is not None:
            self.goodput.look(collectives)

    def suspect(self) -> None:
        """A hang is suspected."""
        if self.goodput is not None:
            self.goodput.suspect()
            self.note(ledger=self.goodput.ledger)

    def adopt(self, notes: Mapping[str, Any]) -> None:
        """Take in the coordinator's notes of the job, by topic: what other nodes have spent their time on."""
        from trainer_launch.membership.notes import opened  # only a torch job needs it

        ledger = opened(LedgerSummary, notes.get(goodput.TRAINING), goodput.TRAINING)
        if self.goodput is not None and ledger is not None:
            self.goodput.adopt(ledger)

    def notes(self) -> Mapping[str, object]:
        """The notes for other nodes: what this node has spent its time on."""
        return {} if self.goodput is None else {goodput.TRAINING: self.goodput.summary()}

    def stragglers(self, ranks: Sequence[Lateness]) -> None:
        """Note which of this node's ranks are stragglers now."""
        self.note(stragglers=tuple(ranks))

    def coordinator_spoke(self, text: str) -> None:
        """The coordinator that this node hosts has said this; called by its thread."""
        self.tell_all("coordinator", {"text": text})

    def finished(self, ended: Outcome) -> None:
        """The run is over: the termination message to everybody who asked, within a short time for all."""
        patience_s = _PATIENCE_S / 2 if self.view.asked_to_stop_by else _PATIENCE_S
        end_s = time.monotonic() + patience_s
        if self.poster is not None:
            self.poster.close(patience_s / 2, succeeded=ended.verdict is Verdict.SUCCEEDED)
        if self.events is not None:
            self.events.end(max(0.1, end_s - time.monotonic()), event_log.of_outcome(ended))

    def tell_all(self, name: str, values: Mapping[str, event_log.Value]) -> None:
        """Add an event to the event log."""
        events = self.events
        if events is not None:
            events.add((name, values))

    def note(self, **changes: object) -> None:
        """Change the view of this node."""
        view = replace(self.view, **changes)
        if view != self.view:
            self.view = view
            node_view.write(view)


@contextlib.contextmanager
def observed(
    task: Task, plan: Plan, settings: Settings, system: System, keeper: GoodputKeeper | None = None
) -> Iterator[Observer]:
    """The observer of a run that is about to begin; without a keeper of its goodput it trains nothing."""
    observer = Observer(first_view(task, plan), keeper, settings.termination_log)
    with contextlib.ExitStack() as stack:
        if settings.events is not None:
            write: Callable[[bytes], None] = system.print
            if settings.events != STDOUT:
                write = stack.enter_context(contextlib.closing(event_log.File(settings.events))).write
            observer.events = EventLog(write, observer.view.node_rank, observer.view.run_dir)
            stack.callback(observer.events.end, _PATIENCE_S)
            observer.tell_all("started", _started(observer.view, task))
        if settings.metrics_port:
            from trainer_launch.observability.metrics import MetricsServer

            server = MetricsServer(settings.metrics_port, observer.metrics)
            observer.note(metrics_port=server.start())
            stack.callback(server.close)
        if task.job.status is not None and task.job.should_report_progress:
            from trainer_launch.observability.trainjob_status import Poster

            observer.poster = Poster(task.job.status, observer.latest)
            observer.poster.start()
        try:
            yield observer
        except LaunchError as problem:
            observer.tell("finished", verdict="NotStarted", exit_code=problem.exit_code, message=str(problem))
            raise


def first_view(task: Task, plan: Plan) -> node_view.View:
    """The launcher's state before the run starts."""
    me = process_tree.read(os.getpid())
    job, place = plan.meeting or (None, None)
    now_s = time.time()
    return node_view.View(
        version=__version__,
        pid=os.getpid(),
        started_ticks=me.started if me is not None else 0,
        run_dir=task.scratch,
        host=task.host.hostname,
        node_rank=task.topology.node_rank,
        contract=task.job.contract,
        engine=plan.engine,
        phase=RunPhase.WAITING.value,
        since_s=now_s,
        started_s=now_s,
        job=job,
        incident_dir=incident_watch.place_of(task.settings),
        secret_file=task.job.secret_file and os.path.abspath(task.job.secret_file),
        coordinator=None if place is None else (place.host, place.port),
    )


def _started(view: node_view.View, task: Task) -> dict[str, event_log.Value]:
    about = {name: getattr(view, name) for name in ("version", "pid", "host", "contract", "engine")}
    return {**about, "nodes": str(task.topology.nodes or ""), "command": redact_command(task.command.argv)}


def conclude(ended: Outcome, task: Task, settings: Settings, observer: Observer) -> Outcome:
    """Report how the run ended to the log, the termination message and the observer."""
    ended = outcome.placed(ended, task.topology.node_rank, task.host.hostname)
    lines = [outcome.summary(ended)]
    if ended.failure and ended.failure.hint:
        lines.append(f"what to do: {ended.failure.hint}")
    sentence = ""
    if observer.goodput is not None:
        spent = observer.goodput.totals(has_succeeded=ended.verdict is Verdict.SUCCEEDED)
        ended = replace(ended, spent_s={kind.value: seconds for kind, seconds in spent.items()})
        sentence = f"Goodput: {goodput.sentence(spent)}"
        lines.insert(0, f"goodput: {goodput.sentence(spent)}")
    if not _has_ended_below(observer, settings.termination_log):  # before the log, whose reader may hang
        outcome.write_termination_message(outcome.termination_message(ended, sentence), settings.termination_log)
    inherited.leave()
    for line in lines:
        _log.info("%s", line)
    observer.finished(ended)
    return ended


def _has_ended_below(observer: Observer, path: str) -> bool:
    """Whether a launcher that a shim started below this one has told its end: it knows the ranks."""
    if observer.view.engine != "plain":
        return False
    message = LiveFiles(outcome.TERMINATION_MESSAGE_BYTES).read(path) or b""
    if not message.startswith(b"reason=") or message == observer.early.encode(errors="replace"):
        return False
    with contextlib.suppress(OSError):
        return within(path, 0.0, lambda: os.stat(path).st_mtime) >= observer.view.started_s
    return False
