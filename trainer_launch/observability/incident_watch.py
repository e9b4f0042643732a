"""From the options to what watches a run for hangs and collects its incidents."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from trainer_launch.host import process_tree
from trainer_launch.model import Plan
from trainer_launch.model.collectives import RankState, Recorded
from trainer_launch.model.errors import UsageError
from trainer_launch.model.frozen import replace
from trainer_launch.model.settings import Settings, flag_of
from trainer_launch.planning.engines.request import Request
from trainer_launch.supervisor.incident_bundle import DEFAULT, NOWHERE
from trainer_launch.supervisor.system import System

if TYPE_CHECKING:
    from trainer_launch.supervisor.hang_watch import AnyCollector, Watch
    from trainer_launch.supervisor.incident_collection import Collected, Collector
    from trainer_launch.supervisor.worker_samples import Place, Sources

AUTO, OFF = "auto", "off"
_LONGEST_S = 604_800.0  # a hang's limit
_log = logging.getLogger(__name__)


class AnyGroup(Protocol):
    """Who knows the workers of a generation; a worker group is it."""

    def question(self, folder: str | None) -> int:
        """Ask all; the number of the question."""

    def answers(self, number: int, until_s: float) -> Mapping[str, Recorded]:
        """What they have answered in time, by process."""

    def how_far(self) -> Mapping[str, int]:
        """How many collectives each has entered and ended."""

    def answered(self, name: str) -> int:
        """Bytes that a worker has written to answer."""

    def place_of(self, name: str) -> Place | None:
        """Which worker a process is."""

    def ended(self) -> Sequence[RankState]:
        """Ranks without a process."""

    def generation(self) -> int:
        """The present one's number."""

    def tell_ranks(self, collected: Collected) -> None:
        """Have all nodes asked."""


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


def sources_of(
    settings: Settings,
    request: Request,
    plan: Plan,
    system: System,
    group: AnyGroup | None = None,
) -> Sources:
    """Where signs of life come from."""
    from trainer_launch.planning.engines import torchrun
    from trainer_launch.supervisor.worker_samples import Sources

    found = Sources(
        pids=system.pids,
        heard=system.heard,
        run_dir=request.scratch,
        progress_file=settings.progress_file,
        below_torchrun=plan.engine == torchrun.NAME,
    )
    if group is None:
        return found
    return replace(found, place_of=group.place_of, how_far=group.how_far, answered=group.answered)


def collector(
    settings: Settings,
    request: Request,
    plan: Plan,
    system: System,
    sources: Sources,
    group: AnyGroup | None = None,
) -> Collector | None:
    """What collects a run's incidents; None: nobody wants them."""
    place = place_of(settings)
    if place is None or not process_tree.readable():
        return None
    from trainer_launch.supervisor import incident_collection as collection
    from trainer_launch.supervisor.worker_samples import Workers

    about = collection.About(
        place=place,
        job="" if plan.membership is None else plan.membership.job,
        host=request.host.hostname,
        node_rank=request.topology.node_rank,
        env=plan.processes[0].env if plan.workers is None else plan.workers.env,
    )
    asked = collection.Sources(workers=Workers(replace(sources, how_far=dict)), last_lines=system.last_lines)
    if group is not None:
        asked = replace(
            asked,
            question=group.question,
            answers=group.answers,
            ended=group.ended,
            generation=group.generation,
        )
    return collection.Collector(about, asked)


def watch(
    settings: Settings,
    request: Request,
    system: System,
    sources: Sources,
    collects: AnyCollector | None = None,
    group: AnyGroup | None = None,
) -> Watch | None:
    """Watch the workers for hangs, where somebody wants that and this machine shows processes."""
    check(settings)
    reports = settings.hang_report_after != OFF and collects is not None and group is not None
    if settings.hang_timeout is None and not reports:
        return None
    if not process_tree.readable():
        if settings.hang_timeout is not None:
            _log.warning("--hang-timeout has no effect: /proc does not show this container's processes")
        return None
    from trainer_launch.supervisor.hang_detection import Rules
    from trainer_launch.supervisor.hang_watch import Watch, Watched
    from trainer_launch.supervisor.worker_samples import Workers

    job, nodes = request.job, request.topology.nodes
    # What an MPI launcher starts and an MPI worker waits for is not below us.
    works_here = not ("mpi" in job.contract and job.role in ("launcher", "worker"))

    def rules(name: str, text: str | None) -> Rules | None:
        return (
            None if text is None or text == OFF else Rules(timeout_s=seconds_of(name, text), weak_signs=works_here)
        )

    watched = Watched(
        rules=rules("hang_timeout", settings.hang_timeout),
        report=rules("hang_report_after", settings.hang_report_after) if reports else None,
        alone=nodes is not None and nodes.max == 1,
    )
    workers, now_s = Workers(sources), system.now()
    if group is None:
        return Watch(watched, workers, now_s, collects)
    return Watch(watched, workers, now_s, collects, group.tell_ranks)
