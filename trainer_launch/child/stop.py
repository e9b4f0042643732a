"""How the agent's workers are asked to stop: each leader alone first, everything at the second request.

torch's loop knows stopping only as an exception that a signal handler raises, so the handlers here do work. They
may interrupt anything, an import too, and each other: they only call `os`, as the roster does for them. Nor does
torch's loop go on once workers were asked: it would end them all at the first that leaves with an error, or for a
node that left before us. So the handler waits for them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from torch.distributed.elastic import metrics
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig

from trainer_launch.child.roster import Roster
from trainer_launch.signals import RELAYED, STOP_SIGNALS, SignalAction, action_of

_LOOK_S = 0.5  # between two looks at who lives; the end of a worker wakes us up before
PARKED = signal.SIGRTMAX  # torch insists on handling some signal; nobody sends this one


def park(config: LaunchConfig) -> None:
    """Leave torch a signal that is never sent, in place of those that are ours to handle."""
    if hasattr(config, "signals_to_handle"):  # older ones give no choice: `Stop.stand`
        config.signals_to_handle = PARKED.name


class _AtEachStep(metrics.MetricHandler):
    """torch measures each step of its loop, and the start of workers, too: the way to be called after it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def emit(self, metric_data: metrics.MetricData) -> None:
        """One measured step."""
        self._call()


class Stop:
    """Signal handlers of the agent."""

    def __init__(self, order: str, roster: Roster) -> None:
        self.asked = False  # whether we were asked to stop
        self.handed_on = False  # whether the present workers were sent a signal
        self._left = False  # whether torch's loop was told to end
        self._draining: int | None = (
            None  # the signal after which we stop when the workers have ended by themselves
        )
        self._waiting = False  # whether a handler below us waits for the workers
        self.deaths = roster.deaths
        self.tell: int | None = None  # a descriptor that gets a byte at the first request to stop
        self._order = order
        self._roster = roster
        self._told: set[int] = set()  # whom we have asked to stop
        self._drained: set[int] = set()  # who has had the signal that drains
        self._handlers: dict[int, Any] = {}

    def install(self, stopping: Iterable[signal.Signals], given: Mapping[int, SignalAction]) -> None:
        """Take `stopping` as requests to stop, unless they were given another meaning; hand all others on."""
        stop = SignalAction.TERMINATE
        stopping = {number for number in {*stopping, *STOP_SIGNALS} if given.get(number, stop) is stop}
        for number in stopping:
            self._handlers[number] = self._on_stop
        for other in (STOP_SIGNALS | RELAYED) - stopping - {PARKED}:
            drains = action_of(other, given) is SignalAction.DRAIN
            self._handlers[other] = self._on_drain if drains else self._on_relayed
        self._handlers[signal.SIGCHLD] = self._on_child
        self.stand()
        metrics.configure(_AtEachStep(self.stand))

    def stand(self) -> None:
        """Let the handlers be ours: a torch before 2.9 puts its own in their place when it starts workers."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def check(self, _environments: object) -> None:
        """Before each start of the workers: none, when we were asked to stop."""
        self.handed_on = False
        if self.asked or self._draining:
            self._leave("asked to stop")

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self.tell is not None and not again:
            os.write(self.tell, b"!")
        if again or self._order == "group" or not self._ask():
            self._left = True
            raise SignalException(f"asked to stop by signal {number}", sigval=signal.Signals(number))
        self._wait()

    def _on_drain(self, number: int, _frame: FrameType | None) -> None:
        self._draining, self._drained, self.handed_on = number, set(), True
        if not self._tell(number, self._drained):
            self._leave("no worker is left to wait for")
        self._wait()

    def _wait(self) -> None:
        """Keep torch's loop from going on until all workers have ended, then end it."""
        if self._left or self._waiting or self._roster.is_looking:  # what was interrupted has to go on
            return
        self._waiting = True
        try:
            while self._are_there():
                time.sleep(_LOOK_S)
        finally:
            self._waiting = False
        self._leave("all workers ended on request")

    def _are_there(self) -> bool:
        """Whether workers live; all of them are told what we were told, also those that have started meanwhile."""
        return (self._ask() if self.asked else self._tell(self._draining or 0, self._drained)) > 0

    def _leave(self, why: str) -> None:
        """End torch's loop, which would start the workers again, or wait minutes for other agents."""
        if self.tell is not None and not self.asked:
            os.write(self.tell, b"!")
        self.asked = self._left = True
        raise SignalException(why, sigval=signal.SIGTERM)

    def _on_child(self, _number: int, _frame: FrameType | None) -> None:
        self._roster.look()
        if self._left:  # torch ends its workers now; to raise again would only break what it does at this moment
            return
        if self.asked or self._draining:
            if not self._are_there():
                self._leave("all workers ended on request")
            self._wait()

    def _on_relayed(self, number: int, _frame: FrameType | None) -> None:
        self.handed_on = True
        self._send(number)

    def _ask(self) -> int:
        """Ask each living worker to stop; how many there are."""
        return self._tell(signal.SIGTERM, self._told)

    def _tell(self, number: int, told: set[int]) -> int:
        """Signal each living worker once, also those that have started meanwhile; how many there are."""
        self._roster.look()
        living = self._roster.living()
        for pid in living:
            if pid not in told:
                told.add(pid)
                _kill(pid, number)
        return len(living)

    def _send(self, number: int) -> int:
        """Signal each living worker; how many there are."""
        self._roster.look()
        living = self._roster.living()
        for pid in living:
            _kill(pid, number)
        return len(living)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended meanwhile
        return


def stop_listening() -> None:
    """Nothing is left to stop: whatever comes now, also the end of the fork-server, changes nothing any more."""
    for number in STOP_SIGNALS | RELAYED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
