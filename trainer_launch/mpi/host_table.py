"""Shows how hosts come: a table in place on a terminal, elsewhere a line when something has changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from trainer_launch.host import logs
from trainer_launch.mpi import host_readiness
from trainer_launch.mpi.host_readiness import Sight

_REDRAW_S = 0.2
_FIRST_SAY_S = 1.0
_SAY_S = 5.0  # between two lines, doubled up to
_LONGEST_SAY_S = 60.0
_MAX_ROWS = 24


class Screen:
    """The way in which a person is told."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_terminal = os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"
        self._drawn = 0  # lines of the table that stand on the screen
        self._last = ""
        self._every_s = _SAY_S
        self.due_s: float | None = None

    def show(self, seen: Mapping[str, Sight], now_s: float) -> None:
        """Show what was seen, if it is time and there is somebody to wait for."""
        if self.due_s is None:
            self._every_s = _SAY_S
            self.due_s = now_s + (_REDRAW_S if self._is_terminal else _FIRST_SAY_S)
        if now_s < self.due_s or not seen:
            return
        if self._is_terminal:
            self._draw(seen)
            self.due_s = now_s + _REDRAW_S
            return
        text = host_readiness.summary(seen)
        if text != self._last:
            self._last, self._every_s = text, _SAY_S
        else:
            self._every_s = min(2 * self._every_s, _LONGEST_SAY_S)
        logs.say(text)
        self.due_s = now_s + self._every_s

    def clear(self) -> None:
        """Take the table away: the next words are others'."""
        self.due_s = None
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _draw(self, seen: Mapping[str, Sight]) -> None:
        rows, columns = _MAX_ROWS, 80
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._fd)
        lines = host_readiness.table(seen, max(4, min(rows - 1, _MAX_ROWS)), columns)
        back = f"\x1b[{self._drawn}F" if self._drawn else ""
        self._write(back + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        self._drawn = len(lines)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, text.encode())
