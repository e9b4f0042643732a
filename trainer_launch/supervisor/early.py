"""Signals in the first instants, while Python is still importing and nothing has been started."""

from __future__ import annotations

import os
import signal
from types import FrameType

from trainer_launch import exits


def end_on_stop() -> None:
    """End at once when asked to stop: as PID 1 the kernel drops every signal that has no handler."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    # Nothing was started, so there is nothing to stop and nobody to tell; os._exit, as an import may be half done.
    os._exit(exits.of_signal(number) if number == signal.SIGINT else exits.STOPPED)
