"""What a preflight says when it is asked to stop: what it was doing, and for whom it waited."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from trainer_launch.host import logs
from trainer_launch.model import exit_codes
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.observability import termination_message
from trainer_launch.preflight import report_text, still_running
from trainer_launch.preflight.report_json import Place

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
        code = exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED
        text = stopped(number, time.monotonic() - self._began_s, self.waiting(), still_running())
        logs.warn(f"Preflight {text} (exit code {code})")
        termination_message.write_last_words(report_text.stopped(self.place, code, text), self._path)
        undoing = threading.Thread(target=self.undo, daemon=True)  # this thread may hold a lock that it needs
        undoing.start()
        undoing.join(_UNDO_S)
        os._exit(code)


def stopped(number: int, after_s: float, waiting: str, checks: list[str]) -> str:
    """`stopped by SIGTERM after 12 s while …`."""
    doing = [waiting] if waiting else []
    doing += [f"running checks: {', '.join(checks)}"] if checks else []
    return f"stopped by {signal.Signals(number).name} after {after_s:.0f} s, while {'; '.join(doing) or 'starting'}"
