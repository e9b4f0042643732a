"""Bars of one row or several, as SVG that can be read 800 pixels wide. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

WIDTH, LABEL, TEXT = 800, 250, 130  # pixels: all, left of the bars, right of them
BAR, GAP, HEADING = 20, 6, 30
OURS, OTHERS, NEVER = "#1769aa", "#9aa5b1", "#c0392b"


class Bar(msgspec.Struct, frozen=True):
    """One contestant in one row."""

    label: str
    value: float | None  # None: it never did what is measured
    text: str  # behind the bar
    is_ours: bool = False


def drawn(groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """One group of bars below the other, all on one scale: `(heading, bars)`."""
    values = [bar.value for _, bars in groups for bar in bars if bar.value is not None]
    longest = max(values, default=0.0) or 1.0
    lines, y = [], 8
    for heading, bars in groups:
        lines.append(_text(0, y + 15, heading, "bold"))
        y += HEADING - GAP
        for bar in bars:
            share = 1.0 if bar.value is None else bar.value / longest
            width = max(2, math.floor(share * (WIDTH - LABEL - TEXT)))
            color = OURS if bar.is_ours else NEVER if bar.value is None else OTHERS
            lines.append(_text(LABEL - 8, y + 15, bar.label, anchor="end"))
            lines.append(f'<rect x="{LABEL}" y="{y}" width="{width}" height="{BAR}" fill="{color}"/>')
            lines.append(_text(LABEL + width + 8, y + 15, bar.text))
            y += BAR + GAP
        y += GAP
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>\n"])


def _text(x: int, y: int, text: str, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
