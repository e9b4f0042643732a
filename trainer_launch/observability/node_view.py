"""A launcher's view of its node, in a file of its runtime directory: `status` reads it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from trainer_launch.host import process_tree, runtime_directory
from trainer_launch.host.files import LiveFiles
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass

_MAX_BYTES = 262_144
_MOST = 10**15  # of any number in it


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A launcher's own state; times in seconds since the epoch."""

    version: str
    pid: int
    started_ticks: int  # of the process, as /proc has it: tells it from a later one with its number
    run_dir: str
    host: str
    node_rank: int | None
    contract: str
    engine: str
    phase: str
    since_s: float  # in this phase
    started_s: float
    attempt: int = 1
    processes: tuple[tuple[str, int], ...] = ()  # name and pid of those that run
    exits: tuple[tuple[str, int], ...] = ()  # name and exit code of the last that ended
    ended: int = 0  # how many have, so far
    asked_to_stop_by: int | None = None
    job: str | None = None  # the job's name at its coordinator
    coordinator: tuple[str, int] | None = None  # host and port
    seats: tuple[tuple[str, int], ...] = ()  # where else it may be, when node 0 is gone
    secret_file: str | None = None  # where the job's secret is, which the coordinator may ask for
    metrics_port: int | None = None


def write(view: View) -> None:
    """Replace the file; a full disk does not stop the job."""
    with contextlib.suppress(OSError):
        runtime_directory.replace(f"{view.run_dir}/{runtime_directory.LAUNCHER}", asdict(view))


def read(folder: str) -> View | None:
    """The view of a launcher that is alive, None when there is none."""
    text = LiveFiles(_MAX_BYTES).read(f"{folder}/{runtime_directory.LAUNCHER}")
    try:
        values = json.loads(text or b"")
        values.update({name: tuple(map(tuple, values[name])) for name in ("processes", "exits")})
        place, seats = values["coordinator"], values["seats"]
        values["coordinator"] = None if place is None else (str(place[0]), int(place[1]))
        values["seats"] = tuple((str(host), int(port)) for host, port in seats)
        view = View(**values)
        _check(view)
        entry = process_tree.read(view.pid)
    except MALFORMED:
        return None
    alive = entry is not None and entry.started == view.started_ticks and entry.state not in "ZX"
    return view if alive else None


def _check(view: View) -> None:
    """Anybody may write such a file; what is shown of it and counted with has to be what we would write."""
    named = (*view.processes, *view.exits, *view.seats, *filter(None, (view.coordinator,)))
    texts = (view.version, view.run_dir, view.host, view.contract, view.engine, view.phase)
    wholes = (view.pid, view.started_ticks, view.attempt, view.ended, *(number for _, number in named))
    for text in (*texts, view.job or "", view.secret_file or "", *(name for name, _ in named)):
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"{text!r} is no text for a terminal")
    for whole in (*wholes, view.node_rank or 0, view.asked_to_stop_by or 0, view.metrics_port or 0):
        if type(whole) is not int or abs(whole) > _MOST:
            raise ValueError(f"{whole!r} is no whole number")
    if not all(0 <= float(time_s) < _MOST for time_s in (view.since_s, view.started_s)):
        raise ValueError("it is of no time")


def find(folders: Sequence[str] | None = None) -> tuple[View, ...]:
    """Every launcher that runs in this container, as far as we may read, by node and pid."""
    views = [read(path) for folder in folders or _folders() for path in _runs(folder)]
    found = {view.pid: view for view in views if view is not None}
    return tuple(sorted(found.values(), key=lambda v: (v.node_rank is None, v.node_rank or 0, v.pid)))


def _folders() -> tuple[str, ...]:
    """Where a launcher with our environment makes its folder."""
    try:
        own = tempfile.gettempdir()
    except OSError:  # nothing may be written but shared memory
        own = runtime_directory.SHM
    return tuple(dict.fromkeys((own, "/tmp", "/var/tmp", runtime_directory.SHM)))


def _runs(folder: str) -> Iterator[str]:
    """Folders of runs; another user's might say anything, so only root looks at those."""
    me = os.geteuid()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_run = entry.name.startswith(runtime_directory.START) and entry.is_dir(follow_symlinks=False)
                if is_run and me in (0, entry.stat(follow_symlinks=False).st_uid):
                    yield entry.path
