"""The live table of a rehearsal: at the foot of the terminal, while output scrolls above it.

The foot is kept out of the terminal's scrolling region, so that no line of output waits for the table or wipes it
away. A thread draws what has changed, a few times a second; each drawing is one write, which no other tears.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trainer_launch.rehearsal.report import live_rows as boards
from trainer_launch.rehearsal.report.history import Happening
from trainer_launch.rehearsal.report.lanes import Doing
from trainer_launch.rehearsal.report.live_rows import COLUMNS, Board

_EVERY_S = 0.2
_PATIENCE_S = 1.0  # with a terminal that was stopped (Ctrl-S)
_STDOUT, _STDERR = 1, 2
_COLOURS = {
    Doing.DOWN: "bold red",
    Doing.STOPPING: "yellow",
    Doing.WAITING: "yellow",
    Doing.INIT: "cyan",
    Doing.RUNNING: "green",
    Doing.OVER: "dim",
}
LastLine = Callable[[str], str]  # of a pod


def is_wanted(color: str, env: Mapping[str, str]) -> bool:
    """Whether somebody looks at a terminal that can show a table, and rich is there to make it."""
    if color == "never" or env.get("CI") or env.get("TERM", "dumb") == "dumb":
        return False
    return (
        os.isatty(_STDOUT)
        and os.isatty(_STDERR)
        and _size(_STDERR) is not None
        and importlib.util.find_spec("rich") is not None
    )


def _size(fd: int) -> tuple[int, int] | None:
    """Columns and rows; None when there is no room for a table."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return None
    return (columns, rows) if columns >= boards.LEAST_WIDTH and rows >= boards.LEAST_ROWS else None


class Live:
    """The table, from `begin` to `close`; `observe` may be called before and after."""

    def __init__(self, board: Board, last_line: LastLine = lambda _: "", fd: int = _STDERR) -> None:
        self.last_line = last_line
        self._board, self._fd = board, fd
        self._lock = threading.Lock()  # of the board
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_s = time.monotonic()
        self._frame: tuple[int, int, int] | None = None  # columns, rows, lines of the foot
        self._drawn: Sequence[str] = ()

    def observe(self, happening: Happening) -> None:
        """Something has happened."""
        with self._lock:
            self._board.take(happening)

    def begin(self) -> None:
        """Draw from now on."""
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the table away, and give the whole terminal back."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._write(self._leave())
        self._thread = None

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._draw()
            self._stop.wait(_EVERY_S)

    def _draw(self) -> None:
        size = _size(self._fd)
        if size is None:
            self._write(self._leave())
            return
        with self._lock:
            lines = self._lines(*size)
        frame = (*size, len(lines))
        text = ""
        if frame != self._frame:
            text += self._leave() + _enter(*frame[1:])
            self._frame, self._drawn = frame, ()
        if lines != self._drawn:
            text += _foot(frame[1], lines)
            self._drawn = lines
        self._write(text)

    def _lines(self, columns: int, rows: int) -> list[str]:
        pods, others = self._board.rows(boards.height(len(self._board.pods), rows))
        shown = boards.fitting(columns)
        cells = [(doing, self._board.cells(pod, self.last_line(pod))) for pod, doing in pods]
        head = self._board.head(time.monotonic() - self._began_s)
        return _rendered(head, shown, cells, others, columns)

    def _leave(self) -> str:
        """Give the foot's lines back to what scrolls; the cursor stays where it is."""
        if self._frame is None:
            return ""
        first = self._frame[1] - self._frame[2] + 1
        self._frame = None
        return f"\x1b7\x1b[r\x1b[{first};1H\x1b[J\x1b8"

    def _write(self, text: str) -> None:
        if text:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(self._fd, text.encode(errors="replace"))


def _enter(rows: int, lines: int) -> str:
    """Make room below the cursor, then let only what is above the foot scroll; setting that moves the cursor.

    Index (ESC D) and not a newline, which would also go to the line's beginning.
    """
    return "\x1bD" * lines + f"\x1b[{lines}A\x1b7\x1b[1;{rows - lines}r\x1b8"


def _foot(rows: int, lines: Sequence[str]) -> str:
    drawn = "".join(
        f"\x1b[{rows - len(lines) + 1 + number};1H{line}\x1b[0m\x1b[K" for number, line in enumerate(lines)
    )
    return f"\x1b7\x1b[?7l{drawn}\x1b[?7h\x1b8"  # no wrapping: what is too wide must not scroll


def _rendered(
    head: str, shown: Sequence[int], rows: Sequence[tuple[Doing, tuple[str, ...]]], others: str, columns: int
) -> list[str]:
    """The lines of the foot, as rich lays them out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=columns, force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(Text(head, style="bold", no_wrap=True, overflow="ellipsis"), no_wrap=True, overflow="ellipsis")
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in shown:
        is_last = column == shown[-1]
        least = {0: 12, 1: 8}.get(column)
        table.add_column(
            COLUMNS[column], no_wrap=True, overflow="ellipsis", ratio=1 if is_last else None, min_width=least,
            max_width=None if is_last else 28,
        )  # fmt: skip
    for doing, cells in rows:
        table.add_row(*(Text(cells[column], style=_COLOURS[doing] if column == 1 else "") for column in shown))
    console.print(table)
    if others:
        console.print(
            Text(others, style="dim", no_wrap=True, overflow="ellipsis"), no_wrap=True, overflow="ellipsis"
        )
    return out.getvalue().splitlines()
