"""HTML pages of one file, which load and run nothing: a frame, tables, and an axis of time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import printable

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # whatever gets in, nothing is loaded or run
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_TEXT_CHARS = 200
_NAME_CHARS = 63
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200)
_MOST_TICKS = 6
_NUMBERS = ("#", "at", "time", "share", "downtime", "repeated steps", "created", "attempts", "exit")
_WORDS = ("fault", "pod", "message", "place")


def document(title: str, sheet: str, body: Sequence[str], footer: str) -> str:
    """The whole file; `body` is HTML, the rest is text."""
    shared = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(clean(title))}</title>",
            f"<style>{shared}{sheet}</style></head><body>",
            *body,
            f"<footer>{escape(footer)}</footer>",
            "</body></html>\n",
        ]
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section with a table of texts."""
    classes = ["n" if name in _NUMBERS else "t" if name in _WORDS else "" for name in columns]
    heads = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_whole(cell, column, kind)}" data-of="{escape(column)}">{escape(cell)}</td>'
            for cell, column, kind in zip(row, columns, classes, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></section>"
    )


def _whole(cell: str, column: str, kind: str) -> str:
    """The class of a cell; a pod's name is not broken at its hyphens, unless it is longer than 63 characters."""
    return f"{kind} k" if column == "pod" and len(cell) <= _NAME_CHARS else kind


def clean(text: str) -> str:
    """A text of others, fit to be shown: no secrets by their looks, no control characters, one short line."""
    plain = redact_text(_ANSI.sub("", text[: 20 * _TEXT_CHARS]))
    plain = printable(plain, " ").strip()
    return plain if len(plain) <= _TEXT_CHARS else f"{plain[: _TEXT_CHARS - 1]}…"


def seconds(value: float) -> str:
    """A time for people: 0.42 s, 63.2 s, 12 min 5 s."""
    if value >= 600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{value:.2f} s" if 0 < value < 1 else f"{value:.1f} s"


def ticks(end_s: float) -> Sequence[float]:
    """Round times for an axis, from 0."""
    step = next((tick_s for tick_s in _TICKS_S if end_s / tick_s <= _MOST_TICKS), end_s / _MOST_TICKS)
    return [number * step for number in range(int(end_s / step + 1e-9) + 1)]


def tick_text(at_s: float, step_s: float) -> str:
    """Such as `0.5 s`, `20 s`, `4 min`."""
    return f"{at_s / 60:g} min" if step_s >= 60 and at_s else f"{at_s:.3g} s"


class Scale:
    """From seconds to percentages."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s

    def percent(self, at_s: float) -> float:
        """Of the whole width."""
        return 100.0 * min(max(at_s, 0.0), self.end_s) / self.end_s

    def at(self, at_s: float) -> str:
        """A place, as CSS has it."""
        return f"{self.percent(at_s):.3f}%"

    def span(self, begin_s: float, end_s: float) -> str:
        """A place and a width."""
        return f"left:{self.at(begin_s)};width:{max(0.0, self.percent(end_s) - self.percent(begin_s)):.3f}%"


def axis(scale: Scale) -> str:
    """The row of times below a chart."""
    times = ticks(scale.end_s)
    step = times[1] if len(times) > 1 else scale.end_s
    spans = ""
    for number, at_s in enumerate(times):
        is_odd = number % 2 and len(times) > 4  # a narrow page has no room for them
        kinds = f"{'last ' * (scale.percent(at_s) > 92)}{'odd' * bool(is_odd)}"
        spans += f'<span class="{kinds}" style="left:{scale.at(at_s)}">{tick_text(at_s, step)}</span>'
    return f'<div class="row"><i></i><div class="axis">{spans}</div></div>'
