"""Set up the observer of a run, as the settings and the contract ask."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from trainer_launch import __version__
from trainer_launch.contracts.trainer_status import endpoint_of
from trainer_launch.host import process_tree
from trainer_launch.model import Endpoint, Plan
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.redaction import redact_command
from trainer_launch.model.settings import Settings
from trainer_launch.observability import node_view
from trainer_launch.observability.observer import Observer
from trainer_launch.planning.engines.request import Request
from trainer_launch.supervisor.state import Phase
from trainer_launch.supervisor.system import System

STDOUT = "-"
_MAX_SEATS = 8  # that are asked: the job goes on at the first that is left


@contextlib.contextmanager
def observed(request: Request, plan: Plan, settings: Settings, system: System) -> Iterator[Observer]:
    """The observer of a run that is about to begin."""
    observer = Observer(view(request, plan))
    with contextlib.ExitStack() as stack:
        if settings.events == STDOUT:
            observer.write_events(system.print, _started(observer.view, request))
        elif settings.events is not None:
            from trainer_launch.observability.event_log import File

            file = stack.enter_context(contextlib.closing(File(settings.events)))
            observer.write_events(file.write, _started(observer.view, request))
        stack.callback(observer.close)
        if settings.metrics_port:
            observer.serve_metrics(settings.metrics_port)
        endpoint = endpoint_of(request.job)
        if endpoint is not None:
            observer.post_to(endpoint)
        try:
            yield observer
        except LaunchError as problem:
            observer.refused(str(problem), problem.exit_code)
            raise


def view(request: Request, plan: Plan) -> node_view.View:
    """The launcher's state before the run starts."""
    me = process_tree.read(os.getpid())
    job, place = plan.meeting or (None, None)
    now_s = time.time()
    return node_view.View(
        version=__version__,
        pid=os.getpid(),
        started_ticks=me.started if me is not None else 0,
        run_dir=request.scratch,
        host=request.host.hostname,
        node_rank=request.topology.node_rank,
        contract=request.job.contract,
        engine=plan.engine,
        phase=Phase.WAITING.value,
        since_s=now_s,
        started_s=now_s,
        job=job,
        secret_file=None if request.secret_file is None else os.path.abspath(request.secret_file),
        coordinator=None if place is None else (place.host, place.port),
        seats=_seats(plan),
    )


def _seats(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Where an elastic job's coordinator may be without node 0; this node's own name may not resolve."""
    seats = None if plan.hosting is None else plan.hosting.seats
    if plan.hosting is None or seats is None:
        return ()
    own = Endpoint("localhost", seats.home.port)
    ranks = range(1, min(seats.count, _MAX_SEATS))
    places = [own if rank == plan.hosting.seat else seats.endpoint(rank) for rank in ranks]
    return tuple((place.host, place.port) for place in places)


def _started(about: node_view.View, request: Request) -> dict[str, str | int | tuple[str, ...]]:
    """The first line of the event log."""
    return {
        "version": about.version,
        "pid": about.pid,
        "host": about.host,
        "contract": about.contract,
        "engine": about.engine,
        "nodes": str(request.topology.nodes or ""),
        "command": redact_command(request.command.argv),
    }
