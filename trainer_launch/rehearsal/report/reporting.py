"""The output of a rehearsal: a live table while it runs; at its end the report, on the terminal and in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_launch.host import files, logs
from trainer_launch.model import removed
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.units import aligned, counted, listed
from trainer_launch.observability import live
from trainer_launch.observability.html import clean, seconds
from trainer_launch.preflight.report_formats import check_ending
from trainer_launch.rehearsal.report.history import History
from trainer_launch.rehearsal.report.html_page import page
from trainer_launch.rehearsal.report.rehearsal_report import (
    COLUMNS,
    MOST_FAULTS,
    RehearsalReport,
    as_json,
    condition,
    downtime,
    effect,
    pod_cells,
    report_of,
)
from trainer_launch.rehearsal.report.training import FaultReport

_MODE = 0o644
_MOST_PODS = 12  # in the live table
_LEGEND = "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last."
_SHOWN_PODS = 3
_WIDTH = 100
Rows = Callable[[int], tuple[str, Sequence[Sequence[str]]]]  # title, heading and rows, with at most so many pods


class Reporting:
    """The live table and the reports of a rehearsal, as the command line asks for them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._has_table = live.is_wanted()

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Reporting:
        """As the command line has it. Raises UsageError: a report that cannot be written."""
        paths = tuple(flags["reports"] or ())
        if paths and flags["render"]:
            raise UsageError("--report and --render exclude each other: --render runs nothing; remove one of them")
        for path in paths:
            check(path)
        return cls(paths)

    @property
    def needs_steps(self) -> bool:
        """Whether steps and generations are shown, which cost a little to find out."""
        return bool(self._paths) or self._has_table

    def table(self, rows: Rows) -> contextlib.AbstractContextManager[None]:
        """The live table until the block ends, if it goes to a terminal; `rows` is called in another thread."""
        return live.table(lambda most: rows(min(most, _MOST_PODS))) if self._has_table else contextlib.nullcontext()

    def conclude(self, history: History) -> int:
        """Print and write the report; return the rehearsal's exit code."""
        report = report_of(history)
        sys.stderr.write(text(report))
        for path in self._paths:
            is_page = Path(path).suffix.lower() == ".html"
            _write(path, page(report) if is_page else json.dumps(as_json(report), indent=2) + "\n")
        return report.exit_code


def check(path: str) -> None:
    """Find out before the job starts whether a report can be written.

    Raises:
        UsageError: another ending, or a folder that is not there or not ours.
    """
    if Path(path).suffix.lower() == ".png":
        removed.refuse("--report FILE.png", f"--report {path}")
    check_ending(path)
    if os.path.isdir(path):
        raise UsageError(f"--report {path!r} is a directory; name a file in it")
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".report-"):
            pass
    except OSError as problem:
        raise UsageError(
            f"--report {path!r} cannot be written: {problem.strerror}; name a file in a writable directory"
        ) from None


def _write(path: str, content: str) -> None:
    """Write a report; a rehearsal that fails to does not end otherwise."""
    try:
        files.replace(os.path.realpath(path), content.encode(errors="replace"), _MODE)
    except (NodeError, OSError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        logs.warn(f"--report: {path} was not written: {why}")
    else:
        logs.warn(f"report: {path}")


def text(report: RehearsalReport) -> str:
    """The report on the terminal: pods, how the job ended, faults, failed checks."""
    lines = [
        *_table(report),
        condition(report),
        *report.remarks,
        *(f"fault did not happen: {fault.fault}: {fault.why_not}" for fault in report.faults if not fault.happened),
        *(_cost(report, fault) for fault in report.happened[:MOST_FAULTS]),
        *_failed_checks(report),
    ]
    return "".join(f"{line}\n" for line in lines)


def _table(report: RehearsalReport) -> Iterator[str]:
    rows = [COLUMNS, *pod_cells(report)]
    yield from (row.rstrip() for row in aligned(rows))
    if any(pod.created > 1 or pod.restarts for pod in report.pods):
        yield _LEGEND


def _cost(report: RehearsalReport, fault: FaultReport) -> str:
    """The cost of a fault, in one line."""
    where = "" if fault.pod is None else f", {report.short_name(fault.pod)}"
    head = f"Fault {fault.number} ({clean(fault.fault)}{where}, at {seconds(fault.at_s)}) cost"
    if fault.downtime_s is None:
        return f"{head} an unknown time: steps unknown"
    repeated = "" if fault.repeated_steps is None else f", {counted(fault.repeated_steps, 'repeated step')}"
    return f"{head} {downtime(fault)} without a new step{repeated}; {effect(fault)}"


def _failed_checks(report: RehearsalReport) -> Iterator[str]:
    if report.failed_checks:
        yield f"This job does not survive preemption: {counted(len(report.failed_checks), 'check')} failed."
    for failure in report.failed_checks:
        pods = listed(failure.pods, _SHOWN_PODS)
        sentence = f"FAILED: {failure.check.value}, {pods} at {failure.at_s:.1f} s: {failure.evidence}"
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        advice = f"What to do: {failure.advice}"
        yield from textwrap.wrap(advice, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    for remark in report.not_checked:
        yield from textwrap.wrap(f"Not checked: {remark}", _WIDTH, subsequent_indent="  ")
