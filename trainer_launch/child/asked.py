"""Requests to stop while a function runs in the user's own process: its handlers come back afterwards."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException

from trainer_launch import exits
from trainer_launch.child.stop import PARKED
from trainer_launch.pytorch.worker_death import HowItDied
from trainer_launch.signals import STOP_SIGNALS


class Asked:
    """Signal handlers that end torch's agent, which gives its workers their grace. Only a main thread can."""

    def __init__(self) -> None:
        self.asked = False
        self.handed_on = False  # nothing is handed on
        self.deaths: dict[int, HowItDied] = {}
        self.tell: int | None = None  # a descriptor that gets a byte at the request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Take over the signals that ask to stop, but for those that are ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, PARKED)}
        for number in STOP_SIGNALS:
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._on_stop)

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        self.forget()

    def forget(self) -> None:
        """Give the signals back, also in a forked worker."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def leave(self, number: int) -> NoReturn:
        """Let the user's own handler have the signal now; without one, end as a process that was asked to."""
        if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
            signal.raise_signal(number)
        raise SystemExit(exits.of_signal(number)) from None

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            return  # the workers have their grace, and it ends
        self.asked = True
        if self.tell is not None:
            os.write(self.tell, b"!")
        raise SignalException(f"asked to stop by signal {number}", sigval=signal.Signals(number))
