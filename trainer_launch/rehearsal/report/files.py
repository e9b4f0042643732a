"""`local --report`: a rehearsal as a page or a picture, and the verdict on the script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from trainer_launch.host import atomic_file, logs
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.report import summary as words
from trainer_launch.rehearsal.report.css import ATTEMPTS, SHEET
from trainer_launch.rehearsal.report.history import Chronicle
from trainer_launch.rehearsal.report.overview import Story, tell
from trainer_launch.rehearsal.report.summary import (
    FAULT_COLUMNS,
    MOST_ROWS,
    POD_COLUMNS,
    Headline,
    clean,
    cost_lines,
    short_name,
    tick_text,
    ticks,
)
from trainer_launch.rehearsal.report.timeline_svg import chart, legend
from trainer_launch.rehearsal.script_checks import judge
from trainer_launch.rehearsal.verdict import Verdict, names

ENDINGS = (".html", ".png")
_DRAW = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from trainer_launch.rehearsal.report.timeline_png import main; sys.exit(main())"
)
_LIMIT_S = 120.0  # the first time, matplotlib looks at all fonts
_NO_MATPLOTLIB = 3  # exit code of the child
_MENDED = "pip install 'trainer-launch[report]', or name an .html file, which needs nothing"
_MODE = 0o644


def check(paths: Sequence[str]) -> None:
    """Find out before the job starts whether its story can be written.

    Raises:
        UsageError: another ending, a picture without matplotlib, or a folder that is not there or not ours.
    """
    for path in paths:
        if Path(path).suffix.lower() not in ENDINGS:
            raise UsageError(f"invalid value {path!r} for --report: expected a file that ends with .html or .png")
        if Path(path).suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--report {path!r}: a picture needs matplotlib: {_MENDED}")
        if os.path.isdir(path):
            raise UsageError(f"--report {path!r} is a directory; name a file in it")
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".report-"):
                pass
        except OSError as problem:
            raise UsageError(
                f"--report {path!r} cannot be written: {problem.strerror}; name a file in a writable directory"
            ) from None


def conclude(chronicle: Chronicle, code: int, paths: Sequence[str], max_lost_steps: int) -> int:
    """Print what the faults cost and which checks failed, write the reports; return the rehearsal's exit code."""
    story = tell(chronicle)
    verdict = judge(story, max_lost_steps)
    sys.stderr.write(cost_lines(story) + verdict.text())
    for path in paths:
        _write(path, story, verdict)
    return verdict.exit_code(code)


def _write(path: str, story: Story, verdict: Verdict) -> None:
    """One report; no rehearsal ends otherwise for want of it."""
    is_page = Path(path).suffix.lower() == ".html"
    problem = _page(path, story, verdict) if is_page else _picture(path, story, verdict)
    if problem:
        logs.warn(f"--report: {path} was not written: {problem}")
    else:
        logs.warn(f"report: {path}")


def _page(path: str, story: Story, verdict: Verdict) -> str:

    try:
        atomic_file.replace(os.path.realpath(path), page(story, verdict).encode(errors="replace"), _MODE)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _picture(path: str, story: Story, verdict: Verdict) -> str:
    """Drawn by a child that may take its time and its memory; why not, if not."""

    argv = (sys.executable, "-c", _DRAW, path)
    told = json.dumps(drawing(story, verdict))
    try:
        drawn = subprocess.run(
            argv, input=told, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if drawn.returncode == _NO_MATPLOTLIB:
        return f"a picture needs matplotlib: {_MENDED}"
    last = (drawn.stdout.strip() or drawn.stderr.strip()).splitlines()[-1:] or ["no word"]
    return last[0][:200] if drawn.returncode else ""


# -- HTML page ---------------------------------------------------------------------------------


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # whatever slips in, nothing is loaded or run
_NUMBERS = ("#", "at", "downtime", "repeated steps", "created", "attempts", "exit")
_WORDS = ("fault", "pod", "message")


def page(story: Story, verdict: Verdict) -> str:
    """The whole file."""
    head = words.headline(story, verdict)
    title = f"{head.text}; {story.chronicle.kind} {story.chronicle.name}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(clean(title))}</title>",
            f"<style>{SHEET}</style></head><body>",
            _header(head),
            _broken(verdict),
            "<section><h2>Pods over time</h2>",
            legend(story),
            chart(story),
            "</section>",
            _faults(story),
            _table("Pods and their messages", POD_COLUMNS, words.pod_rows(story)),
            "<footer>Written by trainer-launch local.</footer>",
            "</body></html>\n",
        ]
    )


def _header(head: Headline) -> str:
    sums = "".join(f"<li><b>{escape(figure)}</b><span>{escape(what)}</span></li>" for figure, what in head.sums)
    return (
        f'<header class="{head.tone}"><h1>{escape(head.text)}</h1><p>{escape(head.about)}</p>'
        f'<ul class="sums">{sums}</ul></header>'
    )


def _broken(verdict: Verdict) -> str:
    if not verdict.broken and not verdict.remarks:
        return ""
    items = "".join(
        f"<li><b>{escape(one.promise.value)}</b>, {escape(clean(names(one.pods)))} at {one.at_s:.1f} s: "
        f'{escape(clean(one.evidence))}.<span class="mend">→ {escape(one.mend)}.</span></li>'
        for one in verdict.broken
    )
    title = "<h2>Failed checks, and what to do</h2>" if items else ""
    remarks = "".join(f'<p class="note">Not checked: {escape(clean(one))}.</p>' for one in verdict.remarks)
    return f'<section>{title}<ul class="broken">{items}</ul>{remarks}</section>'


def _faults(story: Story) -> str:
    if not story.costs:
        return ""
    left = len(story.costs) - MOST_ROWS
    more = f'<p class="note">… and {left} more.</p>' if left > 0 else ""
    return _table("Cost of each fault", FAULT_COLUMNS, words.fault_rows(story)) + more


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    classes = ["n" if one in _NUMBERS else "t" if one in _WORDS else "" for one in columns]
    heads = "".join(f'<th class="{kind}">{escape(one)}</th>' for one, kind in zip(columns, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-of="{escape(column)}">{escape(cell)}</td>'
            for cell, column, kind in zip(row, columns, classes, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></section>"
    )


# -- data of the timeline ----------------------------------------------------------------------


_MOST_ROWS = 60  # of a table, beyond which the page is the place to look
_SPOKEN = 6  # faults that are written out


def drawing(story: Story, verdict: Verdict) -> dict[str, Any]:
    """As JSON takes it."""
    head = words.headline(story, verdict)
    hits = [one for one in story.costs if not one.is_missed]
    times = ticks(max(story.totals.took_s, 0.001))
    step_s = times[1] if len(times) > 1 else story.totals.took_s
    return {
        "tone": head.tone,
        "title": head.text,
        "about": [head.about, "   ".join(f"{figure} {what}" for figure, what in head.sums)],
        "broken": [
            f"{one.promise.value}, {clean(names(one.pods))} at {one.at_s:.1f} s: {clean(one.evidence)}."
            f" What to do: {one.mend}."
            for one in verdict.broken
        ]
        + [f"Not checked: {clean(one)}." for one in verdict.remarks],
        "end_s": max(story.totals.took_s, 0.001),
        "ticks": [[at_s, tick_text(at_s, step_s)] for at_s in times],
        "colours": ATTEMPTS,
        "lanes": [
            {
                "name": short_name(story, lane.pod),
                "segments": [[one.begin_s, one.end_s, one.doing.value, one.attempt] for one in lane.segments],
                "hits": [[one.fault.at_s, one.over_s] for one in hits if one.fault.pod in (None, lane.pod)],
            }
            for lane in story.lanes
        ],
        "faults": [
            [one.fault.at_s, str(one.number), clean(one.fault.text) if len(hits) <= _SPOKEN else ""] for one in hits
        ],
        "curve": [[one.attempt, one.points] for one in story.curve],
        "still": [[one.stands_s, one.goes_on_s] for one in hits if one.stands_s is not None],
        "tables": [
            _rows_of_table("Cost of each fault", FAULT_COLUMNS, words.fault_rows(story)),
            _rows_of_table("Pods and their messages", POD_COLUMNS, words.pod_rows(story)),
        ],
    }


def _rows_of_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, Any]:
    left = len(rows) - _MOST_ROWS
    return {
        "title": title,
        "columns": columns,
        "rows": rows[:_MOST_ROWS],
        "more": f"... and {left} more: --report FILE.html has all" if left > 0 else "",
    }
