"""What a preflight says when it is asked to stop: what it was doing, and for whom it waited."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from trainer_launch import exits, log
from trainer_launch.commands import running
from trainer_launch.preflight import screen, still_running
from trainer_launch.preflight.document import Place
from trainer_launch.signals import STOP_SIGNALS

_UNDO_S = 5.0
_NOWHERE = Place(host=os.uname().nodename, node_rank=None, nodes=None, contract="")


def _nothing() -> None:
    pass


class Doing:
    """What the preflight does at the moment; those who do it keep this up to date."""

    def __init__(self, termination_log: str) -> None:
        self.place = _NOWHERE
        self.waiting: Callable[[], str] = str  # for whom, in words
        self.undo: Callable[[], None] = _nothing
        self.is_over = False  # the report is being written: the verdict stands
        self._is_held, self._held = False, 0
        self._path = termination_log
        self._began_s = time.monotonic()
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def hold(self) -> None:
        """From here on a signal waits for `release`: what it is to undo is under way."""
        self._is_held = True

    def release(self) -> None:
        """Stop now, if a signal has come."""
        self._is_held = False
        if self._held:
            self._stop(self._held, None)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_held:
            self._held = number
            return
        if self.is_over:
            return
        self.is_over = True
        code = exits.of_signal(number) if number == signal.SIGINT else exits.STOPPED
        text = stopped(number, time.monotonic() - self._began_s, self.waiting(), still_running())
        log.warn(f"Preflight {text} (exit code {code})")
        running.write_last_words(screen.stopped(self.place, code, text), self._path)
        undoing = threading.Thread(target=self.undo, daemon=True)  # this thread may hold a lock that it needs
        undoing.start()
        undoing.join(_UNDO_S)
        os._exit(code)


def stopped(number: int, after_s: float, waiting: str, checks: list[str]) -> str:
    """`stopped by SIGTERM after 12 s while …`."""
    doing = [waiting] if waiting else []
    doing += [f"running checks: {', '.join(checks)}"] if checks else []
    return f"stopped by {signal.Signals(number).name} after {after_s:.0f} s, while {'; '.join(doing) or 'starting'}"
