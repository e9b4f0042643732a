"""What people see of a rehearsal: a live table while it runs, the verdict and the reports at its end.

The table is at the foot of the terminal, while output scrolls above it. The foot is kept out of the terminal's
scrolling region, so that no line of output waits for the table or wipes it away. A thread draws what has changed, a
few times a second; each drawing is one write, which no other tears.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_launch.host import files, logs
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.rehearsal.report import html_page
from trainer_launch.rehearsal.report.fault_costs import Analysis, analyse
from trainer_launch.rehearsal.report.history import History
from trainer_launch.rehearsal.report.summary import cost_lines
from trainer_launch.rehearsal.script_checks import MAX_LOST_STEPS, Verdict, judge

_ENDINGS = (".html", ".png")
_MODE = 0o644
_EVERY_S = 0.2
_PATIENCE_S = 1.0  # with a terminal that was stopped (Ctrl-S)
_STDOUT, _STDERR = 1, 2
LEAST_ROWS, LEAST_WIDTH = 12, 40  # of a terminal: with fewer there is no table
_SHARE = 3  # the table takes at most this part of the terminal
_MOST = 12  # pods that are shown
Lines = Callable[[int], list[str]]  # the table's lines, with at most so many rows of pods


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local` about what is shown of it."""
    parser.add_argument(
        "--report",
        dest="reports",
        action="append",
        metavar="FILE.html|.png",
        help="write a report: an HTML page, or a picture of it (needs chromium); may be repeated",
    )
    parser.add_argument(
        "--max-lost-steps",
        metavar="N",
        help=f"end with 1 if a fault costs more steps than N (default: {MAX_LOST_STEPS})",
    )


class Reporting:
    """What is shown and written of one rehearsal."""

    def __init__(self, reports: Sequence[str], max_lost_steps: int, *, has_table: bool) -> None:
        self._reports, self._max_lost_steps, self._has_table = reports, max_lost_steps, has_table
        self._live: Live | None = None

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Reporting:
        """As the command line has it. Raises UsageError: a report that cannot be written, or no number of steps."""
        reports = tuple(flags["reports"] or ())
        if reports and flags["render"]:
            raise UsageError("--report and --render exclude each other: --render runs nothing; remove one of them")
        check(reports)
        return cls(reports, _steps(flags["max_lost_steps"]), has_table=is_wanted(os.environ))

    @property
    def needs_steps(self) -> bool:
        """Whether steps and generations are shown, which cost a little to find out."""
        return bool(self._reports) or self._has_table

    def begin(self, lines: Lines) -> None:
        """The rehearsal begins; `lines` is called in another thread."""
        if self._has_table:
            self._live = Live(lines)
            self._live.begin()

    def close(self) -> None:
        """Nothing more happens: the terminal is as it was."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def conclude(self, history: History, code: int) -> int:
        """Print which checks failed, write the reports; return the rehearsal's exit code."""
        return conclude(history, code, self._reports, self._max_lost_steps)


def _steps(text: str | None) -> int:
    if text is None:
        return MAX_LOST_STEPS
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise UsageError(f"invalid value {text[:40]!r} for --max-lost-steps: expected a whole number, 0 or more")
    return int(text)


# -- reports -----------------------------------------------------------------------------------


def check(paths: Sequence[str]) -> None:
    """Find out before the job starts whether its reports can be written.

    Raises:
        UsageError: another ending, a picture without a browser, or a folder that is not there or not ours.
    """
    for path in paths:
        if Path(path).suffix.lower() not in _ENDINGS:
            raise UsageError(f"invalid value {path!r} for --report: expected a file that ends with .html or .png")
        if Path(path).suffix.lower() == ".png" and html_page.browser() is None:
            raise UsageError(f"--report {path!r}: a picture needs a browser: {html_page.NO_BROWSER}")
        if os.path.isdir(path):
            raise UsageError(f"--report {path!r} is a directory; name a file in it")
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".report-"):
                pass
        except OSError as problem:
            raise UsageError(
                f"--report {path!r} cannot be written: {problem.strerror}; name a file in a writable directory"
            ) from None


def conclude(history: History, code: int, paths: Sequence[str], max_lost_steps: int) -> int:
    """Print what the faults cost and which checks failed, write the reports; return the rehearsal's exit code."""
    analysis = analyse(history)
    verdict = judge(analysis, max_lost_steps)
    sys.stderr.write(cost_lines(analysis) + verdict.text())
    for path in paths:
        _write_report(path, analysis, verdict)
    return verdict.exit_code(code)


def _write_report(path: str, analysis: Analysis, verdict: Verdict) -> None:
    """One report; no rehearsal ends otherwise for want of it."""
    html = html_page.page(analysis, verdict)
    try:
        is_page = Path(path).suffix.lower() == ".html"
        data = html.encode(errors="replace") if is_page else html_page.picture(html)
        files.replace(os.path.realpath(path), data, _MODE)
    except (NodeError, OSError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        logs.warn(f"--report: {path} was not written: {why}")
    else:
        logs.warn(f"report: {path}")


# -- the live table ----------------------------------------------------------------------------


def is_wanted(env: Mapping[str, str]) -> bool:
    """Whether somebody looks at a terminal that can show a table."""
    if env.get("CI") or env.get("TERM", "dumb") == "dumb":
        return False
    return os.isatty(_STDOUT) and os.isatty(_STDERR) and _size(_STDERR) is not None


def _size(fd: int) -> tuple[int, int] | None:
    """Columns and rows; None when there is no room for a table."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return None
    return (columns, rows) if columns >= LEAST_WIDTH and rows >= LEAST_ROWS else None


def height(rows: int) -> int:
    """How many pods are shown on a terminal of so many rows."""
    return min(max(3, rows // _SHARE - 2), _MOST)


class Live:
    """The table, from `begin` to `close`; `lines` is called in its thread."""

    def __init__(self, lines: Lines, fd: int = _STDERR) -> None:
        self._lines, self._fd = lines, fd
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._frame: tuple[int, int, int] | None = None  # columns, rows, lines of the foot
        self._drawn: Sequence[str] = ()

    def begin(self) -> None:
        """Draw from now on."""
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
        columns, rows = size
        lines = [line[:columns] for line in self._lines(height(rows))]
        frame = (*size, len(lines))
        text = ""
        if frame != self._frame:
            text += self._leave() + _enter(*frame[1:])
            self._frame, self._drawn = frame, ()
        if lines != self._drawn:
            text += _foot(frame[1], lines)
            self._drawn = lines
        self._write(text)

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
