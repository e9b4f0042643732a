"""How the agent's workers are asked to stop: each leader alone first, everything at the second request."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

_RELAYED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGHUP, signal.SIGQUIT)


class Stop:
    """Signal handlers of the agent. torch gives no other place: its loop knows stopping only as an exception."""

    def __init__(self, order: str) -> None:
        self.asked = False  # whether we were asked to stop
        self.deaths: list[int] = []  # workers' pids in the order they died
        self._order = order

    def install(self, stopping: Iterable[signal.Signals]) -> None:
        """Take `stopping` as requests to stop, and hand other signals on to the workers."""
        stopping = set(stopping)
        for number in stopping:
            signal.signal(number, self._on_stop)
        for number in set(_RELAYED) - stopping:
            signal.signal(number, _on_relayed)
        signal.signal(signal.SIGCHLD, self._on_child)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        workers = leaders()
        again, self.asked = self.asked, True
        if again or self._order == "group" or not workers:
            raise SignalException(f"asked to stop by signal {number}", sigval=signal.Signals(number))
        for pid in workers:
            _send(pid, number)

    def _on_child(self, _number: int, _frame: FrameType | None) -> None:
        states = dict(_leaders())
        self.deaths += [pid for pid, alive in states.items() if not alive and pid not in self.deaths]
        # torch would restart workers that ended on request, or wait minutes for other agents: leave instead.
        if self.asked and not any(states.values()):
            raise SignalException("all workers ended on request", sigval=signal.SIGTERM)


def _on_relayed(number: int, _frame: FrameType | None) -> None:
    for pid in leaders():
        _send(pid, number)


def leaders() -> list[int]:
    """Living children of this process that lead a session of their own: torch starts each worker so."""
    return [pid for pid, alive in _leaders() if alive]


def _leaders() -> Iterator[tuple[int, bool]]:
    """Each worker that was not collected yet, and whether it is alive."""
    for tasks in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in map(int, _text(tasks).split()):
            # /proc/PID/stat reads: pid (name) state ppid pgrp session …; the name may hold blanks and brackets.
            fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            if len(fields) > 3 and int(fields[3]) == pid:
                yield pid, fields[0] not in "ZX"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(pid, number)
