"""What an ssh session leaves behind in a worker when its connection is lost under its command, and how it ends."""

from __future__ import annotations

import logging
import signal

from trainer_launch.host import process_tree
from trainer_launch.host.process_tree import Entry

_SSHD = ("sshd", "sshd-session", "sshd-auth")
_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_LOOK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Sessions:
    """Looks every second whether a session's connection was lost while its command ran on; ends what it left.

    The supervisor's loop calls it as it does the hang watch.
    """

    def __init__(self, launcher: int, now_s: float) -> None:
        self._launcher = launcher
        self._commands: set[tuple[int, int]] = set()  # what sshd has started itself
        self._doomed: dict[tuple[int, int], float] = {}  # and when SIGKILL is due
        self.due_s = now_s + _LOOK_EVERY_S

    def look(self, now_s: float) -> None:
        """Look once; it never finds a hang."""
        self.due_s = now_s + _LOOK_EVERY_S
        if not self._doomed and self._is_idle():
            self._commands = set()
            return
        entries = process_tree.descendants(self._launcher)  # parents first
        left: dict[int, Entry] = {}
        for entry in entries:
            is_lost = self._is_lost(entry)
            if is_lost and entry.key not in self._doomed:
                _log.warning("%s lost its ssh connection; ending it and everything it started", entry)
            if is_lost or entry.key in self._doomed or entry.parent in left:
                left[entry.pid] = entry
        servers = {entry.pid for entry in entries if entry.name in _SSHD}
        self._commands = {entry.key for entry in entries if entry.parent in servers and entry.name not in _SSHD}
        for entry in left.values():
            if entry.key not in self._doomed:
                process_tree.send(entry.pid, signal.SIGTERM)
                process_tree.send(entry.pid, signal.SIGCONT)  # one that is suspended could not hear it
            elif now_s >= self._doomed[entry.key]:
                process_tree.send(entry.pid, signal.SIGKILL)
        self._doomed = {entry.key: self._doomed.get(entry.key, now_s + _GRACE_S) for entry in left.values()}

    def _is_lost(self, entry: Entry) -> bool:
        """Whether a command's session has ended under it: the launcher has inherited it.

        A daemon that a command left behind on purpose, as Open MPI's does, was never sshd's own child.
        """
        return entry.parent == self._launcher and entry.key in self._commands

    def _is_idle(self) -> bool:
        """Whether there is nothing but sshd itself: found out without looking at every process of the machine."""
        below = process_tree.children(self._launcher)
        return below is not None and len(below) == 1 and process_tree.children(next(iter(below))) == frozenset()
