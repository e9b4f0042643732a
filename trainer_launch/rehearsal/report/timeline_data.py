"""What the picture of a rehearsal shows, for the child that draws it: numbers and cleaned words. Pure."""

from __future__ import annotations

from typing import Any

from trainer_launch.rehearsal.report import summary as words
from trainer_launch.rehearsal.report.css import ATTEMPTS
from trainer_launch.rehearsal.report.overview import Story
from trainer_launch.rehearsal.report.summary import FAULT_COLUMNS, POD_COLUMNS, clean, short_name, tick_text, ticks
from trainer_launch.rehearsal.verdict import Verdict, names

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
            _table("Cost of each fault", FAULT_COLUMNS, words.fault_rows(story)),
            _table("Pods and their messages", POD_COLUMNS, words.pod_rows(story)),
        ],
    }


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, Any]:
    left = len(rows) - _MOST_ROWS
    return {
        "title": title,
        "columns": columns,
        "rows": rows[:_MOST_ROWS],
        "more": f"... and {left} more: --report FILE.html has all" if left > 0 else "",
    }
