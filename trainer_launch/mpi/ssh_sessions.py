"""What an ssh session leaves behind in a worker when its connection is lost under its command, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Collection, Iterable

from trainer_launch.host import process_tree
from trainer_launch.host.process_tree import Entry
from trainer_launch.model.units import grouped

SSHD = frozenset(("sshd", "sshd-session", "sshd-auth"))
GRACE_S = 3.0  # from SIGTERM to SIGKILL, for what a lost session has left
LOOK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


def below(pids: Collection[int], entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """All descendants of these processes."""
    children = grouped((entry.parent, entry) for entry in entries)
    found, queue = [], list(pids)
    while queue:
        next_ones = children.get(queue.pop(), [])
        found += next_ones
        queue += [entry.pid for entry in next_ones]
    return tuple(found)


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
