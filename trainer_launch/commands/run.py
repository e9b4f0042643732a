"""`run`, the ENTRYPOINT: read, plan, run to the end, say how it ended."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import UNKNOWN
from trainer_launch.host import logs
from trainer_launch.host.files import read_secret
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Outcome, Plan
from trainer_launch.model.errors import LaunchError, NotRunnableError
from trainer_launch.model.settings import Settings
from trainer_launch.observability import event_log, incident_watch
from trainer_launch.observability.observer import Observer, observed
from trainer_launch.observability.termination_message import conclude, refuse, use_color
from trainer_launch.planning import engines, programs
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.reading import live_pod, read
from trainer_launch.pytorch import early_fork_server
from trainer_launch.supervisor import outcome, shared_memory_care
from trainer_launch.supervisor.loop import supervise
from trainer_launch.supervisor.rate_limit import Flood
from trainer_launch.supervisor.system import System

if TYPE_CHECKING:
    pass

HELP = "run a training command (the container's ENTRYPOINT)"
ABOUT = (
    "COMMAND is a Python script, '-m MODULE', torchrun, mpirun, horovodrun, or any program. The launcher starts "
    "the workers and restarts them after failures."
)
EXAMPLES = """examples:
  trainer-launch run -- python train.py --lr 1e-3
  trainer-launch run -- torchrun --max-restarts=3 train.py
  trainer-launch run --nproc-per-node 4 -- -m my_package.train
  trainer-launch run --hang-timeout 600 -- train.py
  trainer-launch run --exec -- train.py     # replace the launcher with torchrun

exit codes:
  143    the pod was asked to stop (SIGTERM)
  138    the infrastructure failed: a node, a device, the network
  2      invalid options or variables (126, 127: the program cannot be started)
  other  the program's own
"""
_log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`run` has no options of its own."""


def main(parsed: Parsed) -> int:
    """The command."""
    return run(parsed.settings, parsed.argv, replace_launcher=parsed.settings.exec)


def run(settings: Settings, argv: Sequence[str], *, replace_launcher: bool) -> int:
    """Run `argv` in this pod; return the pod's exit code.

    Raises:
        LaunchError: nothing could be started.
    """
    try:
        return outcome.exit_code(to_the_end(settings, argv, replace_launcher=replace_launcher))
    except LaunchError as problem:
        refuse(problem, settings.termination_log)
        raise


def to_the_end(
    settings: Settings,
    argv: Sequence[str],
    *,
    replace_launcher: bool = False,
    adjust: Callable[[Plan], Plan] = lambda plan: plan,
) -> Outcome:
    """Run `argv` in this pod by an adjusted plan, and say how it ended.

    Raises:
        LaunchError: nothing could be started.
    """
    secret = None if settings.secret_file is None else read_secret(settings.secret_file)
    scratch = private_folder()
    try:
        if replace_launcher:
            _, plan = _planned(settings, argv, replace_launcher=True, scratch=scratch)
            shutil.rmtree(scratch, ignore_errors=True)  # nobody comes back to do it
            _become(plan)
        with shared_memory_care.kept_clean(scratch) as sweep:
            request, plan = _planned(settings, argv, replace_launcher=False, scratch=scratch)
            plan = adjust(plan)
            watched = settings.hang_timeout is not None  # output is a sign of life, so all of it has to be seen
            flood = Flood(lines_per_s=settings.output_limit, clock=time.monotonic)
            system = System(color=use_color(settings), watched=watched, flood=flood)
            system.clean = sweep
            logs.send_through(system.say)
            with contextlib.closing(system), observed(request, plan, settings, system) as observer:
                gc.enable()
                with _hosted(plan, secret, observer):
                    ended = _supervised(plan, system, settings, request, secret, observer)
                    sweep()
                ended = replace(ended, attempt=max(ended.attempt, event_log.starts(scratch)))
                return conclude(ended, request, settings, observer)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _supervised(
    plan: Plan, system: System, settings: Settings, request: Request, secret: bytes | None, observer: Observer
) -> Outcome:
    """Run the plan to its end."""
    if plan.workers is None:
        sources = incident_watch.sources_of(settings, request, plan, system)
        collector = (
            incident_watch.collector(settings, request, plan, system, sources) if settings.hang_timeout else None
        )
        with contextlib.closing(collector) if collector is not None else contextlib.nullcontext():
            return supervise(
                plan, system, incident_watch.watch(settings, request, system, sources, collector), observer
            )
    from trainer_launch.pytorch import group_loop  # only a torch job needs it

    def attach(group: group_loop.Group) -> None:
        sources = incident_watch.sources_of(settings, request, plan, system, group.incidents)
        found = incident_watch.collector(settings, request, plan, system, sources, group.incidents)
        group.incidents.collector = found
        group.watch = incident_watch.watch(settings, request, system, sources, found, group.incidents)

    return group_loop.run(plan, system, secret, attach, observer)


def _planned(
    settings: Settings, argv: Sequence[str], *, replace_launcher: bool, scratch: str
) -> tuple[Request, Plan]:
    """Read, make the machine ready, and plan."""
    reading = read(live_pod(argv), settings)
    memory = shared_memory_care.enlarged(reading, settings)
    refused = shared_memory_care.copies_are_refused(reading.job, reading.command)
    if reading.command is not None:
        programs.check(reading.command, reading.pod.env.get("PATH"))
    request = engines.request_of(
        reading,
        settings,
        shm_is_short=memory.is_short,
        copies_are_refused=refused,
        replace_launcher=replace_launcher,
        scratch=scratch,
    )
    plan = engines.plan(request)
    if plan.workers is None:
        early_fork_server.end()  # a server that nobody asks for
    programs.check_torch(plan.engine)
    programs.check_plug_in(plan)
    _tell(request, plan)
    if settings.state_dir is not None and not replace_launcher:
        from trainer_launch.preflight.container import resource_limits  # only who has a preflight needs the checks

        resource_limits.compare(settings.state_dir, reading, settings)
    return request, plan


@contextlib.contextmanager
def _hosted(plan: Plan, secret: bytes | None, observer: Observer) -> Iterator[None]:
    """Host the coordinator while the plan runs, when this is the node to do so."""
    if plan.hosting is None:
        yield
        return
    from trainer_launch.membership.server import serve  # only node 0 of a torch job needs it

    with serve(plan.hosting, secret, heard=observer.coordinator_said, progress=observer.progress_and_age):
        yield


def _tell(request: Request, plan: Plan) -> None:
    job, topology = request.job, request.topology
    for warning in (*job.warnings, *plan.warnings):
        _log.warning("%s", warning)
    _log.info(
        "contract=%s engine=%s node=%s/%s workers=%s coordinator=%s",
        job.contract,
        plan.engine,
        "?" if topology.node_rank is None else topology.node_rank,
        topology.nodes or "?",
        topology.local_world_size or "?",
        topology.coordinator or "-",
    )
    if job.contract == UNKNOWN.name and request.command.is_worker and plan.engine == "plain":
        _log.info(
            "no platform was found: running one process without RANK and WORLD_SIZE; "
            "for torch workers add --nproc-per-node N"
        )


def _become(plan: Plan) -> NoReturn:
    """Replace this process; nothing of ours stays in the pod."""
    process = plan.processes[0]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(process.argv[0], process.argv, dict(process.env))
    except OSError as problem:
        found = not isinstance(problem, FileNotFoundError)
        raise NotRunnableError(f"cannot execute {process.argv[0]!r}: {problem.strerror}", found=found) from None
