"""The hang watch of `run`: from settings to a watch over this node's workers."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable

from trainer_launch.host import process_tree
from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import Settings
from trainer_launch.planning.engines import torchrun
from trainer_launch.planning.engines.request import Request
from trainer_launch.supervisor.hang_detection import Rules
from trainer_launch.supervisor.hang_watch import Watch, Watched
from trainer_launch.supervisor.system import System
from trainer_launch.supervisor.worker_samples import Place, Sources, Workers

_LONGEST_S = 604_800.0
_log = logging.getLogger(__name__)


def watch(
    settings: Settings,
    request: Request,
    plan: Plan,
    system: System,
    place_of: Callable[[str], Place | None],
) -> Watch | None:
    """Watch what the plan starts; None where this machine does not show processes.

    Raises:
        UsageError: the timeout is neither seconds nor auto.
    """
    rules = Rules(timeout_s=seconds(settings.hang_timeout or "auto"), weak_signs=_works_here(request.job))
    if not process_tree.readable():
        _log.warning("--hang-timeout has no effect: /proc does not show this container's processes")
        return None
    sources = Sources(
        pids=system.pids,
        heard=system.heard,
        run_dir=request.scratch,
        progress_file=settings.progress_file,
        place_of=place_of,
        below_torchrun=plan.engine == torchrun.NAME,
    )
    nodes = request.topology.nodes
    watched = Watched(
        rules=rules,
        folder=settings.hang_dir or tempfile.gettempdir(),
        alone=nodes is not None and nodes.max == 1,
    )
    return Watch(watched, Workers(sources), system.now())


def seconds(text: str) -> float | None:
    """The timeout; None: to be learned.

    Raises:
        UsageError: it is neither seconds nor auto.
    """
    if text == "auto":
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 1 <= timeout_s <= _LONGEST_S:
        raise UsageError(
            f"invalid value {text!r} for --hang-timeout: expected seconds, 1 to {_LONGEST_S:.0f}, or auto"
        )
    return timeout_s


def _works_here(job: Job) -> bool:
    """Whether the work is done below us: what an MPI launcher starts and an MPI worker waits for is not."""
    return not ("mpi" in job.contract and job.role in ("launcher", "worker"))
