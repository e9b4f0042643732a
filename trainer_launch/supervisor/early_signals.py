"""Signals in the first instants, while nothing has been started, and in the last, when all has been said."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

from trainer_launch.model import exit_codes
from trainer_launch.supervisor import inherited

_leaving: list[bool] = []  # not empty once the termination message are written


def end_on_stop() -> None:
    """End at once when asked to stop: as PID 1 the kernel drops every signal that has no handler."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, _end)


def open_streams() -> None:
    """Give Python the standard streams that were closed when we started; what cannot be encoded is escaped."""
    inherited.fill_standard_streams()
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave() -> None:
    """Keep to the exit code that the termination message tell, also when asked to stop while the process ends."""
    _leaving.append(True)


def _end(number: int, _frame: FrameType | None) -> None:
    if _leaving:
        return
    # Nothing was started, so there is nothing to stop and nobody to tell; os._exit, as an import may be half done.
    os._exit(exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED)
