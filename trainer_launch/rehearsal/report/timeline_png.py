"""Draw a rehearsal: JSON of `rehearsal.drawing` on stdin, the picture at the path that is the argument."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from itertools import pairwise
from typing import Any

from trainer_launch.preflight.children.heatmap import CANNOT_WRITE, NO_MATPLOTLIB, save

_WIDE = 13.0  # inches
_LINE = 0.2  # inches that a line of text takes
_INK, _SOFT, _MARK, _IDLE = "#1a1c1f", "#5b626b", "#b3261e", "#c3c9d1"
_TONES = {"good": "#0b6b4d", "bad": "#a8321d", "plain": _INK}
_MARK_ROWS = 6
_MARK_WIDE = 0.027  # of the time, that a mark takes
_NUMBERED = 0.02  # of the time: shorter segments have no number
_LEGEND = (
    "colour and number: attempt; upright stripes: init, slanted: terminating; red line: restarting; "
    "black bar: hit by a fault; pale red: no new step"
)
_CHARS = 150  # of a line of text, as wide as the picture


def main() -> int:
    """Read, draw, write; the exit code says what was missing."""
    told = json.load(sys.stdin)
    try:
        import matplotlib as mpl
    except ImportError:
        return NO_MATPLOTLIB
    mpl.use("Agg")
    mpl.rcParams["text.parse_math"] = False  # a dollar is a dollar
    warnings.filterwarnings("ignore", message="Glyph")  # what the font lacks is a box
    try:
        save(drawn(told), sys.argv[1], "png")
    except OSError as problem:
        sys.stdout.write(problem.strerror or str(problem))
        return CANNOT_WRITE
    return 0


def drawn(told: Any) -> Any:
    """The figure: words, lanes with faults above, steps, tables."""
    from matplotlib.figure import Figure

    head = [line for one in (*told["about"], *told["broken"]) for line in textwrap.wrap(one, _CHARS)]
    rows = _packed(
        [at_s / told["end_s"] for at_s, _, _ in told["faults"]], bool(told["faults"] and told["faults"][0][2])
    )
    above = 0.27 * (max(rows, default=-1) + 1)
    each = 0.32 if len(told["lanes"]) <= 16 else 0.19
    tables = [_lines(table) for table in told["tables"] if table["rows"]]
    heights = [
        0.45 + _LINE * len(head),
        above + each * max(1, len(told["lanes"])),
        2.2 if told["curve"] else 0.3,
        *(_LINE * (len(lines) + 1) for lines in tables),
    ]
    figure = Figure(figsize=(_WIDE, sum(heights) + 0.35 * len(heights)), facecolor="white")
    parts = figure.subplots(len(heights), 1, height_ratios=heights, gridspec_kw={"hspace": 0.02})
    figure.subplots_adjust(left=0.1, right=0.985, top=0.995, bottom=0.005)
    gap = 0.35 / figure.get_figheight()
    place = 1.0 - 0.1 / figure.get_figheight()
    for axes, height in zip(parts, heights, strict=True):
        share = height / figure.get_figheight()
        axes.set_position((0.1, place - share, 0.885, share))
        place -= share + gap
    _words(parts[0], head, title=told["title"], colour=_TONES[told["tone"]])
    _lanes(parts[1], told, rows, above / each)
    _steps(parts[2], told)
    for axes, lines in zip(parts[3:], tables, strict=True):
        _words(axes, lines[1:], title=lines[0], colour=_INK, small=True)
    return figure


def _packed(places: list[float], spoken: bool) -> list[int]:
    """A row for each mark: one each where it is written out, else so that those of a row do not touch."""
    ends = [-1.0] * _MARK_ROWS
    rows = []
    for number, place in enumerate(places):
        free = [row for row, end in enumerate(ends) if place >= end + _MARK_WIDE]
        row = number if spoken else free[0] if free else min(range(_MARK_ROWS), key=ends.__getitem__)
        if not spoken:
            ends[row] = place
        rows.append(row)
    return rows


def _words(axes: Any, lines: list[str], *, title: str, colour: str, small: bool = False) -> None:
    axes.axis("off")
    points = 72.0
    style = {"fontsize": 8.5, "family": "monospace"} if small else {"fontsize": 10}
    common = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points", "va": "top"}
    size = 12 if small else 20
    axes.annotate(title, (0.012, 1.0), xytext=(0, 0), fontsize=size, fontweight="bold", color=colour, **common)
    top = 0.3 if small else 0.42
    for number, line in enumerate(lines):
        down = -(top + _LINE * number) * points
        axes.annotate(line, (0.012, 1.0), xytext=(0, down), color=_INK, **style, **common)


def _lanes(axes: Any, told: Any, rows: list[int], above: float) -> None:
    lanes, end_s = told["lanes"], told["end_s"]
    for number, lane in enumerate(lanes):
        _lane(axes, told, number, lane["segments"])
        at = [at_s for at_s, _ in lane["hits"]]
        axes.vlines(at, number - 0.5, number + 0.5, color="white", linewidth=4.5, zorder=4)
        axes.vlines(at, number - 0.5, number + 0.5, color=_INK, linewidth=2.5, zorder=5)
        for at_s, over_s in lane["hits"]:
            if over_s is not None:
                axes.plot([at_s, over_s], [number + 0.44] * 2, color=_INK, linewidth=3, zorder=5)
    each = above / (max(rows, default=0) + 1)
    for (at_s, number, text), row in zip(told["faults"], rows, strict=True):
        height = -0.5 - above + (row + 0.5) * each
        axes.plot([at_s, at_s], [height, len(lanes) - 0.5], color=_SOFT, linewidth=0.7, linestyle=":", zorder=1)
        bubble = {"boxstyle": "circle,pad=0.18" if len(number) < 3 else "round,pad=0.2", "fc": _INK, "ec": "white"}
        style = {
            "color": "white",
            "fontsize": 7.5,
            "fontweight": "bold",
            "ha": "center",
            "va": "center",
            "zorder": 6,
        }
        axes.text(at_s, height, number, bbox=bubble, **style)
        is_left = at_s < 0.55 * end_s
        shown = textwrap.shorten(text, 90, placeholder="...") if text else ""
        side = {"ha": "left" if is_left else "right", "va": "center", "fontsize": 9, "color": _INK, "zorder": 6}
        place = {"xytext": (10 if is_left else -10, 0), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(shown, (at_s, height), **place, **side)
    axes.set_ylim(len(lanes) - 0.4, -0.5 - above)
    common = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 8, "color": _SOFT}
    axes.annotate(_LEGEND, (0, 0), xytext=(0, -3), va="top", **common)
    small = 9 if len(lanes) <= 16 else 7
    names = [lane["name"] if len(lane["name"]) <= 22 else lane["name"][:21] + "…" for lane in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=small, family="monospace")
    _axis(axes, told, shown=not told["curve"])
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def _lane(axes: Any, told: Any, lane: int, segments: Any) -> None:
    colours, is_small = told["colours"], len(told["lanes"]) > 16
    looks = {
        "running": {"edgecolor": "white", "linewidth": 0.6},
        "stopping": {"facecolor": "white", "hatch": "/////", "linewidth": 0.6},
        "init": {"facecolor": "white", "edgecolor": _SOFT, "hatch": "|||||", "linewidth": 0.6},
        "waiting": {"facecolor": "#f5f6f8", "edgecolor": _IDLE, "linewidth": 0.8},
    }
    for doing, look in looks.items():
        mine = [one for one in segments if one[2] == doing]
        fills = [colours[(max(1, attempt) - 1) % len(colours)][0] for *_, attempt in mine]
        shown = look | {"running": {"facecolors": fills}, "stopping": {"edgecolors": fills}}.get(doing, {})
        spans = [(begin_s, until_s - begin_s) for begin_s, until_s, *_ in mine]
        if spans:
            axes.broken_barh(spans, (lane - 0.42, 0.84), zorder=2, **shown)
    downs = [one for one in segments if one[2] == "down"]
    axes.hlines([lane] * len(downs), [one[0] for one in downs], [one[1] for one in downs], color=_MARK, zorder=2)
    for begin_s, until_s, doing, attempt in segments if lane == 0 or not is_small else ():
        if doing == "running" and until_s - begin_s >= _NUMBERED * told["end_s"]:
            style = {"fontsize": 6.5 if is_small else 8.5, "fontweight": "bold", "ha": "center", "zorder": 3}
            ink = colours[(max(1, attempt) - 1) % len(colours)][1]
            axes.text((begin_s + until_s) / 2, lane, str(attempt), color=ink, va="center_baseline", **style)


def _steps(axes: Any, told: Any) -> None:
    if not told["curve"]:
        axes.axis("off")
        text = "Steps are unknown: print lines such as 'step 40', or call trainer_launch.report(step=40)."
        axes.text(0, 0.5, text, transform=axes.transAxes, color=_SOFT, fontsize=9, va="center")
        return
    for begin_s, until_s in told["still"]:
        axes.axvspan(begin_s, until_s, color=_MARK, alpha=0.13, linewidth=0)
    for attempt, points in told["curve"]:
        colour = told["colours"][(attempt - 1) % len(told["colours"])][0]
        times, steps = zip(*points, strict=True)
        axes.plot(times, steps, color=colour, linewidth=2, marker="o" if len(points) == 1 else None, markersize=4)
    for (_, one), (_, after) in pairwise(told["curve"]):
        axes.plot(*zip(one[-1], after[0], strict=True), color=_MARK, linewidth=1.2, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step", fontsize=9, color=_SOFT)
    axes.yaxis.set_major_locator(_whole())
    axes.tick_params(labelsize=9, colors=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.7)
    _axis(axes, told, shown=True)


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4, integer=True)


def _axis(axes: Any, told: Any, *, shown: bool) -> None:
    axes.set_xlim(0, told["end_s"])
    places = [at_s for at_s, _ in told["ticks"]]
    axes.set_xticks(places, [text for _, text in told["ticks"]] if shown else [""] * len(places), fontsize=9)


def _lines(table: Any) -> list[str]:
    """A table as lines of text, its title first; what is too long is cut."""
    rows = [table["columns"], *table["rows"]]
    widths = [min(46, max(len(row[column]) for row in rows)) for column in range(len(table["columns"]))]
    widths[-1] = _CHARS + 15 - sum(widths[:-1]) - 2 * len(widths)  # all the room that is left
    made = [
        "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    return [table["title"], *(line.rstrip() for line in made), *filter(None, [table["more"]])]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
