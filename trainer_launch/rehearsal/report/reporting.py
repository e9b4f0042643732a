"""What people see of a rehearsal: a live table while it runs, the verdict and the reports at its end.

The table is at the foot of the terminal, while output scrolls above it. The foot is kept out of the terminal's
scrolling region, so that no line of output waits for the table or wipes it away. A thread draws what has changed, a
few times a second; each drawing is one write, which no other tears.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_launch.host import files, logs
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.units import counted
from trainer_launch.observability.html import clean, seconds
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.report import html_page
from trainer_launch.rehearsal.report.fault_costs import Analysis, analyse
from trainer_launch.rehearsal.report.history import Doing, Entry, History, Walk, What
from trainer_launch.rehearsal.report.summary import cost_lines
from trainer_launch.rehearsal.script_checks import MAX_LOST_STEPS, Verdict, judge

_ENDINGS = (".html", ".png")
_MODE = 0o644
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
    def of(cls, flags: Mapping[str, Any], color: str) -> Reporting:
        """As the command line has it. Raises UsageError: a report that cannot be written, or no number of steps."""
        reports = tuple(flags["reports"] or ())
        if reports and flags["render"]:
            raise UsageError("--report and --render exclude each other: --render runs nothing; remove one of them")
        check(reports)
        return cls(reports, _steps(flags["max_lost_steps"]), has_table=is_wanted(color, os.environ))

    @property
    def needs_steps(self) -> bool:
        """Whether steps and generations are shown, which cost a little to find out."""
        return bool(self._reports) or self._has_table

    def begin(
        self, title: str, pods: Sequence[Pod], faults: Sequence[str], last_line: Callable[[Pod], str]
    ) -> None:
        """The rehearsal begins; what a pod wrote last is asked for in another thread."""
        if self._has_table:
            known = {pod.name: pod for pod in pods}
            state = TableState.of(title, known, faults)
            self._live = Live(state, lambda name: last_line(known[name]) if name in known else "")
            self._live.begin()

    def observe(self, entry: Entry) -> None:
        """Something has happened."""
        if self._live is not None:
            self._live.observe(entry)

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
    return (columns, rows) if columns >= LEAST_WIDTH and rows >= LEAST_ROWS else None


class Live:
    """The table, from `begin` to `close`; `observe` may be called before and after."""

    def __init__(self, state: TableState, last_line: LastLine = lambda _: "", fd: int = _STDERR) -> None:
        self.last_line = last_line
        self._state, self._fd = state, fd
        self._lock = threading.Lock()  # of the state
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_s = time.monotonic()
        self._frame: tuple[int, int, int] | None = None  # columns, rows, lines of the foot
        self._drawn: Sequence[str] = ()

    def observe(self, entry: Entry) -> None:
        """Something has happened."""
        with self._lock:
            self._state.take(entry)

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
        pods, others = self._state.rows(height(len(self._state.pods), rows))
        shown = fitting(columns)
        cells = [(doing, self._state.cells(pod, self.last_line(pod))) for pod, doing in pods]
        head = self._state.head(time.monotonic() - self._began_s)
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


# -- rows of the live table --------------------------------------------------------------------


COLUMNS = ("POD", "STATUS", "CREATED", "ATTEMPT", "STEP", "LAST LINE")
LEAST_ROWS, LEAST_WIDTH = 12, 40  # of a terminal: with fewer there is no table
_SHARE = 3  # the table takes at most this part of the terminal
_MOST = 12  # pods that are shown
_STATUS = {
    Doing.WAITING: "Pending",
    Doing.INIT: "Init",
    Doing.RUNNING: "Running",
    Doing.STOPPING: "Terminating",
    Doing.DOWN: "Restarting",
}
_WORST_FIRST = (Doing.DOWN, Doing.STOPPING, Doing.WAITING, Doing.INIT, Doing.RUNNING, Doing.OVER)


@dataclass(slots=True)
class PodRow:
    """How one pod stands."""

    walk: Walk
    step: int | None = None
    line: str = ""  # the one that told the step

    @property
    def status(self) -> str:
        """As kubectl has it."""
        over = "Completed" if self.walk.code == 0 else "Terminated"
        return _STATUS.get(self.walk.doing, over)


@dataclass(slots=True)
class TableState:
    """How the rehearsal stands, as its entries tell."""

    title: str
    pods: dict[str, PodRow]
    to_come: list[str]  # faults, as they are written
    came: int = 0
    missed: int = 0
    ended: str = ""
    top: int | None = None
    lasting: list[str] = field(default_factory=list)  # faults that are not over

    @classmethod
    def of(cls, title: str, pods: Iterable[str], faults: Iterable[str]) -> TableState:
        """At the beginning."""
        return cls(title=title, pods={pod: PodRow(Walk()) for pod in pods}, to_come=list(faults))

    def take(self, one: Entry) -> None:
        """Something has happened."""
        if one.what in (What.FAULT, What.FAULT_MISSED, What.FAULT_OVER):
            self._fault(one)
        elif one.what is What.CONDITION:
            self.ended = one.text
        elif one.pod is not None:
            standing = self.pods.setdefault(one.pod, PodRow(Walk(since_s=one.at_s)))
            standing.walk.take(one)
            standing.walk.done.clear()  # the past is the history's
            if one.what is What.STEP and one.step is not None:
                standing.step, standing.line = one.step, one.text
                self.top = max(one.step, self.top or 0)

    def _fault(self, one: Entry) -> None:
        if one.what is What.FAULT_OVER:
            if one.text in self.lasting:
                self.lasting.remove(one.text)
            return
        if one.text in self.to_come:
            self.to_come.remove(one.text)
        if one.what is What.FAULT:
            self.came += 1
            self.lasting.append(one.text)
        else:
            self.missed += 1

    # -- what is shown ------------------------------------------------------------------------

    def head(self, now_s: float) -> str:
        """The first line: the job, its step, and its faults."""
        parts = [clean(self.title), seconds(now_s)]
        if self.top is not None:
            parts.append(f"step {self.top:,}")
        if self.came:
            parts.append(f"{counted(self.came, 'fault')} injected")
        if self.to_come:
            more = f" (and {len(self.to_come) - 1} more)" if len(self.to_come) > 1 else ""
            parts.append(f"next: {clean(self.to_come[0])}{more}")
        if self.ended:
            parts.append(clean(self.ended))
        return " · ".join(parts)

    def rows(self, most: int) -> tuple[list[tuple[str, Doing]], str]:
        """The pods that are shown, and what is said of the others."""
        standing = [(pod, one.walk.doing) for pod, one in self.pods.items()]
        if len(standing) <= most:
            return standing, ""
        shown = sorted(standing, key=lambda one: _WORST_FIRST.index(one[1]))[: most - 1]
        names = {pod for pod, _ in shown}
        counts = Counter(one.status for pod, one in self.pods.items() if pod not in names)
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        return shown, f"and {len(standing) - len(shown)} more: {told}"

    def cells(self, pod: str, last_line: str) -> tuple[str, ...]:
        """A row of COLUMNS."""
        one = self.pods[pod]
        step = "-" if one.step is None else f"{one.step:,}"
        line = clean(last_line or one.line)
        return clean(pod), one.status, str(one.walk.life), str(one.walk.attempt), step, line


def height(pods: int, rows: int) -> int:
    """How many pods are shown on a terminal of so many rows."""
    return min(pods, max(3, rows // _SHARE - 2), _MOST)


def fitting(columns: int) -> Sequence[int]:
    """Which of COLUMNS a terminal has room for."""
    return (0, 1, 4) if columns < 60 else (0, 1, 3, 4, 5) if columns < 90 else (0, 1, 2, 3, 4, 5)
