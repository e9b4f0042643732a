"""How all figures are taken: contestants in turn, each run with a deadline and cleaned up after, failures noted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import psutil

from benchmarks.results import Figure, Results

PR_SET_CHILD_SUBREAPER = 36
NEVER_TWICE = 2  # what failed so often and never worked is not tried again
CLEANUP_S = 60.0  # what a run that was late may take to take its things down
SLOW_S = 8.0  # runs that take so long are told one by one
QUICKLY_S = 10.0  # for what is left of a run to go away


class Late(Exception):
    """A run passed its deadline."""


class Failed(Exception):
    """A run did not do what is measured; why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One value, in the unit of its row; `note` stands behind it in the table."""

    value: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Case:
    """One contestant in one situation. A run gives a reading for each of `rows`, or a text: why it has none."""

    who: str
    rows: Mapping[str, str]  # row: unit
    run: Callable[[], Mapping[str, Reading | float | str]]
    limit_s: float = 60.0
    about_s: float = 3.0  # what a run takes on a quiet machine, for the estimate
    extra: Mapping[str, str] = field(default_factory=dict)  # rows that a run may have a reading for


@dataclass(frozen=True, slots=True)
class Setup:
    """What a section's runs need: the cases, in turn; who is not here, and why. `undo` ends what they share."""

    cases: Sequence[Case]
    absent: Mapping[str, str] = field(default_factory=dict)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of figures with a table of its own. `open` makes what its runs share."""

    name: str
    title: str
    about: str  # how it is measured, for the page
    open: Callable[[], Setup]
    whos: tuple[str, ...]  # the order of columns
    beside: tuple[str, ...] = ()  # the columns of the page, if fewer
    shows: tuple[str, ...] = ()  # the rows of the page, if fewer; the raw data has them all
    pictured: tuple[str, ...] = ()  # the rows of its picture
    loses_because: str = ""  # where this project loses: the measured cause
    missing: Callable[[], str | None] = lambda: None  # why it cannot be measured here at all
    repeats: int | None = None  # where another number is right than what was asked for
    versions: Callable[[], Mapping[str, str]]
    is_by_default: bool = True


def become_reaper() -> None:
    """Whatever a run leaves behind becomes our child, however it was started."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def measure(
    section: Section, results: Results, repeats: int, who: tuple[str, ...] = (), keep: Callable[[], object] = int
) -> None:
    """Run all cases in turn, `repeats` times.

    Args:
        section: what is measured.
        results: gets the readings.
        repeats: runs of each case.
        who: how the names of those begin that are measured; all, if empty.
        keep: called after each turn.
    """
    setup = section.open()
    with setup.undo:
        cases = [case for case in setup.cases if not who or case.who.startswith(who)]
        results.absent = dict(setup.absent)
        left_s = sum(case.about_s for case in cases) * repeats
        say(f"{section.name}: {len(cases)} cases, {repeats} times, about {left_s / 60:.1f} min")
        for turn in range(repeats):
            for case in cases:
                _run(case, results)
            keep()
            say(f"{section.name}: turn {turn + 1} of {repeats} is done")


def _run(case: Case, results: Results) -> None:
    """One run, whatever it does; its readings, or the same failure in all its rows."""
    figures = [results.figure(row, case.who, unit) for row, unit in case.rows.items()]
    if all(not figure.values and len(figure.failures) >= NEVER_TWICE for figure in figures):
        return
    found: Mapping[str, Reading | float | str] = {}
    why = ""
    load = os.getloadavg()[0]
    try:
        with deadline(case.limit_s):
            found = case.run()
    except Exception as error:  # noqa: BLE001 - whatever one run does, the others go on
        why = _reason(error)
        say(f"  {case.who}: {why}")
    finally:
        end_leftovers()
    if case.about_s >= SLOW_S and not why:
        say(f"  {case.who}: {', '.join(map(str, found.values()))}")
    for figure in figures:
        _take(figure, found.get(figure.row, why or "no reading"), load)
    for row in case.extra.keys() & found.keys():
        _take(results.figure(row, case.who, case.extra[row]), found[row], load)


def _take(figure: Figure, reading: Reading | float | str, load: float) -> None:
    figure.loads.append(round(load, 1))
    if isinstance(reading, str):
        figure.failures.append(reading)
        return
    it = reading if isinstance(reading, Reading) else Reading(reading)
    figure.values.append(float(f"{it.value:.5g}"))
    if it.note:
        figure.notes.append(it.note)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    name = "" if isinstance(error, Failed | Late) else f"{type(error).__name__}: "
    return f"{name}{text}"[:200]


@contextlib.contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """Raise Late in whatever the block waits for, when the time is over; again when cleaning up hangs, too."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Late(f"not done within {limit_s:g} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s, CLEANUP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


KEPT: set[int] = set()  # processes that all runs of a section share; the section ends them


def keep_running() -> None:
    """What runs below us now is no leftover of a run."""
    KEPT.update(process.pid for process in psutil.Process().children(recursive=True))


def end_leftovers() -> None:
    """Kill and reap whatever the last run left below us, but not what runs share."""
    end_s = time.monotonic() + QUICKLY_S
    while time.monotonic() < end_s:
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in KEPT]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) and pid not in KEPT:
                pass


def wait_for(condition: Callable[[], object], what: str, limit_s: float, step_s: float = 0.005) -> None:
    """Wait until a condition holds.

    Raises:
        Failed: it did not, within the limit.
    """
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise Failed(f"{what}: not within {limit_s:g} s")
        time.sleep(step_s)


def floats_of(*words: str, within_s: float) -> list[float]:
    """What a module of ours prints in a process of its own, as it grows with what it simulates."""
    done = subprocess.run((sys.executable, "-m", *words), capture_output=True, text=True, timeout=within_s)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["no word"])[-1])
    return [float(word) for word in done.stdout.split()]


def settle(load: float, within_s: float = 180.0) -> None:
    """Wait until the last minute's load is not above this; for long enough that our own has gone by then."""
    end_s = time.monotonic() + within_s
    while os.getloadavg()[0] > load and time.monotonic() < end_s:
        time.sleep(1.0)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
