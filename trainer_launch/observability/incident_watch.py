"""From the options to what watches a run for hangs and collects its incidents."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from trainer_launch.diagnosis.incident_bundle import DEFAULT, FAILURE, NOWHERE, REQUEST
from trainer_launch.host import process_tree, runtime_directory
from trainer_launch.model import Failure, Outcome
from trainer_launch.model.settings import Settings
from trainer_launch.observability import progress
from trainer_launch.planning.task import Task
from trainer_launch.supervisor.processes import Processes

if TYPE_CHECKING:
    from trainer_launch.diagnosis.hang_watch import Watch
    from trainer_launch.diagnosis.incident_collection import Collected, Collector
    from trainer_launch.diagnosis.worker_samples import WatchedWorkers
    from trainer_launch.pytorch.worker_group import WorkerGroup

OFF = "off"
_REST_S = 5.0  # between two requests that are heard
_log = logging.getLogger(__name__)


def place_of(settings: Settings) -> str | None:
    """The folder of all incidents, for processes in any directory; None: nothing is collected."""
    if settings.incident_dir == NOWHERE:
        return None
    try:
        return os.path.abspath(settings.incident_dir or f"{tempfile.gettempdir()}/{DEFAULT}")
    except OSError:  # nothing may be written anywhere
        return None


class Incidents:
    """The collector and the watch of a run; each is made when it is first needed."""

    def __init__(self, task: Task, processes: Processes, group: WorkerGroup | None = None) -> None:
        self._settings, self._task, self._processes, self._group = task.settings, task, processes, group
        self._plan, self._system, self._observer = processes.plan, processes.system, processes.observer
        self._requests, self._heard_s = -1, -_REST_S

    @cached_property
    def _workers(self) -> WatchedWorkers:
        from trainer_launch.diagnosis.worker_samples import WatchedWorkers

        return WatchedWorkers(self._processes.pids, self._system.heard, self._task.scratch, self._group)

    @cached_property
    def collector(self) -> Collector | None:
        """The collector; None: nobody wants one, or this machine does not show processes."""
        place = place_of(self._settings)
        if place is None or not process_tree.readable():
            return None
        from trainer_launch.diagnosis.incident_collection import About, Collector

        task, plan = self._task, self._plan
        about = About(
            place=place,
            is_default=not self._settings.incident_dir,
            job="" if plan.membership is None else plan.membership.job,
            host=task.host.hostname,
            node_rank=task.topology.node_rank,
            env=plan.processes[0].env if plan.workers is None else plan.workers.env,
            run_dir=task.scratch,
        )
        return Collector(about, self._workers, self._system.last_lines, self._group, self._saving)

    def _saving(self) -> list[int]:
        """The pids of processes that have reported a checkpoint."""
        return [report.pid for report in progress.read(self._task.scratch) if report.checkpointing]

    def watch(self, tell_ranks: Callable[[Collected], None] | None = None) -> Watch | None:
        """Watch the workers for hangs, where somebody wants that and this machine shows processes.

        `tell_ranks` tells a coordinator what was collected, which asks all nodes.
        """
        settings, group = self._settings, self._group
        is_ended = settings.hang_timeout is not None
        is_default = "hang_report_after" not in settings.model_fields_set
        if is_ended and not process_tree.readable():
            _log.warning("--hang-timeout has no effect: /proc does not show this container's processes")
            return None
        asks = settings.hang_report_after != OFF and not (group is None and is_default)
        reports = asks and self.collector is not None
        if not is_ended and not reports:
            return None
        from trainer_launch.diagnosis.hang_detection import UNLEARNED_S, Rules
        from trainer_launch.diagnosis.hang_watch import Watch, Watched

        job, nodes = self._task.job, self._task.topology.nodes
        # What an MPI launcher starts and an MPI worker waits for is not below us.
        works_here = not ("mpi" in job.contract and job.role in ("launcher", "worker"))

        def rules(limit: float | str | None, unlearned_s: float | None = None) -> Rules:
            timeout_s = limit if isinstance(limit, float) else None
            return Rules(timeout_s=timeout_s, unlearned_s=unlearned_s, weak_signs=works_here)

        # The coordinator does not accuse who is still before its first collective.
        late_s = None if group is None else UNLEARNED_S
        watched = Watched(
            rules=rules(settings.hang_timeout) if is_ended else None,
            report=rules(settings.hang_report_after, late_s) if reports else None,
            alone=nodes is not None and nodes.max == 1,
            explained=group is not None and self.collector is not None,
        )
        return Watch(watched, self._workers, self._system.now, self.collector, tell_ranks or self._warn)

    def hear_requests(self, collect: Callable[[], None] | None = None) -> None:
        """From now on collect when `incidents collect` asks for it; `collect` has all nodes collect."""

        def woken() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._requests, 4096)
                if self._processes.pids() and self._system.now() >= self._heard_s + _REST_S:
                    (collect or self._collect)()
                    self._heard_s = self._system.now()

        if place_of(self._settings) is None or not process_tree.readable():
            return
        with contextlib.suppress(OSError):
            self._requests = runtime_directory.hear_requests(self._task.scratch)
            self._system.listen(self._requests)
            self._system.woken = woken

    def _collect(self) -> None:
        if self.collector is not None:
            self.collector.tell(self.collector.collect(REQUEST, "collected on request"))

    def failed(self, failure: Failure, process: str) -> None:
        """A program has failed, and what it has started is still there."""
        if self.collector is not None and self.collector.announced_hang(failure.message) is None:
            self.collector.collect(FAILURE, failure.message, names=(process,))

    def concluded(self, ended: Outcome) -> Outcome:
        """The run is over: an incident says of its end what the termination message says."""
        if self._requests >= 0:
            self._system.listen(self._requests, wanted=False)
            os.close(self._requests)
        made = self.__dict__.get("collector")
        if made is not None and ended.failure is not None:
            made.concluded(ended.failure)
        if made is not None:
            made.close()
        return ended

    def _warn(self, collected: Collected) -> None:
        """There is no coordinator that could ask other nodes."""
        _log.warning("suspected hang: %s; collected in %s", collected.incident.sentence, collected.folder or "-")
        self._observer.suspect()
        if self.collector is not None:
            self.collector.tell(collected)
