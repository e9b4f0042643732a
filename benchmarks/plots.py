"""Pictures of a section: bars with their spread, lines over nodes, a grid of faults. Small PNGs on white."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import Section
from benchmarks.results import Figure, Results
from benchmarks.tables import OURS, columns_of, number, rows_of

OUR_COLOUR, THEIR_COLOUR, INK = "#d9480f", "#7c93ab", "#222222"
DPI = 90
COLOURS = 64


def draw(section: Section, results: Results, folder: Path) -> str | None:
    """One panel of bars for each row that the section shows; the file's name, None without matplotlib."""
    rows = [row for row in rows_of(results) if not section.shown or row in section.shown]
    panels = [
        (row, found)
        for row in rows
        if (found := [f for who in section.whos for f in results.figures if (f.row, f.who) == (row, who)])
    ]
    plt = _pyplot()
    if plt is None or not panels:
        return None
    height = sum(len(found) for _, found in panels) * 0.24 + len(panels) * 0.5
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, height), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": [len(found) + 1 for _, found in panels]},
    )  # fmt: skip
    for ax, (row, found) in zip(axes[:, 0], panels, strict=True):
        _bars(ax, row, found)
    return _save(plt, figure, folder, section.name)


def _bars(ax, row: str, found: Sequence[Figure]) -> None:
    for place, one in enumerate(found):
        if not one.values:
            ax.text(0, place, "  failed", va="center", color=INK, fontsize=8)
            continue
        middle = statistics.median(one.values)
        ax.barh(place, middle, color=OUR_COLOUR if one.who.startswith(OURS) else THEIR_COLOUR, height=0.7)
        ax.plot([min(one.values), max(one.values)], [place, place], color=INK, linewidth=1)
        text = f"  {number(middle)} {one.unit}"
        ax.text(max(middle, max(one.values)), place, text, va="center", color=INK, fontsize=8)
    ax.set_yticks(range(len(found)), [one.who for one in found], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set_xlim(left=0)
    ax.set_title(row, fontsize=9, loc="left", color=INK)
    ax.tick_params(axis="x", labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def draw_survival(group: Sequence[Results], whos: Sequence[str], beyond: str, folder: Path, nth: int) -> str | None:
    """A grid: faults down, contestants across; a cell has the seconds, by its colour how many, and the starts.

    Where there is a figure of the row `beyond`, the kubelet's pause is not in the seconds.
    """
    plt = _pyplot()
    columns = columns_of(group, whos)
    if plt is None or not columns:
        return None
    figure, ax = plt.subplots(figsize=(1.2 * len(columns) + 2.2, 0.42 * len(group) + 1.3), layout="constrained")
    for down, one in enumerate(group):
        for across, who in enumerate(columns):
            figures = {found.row: found for found in one.figures if found.who == who}
            text, starts, colour = fate(figures.get(_fault(one)), figures.get(beyond))
            ax.add_patch(plt.Rectangle((across - 0.5, down - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(across, down - 0.13, text, ha="center", va="center", fontsize=8, color=INK)
            ax.text(across, down + 0.24, starts, ha="center", va="center", fontsize=6, color=INK)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(len(group) - 0.5, -0.5)
    ax.set_yticks(range(len(group)), [_fault(one) for one in group], fontsize=8)
    ax.set_xticks(range(len(columns)), [who.replace(", ", "\n") for who in columns], fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(
        "seconds until all that are left train again, without the 3 s until a kubelet starts a pod anew; "
        "small: how often each pod was started",
        fontsize=8, color=INK,
    )  # fmt: skip
    return _save(plt, figure, folder, f"survival-{nth}" if nth else "survival")


def _fault(one: Results) -> str:
    return one.figures[0].row if one.figures else one.section


def fate(main: Figure | None, beyond: Figure | None) -> tuple[str, str, str]:
    """What a cell says, the starts below it, and its colour."""
    if main is None or not (main.values or main.failures):
        return "-", "", "#f1f3f5"
    if not main.values:
        return "never", "", "#e8590c"
    middle = statistics.median(beyond.values if beyond and beyond.values else main.values)
    starts = " or ".join(sorted(set(main.notes)))
    if main.failures:
        tries = len(main.values) + len(main.failures)
        return f"{middle:.1f} s", f"{len(main.failures)} of {tries}: never", "#ffa94d"
    return f"{middle:.1f} s", starts, "#8ce99a" if middle < 2 else "#c3fae8" if middle < 7 else "#ffec99"


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(plt, figure, folder: Path, name: str) -> str:
    """On white, so that a dark page shows it as a card; few colours keep it small."""
    path = folder / "plots" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    with io.BytesIO() as drawn:
        figure.savefig(drawn, dpi=DPI, facecolor="white")
        plt.close(figure)
        from PIL import Image

        with Image.open(drawn) as image:
            image.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return f"plots/{name}.png"
