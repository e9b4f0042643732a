"""How fast pairs of nodes are, as a picture inside the report's page.

Each node has its place on a diagonal. The square left of one node and below another is the slowest test of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from trainer_launch.model.units import grouped
from trainer_launch.observability.html import clean
from trainer_launch.preflight.cluster.nodes import PairTests
from trainer_launch.preflight.fault_isolation import Pair
from trainer_launch.preflight.thresholds import MBYTE

_MOST_FIGURES = 16  # nodes: up to here each square has its figure
_WIDE_PX, _NARROW_PX = 44, 16  # of a square, with a figure and without
_MOST_PX = 4096  # of the picture, in a job so large that no name has room
_LETTER_PX, _MARGIN_PX = 7, 8
_LEAST_LETTER_PX = 8
_SLOW, _FAST = (33, 102, 172), (222, 235, 247)  # red, green, blue
_FAILED, _FAULTY, _UNTESTED = "#000000", "#d62728", "#f4f4f4"
_CENTERED = 'text-anchor="middle" dominant-baseline="central"'
_GBYTES = 10_000  # MB/s, from which on figures are in GB/s


def drawn(seen: PairTests) -> str:
    """The SVG element: a square for each tested pair, with a title; names; outlines around what is faulty."""
    names = [clean(name) for name in seen.names]
    side = _WIDE_PX if len(names) <= _MOST_FIGURES else min(_NARROW_PX, max(1, _MOST_PX // len(names)))
    left = _MARGIN_PX + _LETTER_PX * max(len(_short(name)) for name in names)
    width, height = left + side * len(names) + _MARGIN_PX, side * len(names) + 2 * _MARGIN_PX
    body = "\n".join((*_nodes(seen, names, side), *_squares(seen, names, side), *_outlines(seen, len(names), side)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        f'<g transform="translate({left} {_MARGIN_PX})">\n{body}\n</g>\n</svg>'
    )


def legend(seen: PairTests) -> str:
    """What the picture shows, in a sentence."""
    colors = "dark: slow; black: failed; outlined in red: faulty; empty: not tested"
    return f"Slowest test of each pair in {_unit(_slowest(seen))[0]}; {colors}."


def _short(name: str) -> str:
    """`node 3`, of a name that has the host behind it."""
    return name.partition(" (")[0]


def _slowest(seen: PairTests) -> Mapping[Pair, float]:
    """Each pair once, with the slowest of its tests in MB/s, 0 where one failed."""
    rates = grouped((test.ends, test.rate / MBYTE if test.is_whole else 0.0) for test in seen.tests)
    return {ends: min(its) for ends, its in rates.items()}


def _unit(rates: Mapping[Pair, float]) -> tuple[str, float]:
    return ("GB/s", 1000.0) if max(rates.values(), default=0.0) >= _GBYTES else ("MB/s", 1.0)


def _faulty_nodes(seen: PairTests) -> list[int]:
    return [*seen.faulty.nodes, *(node for node, _ in seen.faulty.rails)]


def _nodes(seen: PairTests, names: list[str], side: int) -> Iterator[str]:
    """A row for each node: its name, where its tests may be, and its number on the diagonal."""
    faulty = set(_faulty_nodes(seen))
    for node, name in enumerate(names):
        look = f'fill="{_FAULTY}" font-weight="bold"' if node in faulty else ""
        middle = side * node + side // 2
        yield _rect((0, node, node, 1), side, f'fill="{_UNTESTED}"')
        if side >= _LEAST_LETTER_PX or node in faulty:
            yield _text(-4, middle, _short(name), f'text-anchor="end" dominant-baseline="central" {look}')
        if side >= _LEAST_LETTER_PX:
            yield _text(middle, middle, str(node), f'{_CENTERED} font-size="{min(12, side // 2)}" {look}')


def _squares(seen: PairTests, names: list[str], side: int) -> Iterator[str]:
    rates = _slowest(seen)
    unit, size = _unit(rates)
    fastest = max(rates.values(), default=0.0) or 1.0
    for ends, rate in rates.items():
        column, row = min(ends), max(ends)
        figure = f"{rate / size:.4g}" if rate else "failed"
        title = f"{names[column]} - {names[row]}: {figure}{f' {unit}' if rate else ''}"
        yield _rect((column, row, 1, 1), side, f'fill="{_shade(rate / fastest)}" stroke="white"', title)
        if len(names) <= _MOST_FIGURES:
            color = "white" if rate < 0.5 * fastest else "black"
            look = f'{_CENTERED} font-size="11" fill="{color}" pointer-events="none"'
            yield _text(side * column + side // 2, side * row + side // 2, figure, look)


def _outlines(seen: PairTests, n_nodes: int, side: int) -> Iterator[str]:
    """Around the row and the column of a faulty node, and around the square of a faulty link."""
    look = f'fill="none" stroke="{_FAULTY}" stroke-width="2"'
    for node in _faulty_nodes(seen):
        yield _rect((0, node, node + 1, 1), side, look)
        yield _rect((node, node, 1, n_nodes - node), side, look)
    for ends in (*(link.ends for link in seen.faulty.links), *seen.faulty.unresolved):
        yield _rect((min(ends), max(ends), 1, 1), side, look)


def _shade(share: float) -> str:
    """The color of a rate, as a share of the fastest."""
    if not share:
        return _FAILED
    red, green, blue = (round(slow + share * (fast - slow)) for slow, fast in zip(_SLOW, _FAST, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _rect(place: tuple[int, int, int, int], side: int, look: str, title: str = "") -> str:
    """A rectangle; `place` is its column, row, width and height, in squares of `side` pixels."""
    left, top, width, height = (side * number for number in place)
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" {look}>{inside}</rect>'


def _text(left: int, top: int, words: str, look: str = "") -> str:
    return f'<text x="{left}" y="{top}" {look}>{escape(words)}</text>'
