"""--plot: how fast pairs of nodes are, drawn by matplotlib in a process of its own.

Up to 64 nodes: one square for each pair. Of more, one square for each node, with its slowest test, since nearly all
pairs are untested; rows below show the tests of those that are at fault.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
from typing import Any

from trainer_launch.host import deadline_subprocess, files, logs
from trainer_launch.model import Json
from trainer_launch.model.units import counted
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.pair_results import PairTests
from trainer_launch.preflight.fault_isolation import Pair
from trainer_launch.preflight.thresholds import MBYTE

_LIMIT_S = 120.0  # the first time, matplotlib looks at all fonts
NO_MATPLOTLIB = 3
CANNOT_WRITE = 4
_WHYS = {NO_MATPLOTLIB: "it needs matplotlib: pip install 'trainer-launch[report]'"}  # by the child's exit code
LARGEST_MATRIX = 64
_WRITTEN_IN = 16  # nodes: up to here each square has its figure
_ROWS = 12  # of those at fault
_PARTNERS = 12  # of one of them
_RED = "#d62728"
_UNTESTED = "#e8e8e8"
_SHADES = "viridis"  # slow is dark


def plot(path: str, tests: PairTests | None) -> None:
    """Draw it, or say why not: no job ends for want of a picture."""
    if tests is None or not tests.tests:
        logs.warn(f"--plot: {path} was not written: no pairs of nodes were tested")
        return
    streams = deadline_subprocess.Streams(text=json.dumps(drawing(tests)))
    drawn = deadline_subprocess.run((sys.executable, __file__, path), None, _LIMIT_S, streams)
    if drawn.code != 0:
        last = (drawn.failure or drawn.out.strip() or drawn.err.strip()).splitlines()[-1:] or ["no word"]
        logs.warn(f"--plot: {path} was not written: {_WHYS.get(drawn.code or 1, last[0][:200])}")


def drawing(seen: PairTests) -> dict[str, Json]:
    """Each pair once, with the slowest of its tests in MB/s, or null where one failed."""
    worst: dict[Pair, float | None] = {}
    for test in seen.tests:
        rate = test.rate / MBYTE if test.is_whole else None
        before = worst.get(test.ends, rate)
        worst[test.ends] = None if rate is None or before is None else min(rate, before)
    links = [link.ends for link in seen.faulty.links]
    return {
        "title": _title(seen),
        "names": list(seen.names),
        "tests": [[one, other, rate] for (one, other), rate in worst.items()],
        "faulty": [*seen.faulty.nodes, *(node for node, _ in seen.faulty.rails)],
        "links": [list(ends) for ends in (*links, *seen.faulty.unresolved)],
    }


def _title(seen: PairTests) -> str:
    names = seen.names
    blamed = [names[node] for node in seen.faulty.nodes]
    blamed += [f"{names[node]}, rail {', '.join(map(str, rails))}" for node, rails in seen.faulty.rails]
    blamed += [f"{names[link.ends[0]]} - {names[link.ends[1]]}" for link in seen.faulty.links]
    blamed += [f"{names[one]} - {names[other]} (unresolved)" for one, other in seen.faulty.unresolved]
    what = f"faulty: {listed(blamed)}" if blamed else "no fault found"
    return f"Bandwidth between {len(names)} nodes, {counted(len(seen.tests), 'test')}: {what}"


# -- the picture --------------------------------------------------------------------------------


def main() -> int:
    """Read JSON, draw, write to the path that is the argument; the exit code says what was missing."""
    path = sys.argv[1]
    told = json.load(sys.stdin)
    try:
        import matplotlib as mpl
    except ImportError:
        return NO_MATPLOTLIB
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = ""  # the same picture is the same file
    figure = drawn(told)
    ending = os.path.splitext(path)[1][1:].lower() or "png"
    try:
        save(figure, path, ending)
    except (OSError, ValueError) as problem:  # the folder; an ending that is no format
        sys.stdout.write(getattr(problem, "strerror", None) or str(problem).splitlines()[0])
        return CANNOT_WRITE
    return 0


def save(figure: Any, path: str, ending: str) -> None:
    """Write beside it and rename: a reader sees all of it or the old one."""
    image = io.BytesIO()
    figure.savefig(image, format=ending, dpi=110, bbox_inches="tight", metadata=None)
    files.replace(os.path.realpath(path), image.getvalue(), 0o644)


def drawn(told: Any) -> Any:
    """The figure; `told` has names, tests (node, node, MB/s or null), faulty nodes, faulty links and a title."""
    from matplotlib.figure import Figure

    tests = {(min(one, other), max(one, other)): rate for one, other, rate in told["tests"]}
    rates = [rate for rate in tests.values() if rate is not None]
    unit, size = ("GB/s", 1000.0) if max(rates, default=0) >= 10_000 else ("MB/s", 1.0)
    scaled = {ends: None if rate is None else rate / size for ends, rate in tests.items()}
    picture = Picture(told, scaled, unit)
    if picture.count <= LARGEST_MATRIX:
        side = min(13.0, 4.5 + 0.28 * picture.count)
        figure = Figure(figsize=(side + 1.5, side))
        above = figure.subplots()
        picture.matrix(above)
    else:
        rows = picture.rows()
        height = 0.5 + 0.42 * len(rows)
        figure = Figure(figsize=(11, 9.5 + (height if rows else 0)))
        if rows:
            above, below = figure.subplots(2, 1, height_ratios=(9.5, height))
            picture.details(below, rows)
        else:
            above = figure.subplots()
        picture.grid(above)
    above.set_title("\n".join(textwrap.wrap(told["title"], 100)), fontsize=11)
    return figure


class Picture:
    """What is drawn: pairs and their rates in `unit`, None where a test failed."""

    def __init__(self, told: Any, tests: dict[tuple[int, int], float | None], unit: str) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import Normalize

        self.names: list[str] = told["names"]
        self.count = len(self.names)
        self.tests = tests
        self.unit = unit
        self.faulty: dict[int, None] = dict.fromkeys(told["faulty"])
        self.links: list[tuple[int, int]] = [(min(ends), max(ends)) for ends in told["links"]]
        self.fastest = max((rate for rate in tests.values() if rate is not None), default=1.0) or 1.0
        self.shades = colormaps[_SHADES].with_extremes(bad=_UNTESTED)
        self.norm = Normalize(0, self.fastest)

    def matrix(self, axes: Any) -> None:
        """One square for each pair, above and below the diagonal alike."""
        values = [[math.nan] * self.count for _ in range(self.count)]
        for (one, other), rate in self.tests.items():
            if rate is not None:
                values[one][other] = values[other][one] = rate
        image = axes.imshow(values, cmap=self.shades, norm=self.norm)
        for (one, other), rate in self.tests.items():
            for row, column in ((one, other), (other, one)):
                self._mark(axes, row, column, rate, shown(rate) if self.count <= _WRITTEN_IN else "", 8)
        font = max(5, min(10, 420 // self.count))
        axes.set_xticks(range(self.count), [str(node) for node in range(self.count)], fontsize=font, rotation=90)
        axes.set_yticks(range(self.count), [self._label(node) for node in range(self.count)], fontsize=font)
        for node in self.faulty:
            self._outline(axes, -0.5, node - 0.5, self.count, 1)
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                labels[node].set(color=_RED, fontweight="bold")
        for one, other in self.links:
            self._outline(axes, other - 0.5, one - 0.5, 1, 1)
            self._outline(axes, one - 0.5, other - 0.5, 1, 1)
        axes.set_xlabel(f"node; grey: not tested, red: failed, outlined: faulty; {len(self.tests)} pairs")
        axes.figure.colorbar(image, ax=axes, label=self.unit, shrink=0.7)

    def grid(self, axes: Any) -> None:
        """One square for each node: its slowest test, but nobody is shown by a test with one that is at fault."""
        across = math.ceil(math.sqrt(self.count))
        down = math.ceil(self.count / across)
        values = [[math.nan] * across for _ in range(down)]
        failed = set()
        for (one, other), rate in self.tests.items():
            for node, partner in ((one, other), (other, one)):
                row, column = divmod(node, across)
                if partner in self.faulty and node not in self.faulty:
                    continue
                if rate is None:
                    failed.add(node)
                elif not values[row][column] <= rate:  # nan: the first one
                    values[row][column] = rate
        image = axes.imshow(values, cmap=self.shades, norm=self.norm, aspect="equal")
        for node in failed:
            row, column = divmod(node, across)
            self._fill(axes, row, column)
        for node in self.faulty:
            row, column = divmod(node, across)
            self._outline(axes, column - 0.5, row - 0.5, 1, 1)
        for node in list(self.faulty)[:_ROWS]:
            row, column = divmod(node, across)
            right = column < across * 0.7
            axes.annotate(
                self.names[node],
                (column, row),
                xytext=(14 if right else -14, 10),
                textcoords="offset points",
                ha="left" if right else "right",
                color="black",
                fontsize=9,
                fontweight="bold",
                arrowprops={"arrowstyle": "-", "color": "black"},
                bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": _RED, "alpha": 0.9},
            )
        step = max(1, down // 16)
        rows = range(0, down, step)
        axes.set_yticks(list(rows), [f"node {row * across}" for row in rows], fontsize=8)
        axes.set_xticks(
            list(range(0, across, step)), [f"+{column}" for column in range(0, across, step)], fontsize=8
        )
        axes.set_xlabel(
            "each square is a node: its slowest test with a healthy node; red: a test failed, outlined: faulty; "
            f"{len(self.tests)} of {self.count * (self.count - 1) // 2} pairs tested",
            fontsize=9,
        )
        axes.figure.colorbar(image, ax=axes, label=self.unit, shrink=0.7)

    def rows(self) -> list[tuple[str, list[tuple[str, float | None]]]]:
        """Those at fault, each with its tests."""
        found = []
        for node in list(self.faulty)[:_ROWS]:
            its = [(ends, rate) for ends, rate in self.tests.items() if node in ends]
            tests = [(f"with {ends[0] + ends[1] - node}:", rate) for ends, rate in its[:_PARTNERS]]
            found.append((self.names[node], tests))
        links = self.links[: _ROWS - len(found)]
        return found + [(f"{self.names[link[0]]} - {link[1]}", [("", self.tests.get(link))]) for link in links]

    def details(self, axes: Any, rows: list[tuple[str, list[tuple[str, float | None]]]]) -> None:
        """One row for each that is at fault, one square for each of its tests."""
        across = max(4, *(len(tests) for _, tests in rows))
        values = [[math.nan] * across for _ in rows]
        for number, (_, tests) in enumerate(rows):
            for column, (_, rate) in enumerate(tests):
                values[number][column] = math.nan if rate is None else rate
        axes.imshow(values, cmap=self.shades, norm=self.norm, aspect="auto")
        for number, (_, tests) in enumerate(rows):
            for column, (partner, rate) in enumerate(tests):
                self._mark(axes, number, column, rate, f"{partner} {shown(rate)}".strip(), 9)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9, color=_RED, fontweight="bold")
        axes.set_xticks([])
        axes.set_xlabel(f"tests of faulty nodes and links, in {self.unit}", fontsize=9)

    def _mark(self, axes: Any, row: int, column: int, rate: float | None, text: str, size: int) -> None:
        """A failure in red, and the words: black on what is light, white on what is dark."""
        if rate is None:
            self._fill(axes, row, column)
        color = "black" if rate is not None and rate > 0.6 * self.fastest else "white"
        if text:
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)

    def _fill(self, axes: Any, row: int, column: int) -> None:
        self._outline(axes, column - 0.5, row - 0.5, 1, 1, facecolor=_RED, edgecolor="none")

    def _outline(self, axes: Any, left: float, top: float, width: float, height: float, **look: Any) -> None:
        from matplotlib.patches import Rectangle

        look = look or {"fill": False, "edgecolor": "black", "linewidth": 2, "clip_on": False}
        axes.add_patch(Rectangle((left, top), width, height, **look))

    def _label(self, node: int) -> str:
        """The number alone where there is no room for names."""
        return self.names[node] if self.count <= 2 * _WRITTEN_IN or node in self.faulty else str(node)


def shown(rate: float | None) -> str:
    """A rate in three digits, or four before the point."""
    if rate is None:
        return "failed"
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


if __name__ == "__main__":
    sys.exit(main())
