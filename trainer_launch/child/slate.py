"""A clean slate before torch's agent starts its workers again: nothing of the dead ones is left to disturb the new.

A worker's own children that outlive it (data loaders, daemons, whatever left its session) become children of the
launcher, which is PID 1 or a sub-reaper. They are told from others by the mark that all which the agent starts
inherits: this run's private folder, in the environment that they were started with. That holds for forked workers
too, because their server was started by the agent. What is below the agent itself is left alone: Python's
fork-server and resource tracker, what a thread of the agent may run. So is what carries no mark: somebody's
`kubectl exec`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable

from trainer_launch import run_folder
from trainer_launch.child import gpu_holders, places
from trainer_launch.errors import MALFORMED
from trainer_launch.host import leftovers, tree
from trainer_launch.host.files import LiveFiles
from trainer_launch.sizes import counted

TERM_S = 1.0  # to end politely: whoever they worked for is dead
KILL_S = 2.0  # until those that SIGKILL does not end are named
_LOOK_S = 0.005
_MAX_BYTES = 16_777_216  # of the list of what was there before
_log = logging.getLogger(__name__)


class Slate:
    """Cleans from the second start on; before the first one there is only the launcher's own word."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._is_first = True
        self._gpus = gpu_holders.Watch()

    def __call__(self, _envs: object = None) -> None:
        """End processes, remove shared memory and error files, name who else holds GPUs' memory."""
        if self._run_dir:
            places.forget_attempts(run_folder.errors_in(self._run_dir))
        if self._run_dir and not self._is_first:
            end_leftovers(self._run_dir)
            self._sweep()
        self._gpus.tell(is_first=self._is_first)
        self._is_first = False

    def _sweep(self) -> None:
        before = lay_before(LiveFiles(_MAX_BYTES).read(f"{self._run_dir}/{run_folder.SHM_BEFORE}") or b"")
        if before is None:
            return  # without knowing what was there before us nothing is ours
        removed = leftovers.sweep(before)
        if removed.count:
            _log.info("%s", removed)


def lay_before(data: bytes) -> list[leftovers.Key] | None:
    """The shared memory that PID 1 found when the run began; None: nobody knows."""
    try:
        return [(str(name), int(inode)) for name, inode in json.loads(data)["before"]]
    except MALFORMED:
        return None


def end_leftovers(run_dir: str) -> None:
    """End what dead workers have left running; within seconds, whatever it does."""
    count, stuck = end_all(lambda: left_running(run_dir))
    if count:
        _log.info("ended %s left running by dead workers", counted(count, "process"))
    for entry in stuck:
        _log.warning("SIGKILL did not end %s, which a dead worker left running", entry)


def left_running(run_dir: str) -> list[tree.Entry]:
    """Everything below the launcher that carries the mark of this run and is neither the agent nor below it."""
    me = os.getpid()
    if not tree.readable():
        return []
    found = tree.descendants(os.getppid())
    if len(found) == 1:
        return []  # only this agent
    ours = _below(me, found)
    return [entry for entry in found if entry.pid not in ours and _carries(run_dir, entry.pid)]


def end_all(find: Callable[[], Iterable[tree.Entry]]) -> tuple[int, list[tree.Entry]]:
    """Ask all that `find` finds to end, then kill them, until it finds none; how many, and who is still there."""
    told: dict[tuple[int, int], float] = {}
    end_s = time.monotonic() + TERM_S + KILL_S
    while True:
        alive, now_s = list(find()), time.monotonic()
        if not alive or now_s > end_s:
            return len(told), alive
        for entry in alive:
            if entry.key not in told:
                told[entry.key] = now_s
                _send(entry, signal.SIGTERM)
            elif now_s > told[entry.key] + TERM_S:
                _send(entry, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _send(entry: tree.Entry, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(entry.pid, number)
        if entry.state == "T":
            os.kill(entry.pid, signal.SIGCONT)  # suspended: it could not hear us


def _below(pid: int, entries: Iterable[tree.Entry]) -> set[int]:
    """`pid` and everything below it; parents come before their children in `entries`."""
    ours = {pid}
    for entry in entries:
        if entry.parent in ours:
            ours.add(entry.pid)
    return ours


def _carries(run_dir: str, pid: int) -> bool:
    """Whether it belongs to this run; what has ended or became another user is not ours to end."""
    return (tree.environment(pid) or {}).get(run_folder.VARIABLE) == run_dir
