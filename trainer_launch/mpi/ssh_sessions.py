"""What ssh sessions leave behind in a worker, known by descent from its launcher, and how it is ended.

Whoever comes in by ssh can call `trainer-launch-end-sessions`. Our own launcher has no need of it: it knows what
is its job's by a mark (`mpi.agent_hosts`). What nobody can ask for is noticed here: a session whose connection was
lost under its command. Little is imported: `trainer-launch-end-sessions` runs by `python -S`, without packages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable

from trainer_launch.host import process_tree
from trainer_launch.host.process_tree import Entry
from trainer_launch.model.units import grouped

SSHD = frozenset(("sshd", "sshd-session", "sshd-auth"))
GRACE_S = 3.0  # from SIGTERM to SIGKILL, for what a lost session has left
LOOK_EVERY_S = 1.0
_KILL_S = 2.0  # for SIGKILL to be seen
_POLL_S = 0.02
_log = logging.getLogger(__name__)


# -- asked for, by ssh ------------------------------------------------------------------------


def main() -> None:
    """`trainer-launch-end-sessions [SECONDS]`: end what other sessions have started; 0 when nothing is left."""
    launcher, words = int(sys.argv[1]), sys.argv[2:]
    try:
        grace_s = float(words[0]) if words else GRACE_S
    except ValueError:
        sys.exit("usage: trainer-launch-end-sessions [SECONDS from SIGTERM to SIGKILL]")
    ended, left = end_others(launcher, os.getpid(), grace_s)
    sys.stdout.write(f"ended {ended}\n")
    if left:
        sys.exit("not ended: " + ", ".join(map(str, left[:10])))


def end_others(launcher: int, asker: int, grace_s: float) -> tuple[int, tuple[Entry, ...]]:
    """End all below `launcher` but what `asker` descends from, and what it started; how many, and who is left."""
    told: set[tuple[int, int]] = set()
    kill_at_s = time.monotonic() + grace_s
    while True:
        now_s = time.monotonic()
        others = others_than(asker, process_tree.descendants(launcher))
        if not others or now_s >= kill_at_s + _KILL_S:
            return len(told), others
        for entry in others:
            if now_s >= kill_at_s:
                _send(entry, signal.SIGKILL)
            elif entry.key not in told:
                _send(entry, signal.SIGTERM)
            told.add(entry.key)
        time.sleep(_POLL_S)


def others_than(asker: int, entries: Collection[Entry]) -> tuple[Entry, ...]:
    """Of the launcher's descendants those that neither are above `asker`, as sshd is, nor belong to its session."""
    by_pid = {entry.pid: entry for entry in entries}
    above, pid = set(), asker
    while pid in by_pid:
        above.add(pid)
        pid = by_pid[pid].parent
    command = {entry.pid for entry in entries if entry.pid in above and entry.key in commands(entries)}
    spared = above | {entry.pid for entry in below(command or {asker}, entries)}
    return tuple(entry for entry in entries if entry.pid not in spared)


def below(pids: Collection[int], entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """All descendants of these processes."""
    children = grouped((entry.parent, entry) for entry in entries)
    found, queue = [], list(pids)
    while queue:
        next_ones = children.get(queue.pop(), [])
        found += next_ones
        queue += [entry.pid for entry in next_ones]
    return tuple(found)


# -- noticed here -----------------------------------------------------------------------------


class Sessions:
    """Looks every second whether a session's connection was lost while its command ran on; ends what it left.

    The supervisor's loop calls it as it does the hang watch.
    """

    def __init__(self, launcher: int, now_s: float) -> None:
        self._launcher = launcher
        self._commands: set[tuple[int, int]] = set()  # what sshd has started itself
        self._doomed: dict[tuple[int, int], float] = {}  # and when SIGKILL is due
        self.due_s = now_s + LOOK_EVERY_S

    def look(self, now_s: float) -> None:
        """Look once; it never finds a hang."""
        self.due_s = now_s + LOOK_EVERY_S
        if not self._doomed and is_idle(self._launcher):
            self._commands = set()
            return
        entries = process_tree.descendants(self._launcher)
        orphans = lost(self._launcher, self._commands, entries)
        self._commands = commands(entries)
        for orphan in orphans:
            if orphan.key not in self._doomed:
                _log.warning("%s lost its ssh connection; ending it and everything it started", orphan)
        left = {entry.pid: entry for entry in entries if entry.key in self._doomed}
        left |= {entry.pid: entry for entry in orphans}
        left |= {entry.pid: entry for entry in below(left, entries)}
        for entry in left.values():
            if entry.key not in self._doomed:
                _send(entry, signal.SIGTERM)
            elif now_s >= self._doomed[entry.key]:
                _send(entry, signal.SIGKILL)
        self._doomed = {entry.key: self._doomed.get(entry.key, now_s + GRACE_S) for entry in left.values()}


def is_idle(launcher: int) -> bool:
    """Whether there is nothing but sshd itself: found out without looking at every process of the machine."""
    below = process_tree.children(launcher)
    return (
        below is not None
        and len(below) == 1
        and not any(process_tree.children(pid) != frozenset() for pid in below)
    )


def commands(entries: Iterable[Entry]) -> set[tuple[int, int]]:
    """What sshd itself has started: a session's command, as long as the session lives."""
    listed = tuple(entries)
    servers = {entry.pid for entry in listed if entry.name in SSHD}
    return {entry.key for entry in listed if entry.parent in servers and entry.name not in SSHD}


def lost(launcher: int, known: Collection[tuple[int, int]], entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Commands of sessions that have ended under them: the launcher has inherited them.

    A daemon that a command left behind on purpose, as Open MPI's does, was never sshd's own child.
    """
    return tuple(entry for entry in entries if entry.parent == launcher and entry.key in known)


def _send(entry: Entry, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(entry.pid, number)
        if number == signal.SIGTERM and entry.state == "T":
            os.kill(entry.pid, signal.SIGCONT)  # suspended: it could not hear us
