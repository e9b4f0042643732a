"""A rehearsal as one page of HTML, with nothing from elsewhere and no script. Pure.

All that pods and users wrote is cleaned and escaped: it is shown, never obeyed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainer_launch.rehearsal.report import summary as words
from trainer_launch.rehearsal.report.css import SHEET
from trainer_launch.rehearsal.report.overview import Story
from trainer_launch.rehearsal.report.summary import FAULT_COLUMNS, MOST_ROWS, POD_COLUMNS, Headline, clean
from trainer_launch.rehearsal.report.timeline_svg import chart, legend
from trainer_launch.rehearsal.verdict import Verdict, names

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
