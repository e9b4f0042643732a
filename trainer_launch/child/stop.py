"""How the agent's workers are asked to stop: each leader alone first, everything at the second request.

torch's loop knows stopping only as an exception that a signal handler raises, so the handlers here do work. They
may interrupt anything, an import too, and each other: they only call `os`, and look at one time only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from trainer_launch.signals import RELAYED, STOP_SIGNALS, SignalAction, action_of

_PARKED = signal.SIGRTMAX  # torch has its own handler for it, see torch_agent


class Stop:
    """Signal handlers of the agent."""

    def __init__(self, order: str) -> None:
        self.asked = False  # whether we were asked to stop
        self._draining = False  # whether we stop when the workers have ended by themselves
        # Workers' pids in the order they died, and how: (code, None) or (None, signal); None: torch was faster.
        self.deaths: dict[int, tuple[int | None, int | None] | None] = {}
        self.tell: int | None = None  # a descriptor that gets a byte at the first request to stop
        self._order = order
        self._looking = False
        self._look_again = False

    def install(self, stopping: Iterable[signal.Signals], given: Mapping[int, SignalAction]) -> None:
        """Take `stopping` as requests to stop, unless they were given another meaning; hand all others on."""
        stop = SignalAction.TERMINATE
        stopping = {number for number in {*stopping, *STOP_SIGNALS} if given.get(number, stop) is stop}
        for number in stopping:
            signal.signal(number, self._on_stop)
        for other in (STOP_SIGNALS | RELAYED) - stopping - {_PARKED}:
            drains = action_of(other, given) is SignalAction.DRAIN
            signal.signal(other, self._on_drain if drains else _on_relayed)
        signal.signal(signal.SIGCHLD, self._on_child)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self.tell is not None and not again:
            os.write(self.tell, b"!")
        if again or self._order == "group" or not _send_to_leaders(signal.SIGTERM):
            raise SignalException(f"asked to stop by signal {number}", sigval=signal.Signals(number))

    def _on_drain(self, number: int, _frame: FrameType | None) -> None:
        self._draining = True
        if not _send_to_leaders(number):
            self._leave("no worker is left to wait for")

    def _leave(self, why: str) -> None:
        """End torch's loop, which would start the workers again, or wait minutes for other agents."""
        if self.tell is not None and not self.asked:
            os.write(self.tell, b"!")
        self.asked = True
        raise SignalException(why, sigval=signal.SIGTERM)

    def _on_child(self, _number: int, _frame: FrameType | None) -> None:
        self._look_again = True
        if self._looking:
            return  # it is seen by the look that was interrupted
        self._looking = True
        try:
            while self._look_again:
                self._look_again = False
                states = _leaders()
                for pid, alive in states.items():
                    if not alive and pid not in self.deaths:
                        self.deaths[pid] = how_it_died(pid)
        finally:
            self._looking = False
        if (self.asked or self._draining) and not any(states.values()):
            self._leave("all workers ended on request")


def _on_relayed(number: int, _frame: FrameType | None) -> None:
    _send_to_leaders(number)


def _send_to_leaders(number: int) -> int:
    """Signal each living worker; how many there are."""
    living = [pid for pid, alive in _leaders().items() if alive]
    for pid in living:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # noqa: PERF203  it ended meanwhile
            continue
    return len(living)


def _leaders() -> dict[int, bool]:
    """Each worker that was not collected yet, and whether it is alive: children that lead their own session."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        for word in _read(f"/proc/self/task/{thread}/children").split():
            # /proc/PID/stat reads: pid (name) state ppid pgrp session …; the name may hold blanks and brackets.
            fields = _read(f"/proc/{int(word)}/stat").rpartition(b")")[2].split()
            if len(fields) > 3 and int(fields[3]) == int(word):
                found[int(word)] = fields[0] not in (b"Z", b"X")
    return found


def how_it_died(pid: int) -> tuple[int | None, int | None] | None:
    """How a child died, left for torch to collect."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return (ended.si_status, None) if ended.si_code == os.CLD_EXITED else (None, ended.si_status)


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""
    finally:
        os.close(fd)
