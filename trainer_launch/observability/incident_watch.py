"""From the options to what watches a run for hangs and collects its incidents."""

from __future__ import annotations

import logging
import tempfile
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainer_launch.host import process_tree
from trainer_launch.model import Failure, Outcome, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import Settings, flag_of
from trainer_launch.observability import progress
from trainer_launch.planning.task import Task
from trainer_launch.supervisor.incident_bundle import DEFAULT, FAILURE, NOWHERE
from trainer_launch.supervisor.system import System

if TYPE_CHECKING:
    from trainer_launch.pytorch.group_incidents import GroupIncidents
    from trainer_launch.supervisor.hang_watch import Watch
    from trainer_launch.supervisor.incident_collection import Collected, Collector
    from trainer_launch.supervisor.worker_samples import Sources

AUTO, OFF = "auto", "off"
_LONGEST_S = 604_800.0  # a hang's limit
_log = logging.getLogger(__name__)


def place_of(settings: Settings) -> str | None:
    """The folder of all incidents; None: nothing is collected."""
    if settings.incident_dir == NOWHERE:
        return None
    try:
        return settings.incident_dir or f"{tempfile.gettempdir()}/{DEFAULT}"
    except OSError:  # nothing may be written anywhere
        return None


def seconds_of(name: str, text: str) -> float | None:
    """A hang's limit; None: to be learned.

    Raises:
        UsageError: it is neither seconds nor auto.
    """
    if text == AUTO:
        return None
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 1 <= limit_s <= _LONGEST_S:
        words = "auto" if name == "hang_timeout" else "auto, or off"
        raise UsageError(
            f"invalid value {text!r} for {flag_of(name)}: expected seconds, 1 to {_LONGEST_S:.0f}, or {words}"
        )
    return limit_s


def check(settings: Settings) -> None:
    """Whether the options about hangs can be understood.

    Raises:
        UsageError: they cannot.
    """
    if settings.hang_timeout is not None:
        seconds_of("hang_timeout", settings.hang_timeout)
    if settings.hang_report_after != OFF:
        seconds_of("hang_report_after", settings.hang_report_after)


class Incidents:
    """What one run collects, and who watches it; each is made when it is first needed."""

    def __init__(
        self, settings: Settings, task: Task, plan: Plan, system: System, group: GroupIncidents | None = None
    ) -> None:
        self._settings, self._task, self._plan, self._system = settings, task, plan, system
        self._group = group

    @cached_property
    def _sources(self) -> Sources:
        from trainer_launch.supervisor.worker_samples import Sources

        group, system = self._group, self._system
        found = Sources(
            pids=system.pids,
            heard=system.heard,
            run_dir=self._task.trial.scratch,
            progress_file=self._settings.progress_file,
        )
        if group is None:
            return found
        return replace(
            found, place_of=group.group.place_of, how_far=group.recorders.how_far, answered=group.recorders.answered
        )

    @cached_property
    def collector(self) -> Collector | None:
        """What collects; None: nobody wants that, or this machine does not show processes."""
        place = place_of(self._settings)
        if place is None or not process_tree.readable():
            return None
        from trainer_launch.supervisor import incident_collection as collection
        from trainer_launch.supervisor.worker_samples import Workers

        task, plan, group = self._task, self._plan, self._group
        about = collection.About(
            place=place,
            is_default=not self._settings.incident_dir,
            job="" if plan.membership is None else plan.membership.job,
            host=task.host.hostname,
            node_rank=task.topology.node_rank,
            env=plan.processes[0].env if plan.workers is None else plan.workers.env,
            run_dir=task.trial.scratch,
        )
        workers = Workers(replace(self._sources, how_far=dict))
        asked = collection.Sources(workers=workers, last_lines=self._system.last_lines, is_group=group is not None)
        if group is not None:
            asked = replace(
                asked,
                question=group.recorders.question,
                answers=group.recorders.answers,
                ended=group.ended,
                generation=group.generation,
                saving=lambda: [one.pid for one in progress.read(task.trial.scratch) if one.checkpointing],
            )
        return collection.Collector(about, asked)

    def watch(self) -> Watch | None:
        """Watch the workers for hangs, where somebody wants that and this machine shows processes."""
        settings, group = self._settings, self._group
        check(settings)
        is_asked = group is not None or "hang_report_after" in settings.model_fields_set
        asks = settings.hang_report_after != OFF and is_asked
        if settings.hang_timeout is None and not asks:
            return None
        if not process_tree.readable():
            if settings.hang_timeout is not None:
                _log.warning("--hang-timeout has no effect: /proc does not show this container's processes")
            return None
        reports = asks and self.collector is not None
        if settings.hang_timeout is None and not reports:
            return None
        from trainer_launch.supervisor.hang_detection import UNLEARNED_S, Rules
        from trainer_launch.supervisor.hang_watch import Watch, Watched
        from trainer_launch.supervisor.worker_samples import Workers

        job, nodes = self._task.job, self._task.topology.nodes
        # What an MPI launcher starts and an MPI worker waits for is not below us.
        works_here = not ("mpi" in job.contract and job.role in ("launcher", "worker"))

        def rules(name: str, text: str | None, unlearned_s: float | None = None) -> Rules | None:
            if text is None or text == OFF:
                return None
            return Rules(timeout_s=seconds_of(name, text), unlearned_s=unlearned_s, weak_signs=works_here)

        # The coordinator does not accuse who is still before its first collective.
        late_s = None if group is None else UNLEARNED_S
        watched = Watched(
            rules=rules("hang_timeout", settings.hang_timeout),
            report=rules("hang_report_after", settings.hang_report_after, late_s) if reports else None,
            alone=nodes is not None and nodes.max == 1,
            explained=group is not None and self.collector is not None,
        )
        tell = self._warn if group is None else group.tell_ranks
        return Watch(watched, Workers(self._sources), self._system.now, self.collector, tell)

    def failed(self, failure: Failure, process: str) -> None:
        """A program has failed, and what it has started is still there."""
        if self.collector is not None:
            self.collector.collect(FAILURE, failure.message, names=(process,))

    def concluded(self, ended: Outcome) -> Outcome:
        """The run is over: an incident says of its end what the termination message says."""
        made = self.__dict__.get("collector")
        if made is not None and ended.failure is not None:
            made.concluded(ended.failure)
        if made is not None:
            made.close()
        return ended

    def _warn(self, collected: Collected) -> None:
        """There is no coordinator that could ask other nodes."""
        _log.warning("suspected hang: %s; collected in %s", collected.incident.sentence, collected.folder or "-")
        if self.collector is not None:
            self.collector.tell(collected)
