"""A launcher's view of its node, in a file of its runtime directory: `status` reads it."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.lateness import Lateness
from trainer_launch.host import files, process_tree, runtime_directory
from trainer_launch.host.slow_files import within
from trainer_launch.model import codec
from trainer_launch.model.codec import MAX_TEXT, Count, Port, Seconds, Text, Whole
from trainer_launch.observability.goodput import Ledger
from trainer_launch.supervisor.run_observer import StateKept

_MAX_BYTES = 262_144
_NONE: list[str] = []
_Place: TypeAlias = tuple[Text, Port]


class View(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A launcher's own state; times in seconds since the epoch. Anybody may write such a file to /tmp."""

    version: Text
    pid: Count
    started_ticks: Count  # of the process, as /proc has it: tells it from a later one with its number
    run_dir: Text
    host: Text
    node_rank: Count | None
    contract: Text
    engine: Text
    phase: Text
    since_s: Seconds  # in this phase
    started_s: Seconds
    attempt: Count = 1
    processes: tuple[tuple[Text, Count], ...] = ()  # name and pid of those that run
    exits: tuple[tuple[Text, Whole], ...] = ()  # name and exit code of the last that ended
    asked_to_stop_by: Count | None = None
    job: Text | None = None  # the job's name at its coordinator
    coordinator: _Place | None = None  # host and port; elsewhere when node 0 is gone
    secret_file: Text | None = None  # where the job's secret is, which the coordinator may ask for
    incident_dir: Text | None = None  # where all incidents are; None: nothing is collected
    metrics_port: Count | None = None
    ledger: Ledger | None = None  # of the goodput; None: it trains nothing
    stragglers: tuple[Lateness, ...] = ()  # of this node's ranks
    kept: StateKept | None = None  # the last time
    times_kept: Count = 0  # that surviving ranks kept their state


def write(view: View) -> None:
    """Replace the file; a full disk does not stop the job."""
    with contextlib.suppress(OSError):
        files.replace(f"{view.run_dir}/{runtime_directory.LAUNCHER}", codec.encode(view, MAX_TEXT))


def read(folder: str, pids: Mapping[int, int] | None = None) -> View | None:
    """The view of a launcher that is alive, None when there is none; `pids` as `find` has it."""
    view = written_in(folder)
    if view is None:
        return None
    if pids is not None:
        processes = tuple((name, pids[pid]) for name, pid in view.processes if pid in pids)
        view = replace(view, pid=pids.get(view.pid, 0), processes=processes)
    entry = process_tree.read(view.pid)
    alive = entry is not None and entry.started == view.started_ticks and entry.state not in "ZX"
    return view if alive else None


def written_in(folder: str) -> View | None:
    """The view that a launcher, which may have ended, has written there."""
    return codec.decoded(View, files.read(f"{folder}/{runtime_directory.LAUNCHER}", _MAX_BYTES), _MAX_BYTES)


def hearing() -> list[View]:
    """Launchers that hear requests, in the first temporary directory that has any; also in a rehearsal's pods."""
    for folder in _folders():
        pods = glob.glob(f"{glob.escape(folder)}/{runtime_directory.START}rehearsal-*/*/tmp")
        paths = [path for place in (folder, *pods) for path in within(place, _NONE, _runs, place)]
        views = [view for path in paths if (view := written_in(path)) is not None]
        if answering := [view for view in views if runtime_directory.request(view.run_dir, b"")]:
            return sorted(answering, key=_by_node)
    return []


def find(folders: Sequence[str] | None = None, pids: Mapping[int, int] | None = None) -> tuple[View, ...]:
    """Every launcher that runs in this container, as far as we may read, by node and pid.

    With `pids` the launchers are in another PID namespace: it has our numbers of their processes by those there.
    """
    paths = [path for folder in folders or _folders() for path in within(folder, _NONE, _runs, folder)]
    views = [read(path, pids) for path in paths]
    alive = {view.pid: view for view in views if view is not None}
    return tuple(sorted(alive.values(), key=_by_node))


def _by_node(view: View) -> tuple[bool, int, int]:
    return view.node_rank is None, view.node_rank or 0, view.pid


def _folders() -> tuple[str, ...]:
    """Where a launcher with our environment makes its folder."""
    try:
        own = tempfile.gettempdir()
    except OSError:  # nothing may be written but shared memory
        own = runtime_directory.SHM
    return tuple(dict.fromkeys((own, "/tmp", "/var/tmp", runtime_directory.SHM)))


def _runs(folder: str) -> list[str]:
    """Folders of runs; another user's might say anything, so only root looks at those."""
    me, paths = os.geteuid(), []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_run = entry.name.startswith(runtime_directory.START) and entry.is_dir(follow_symlinks=False)
                if is_run and me in (0, entry.stat(follow_symlinks=False).st_uid):
                    paths.append(entry.path)
    return paths
