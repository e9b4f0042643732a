"""Raw data as text: medians with their spread, and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.results import Figure, Results

OURS = "trainer-launch"


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - _magnitude(abs(value)))
    return f"{value:,.{digits}f}"


def _magnitude(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def median(values: Sequence[float]) -> str:
    """The median."""
    return number(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most behind it where they differ."""
    middle = median(values)
    least, most = number(min(values)), number(max(values))
    return middle if least == most else f"{middle} ({least} to {most})"


def cell(figure: Figure | None, show: Callable[[Sequence[float]], str] = spread) -> str:
    """One contestant in one row, without the unit; failed runs are counted."""
    if figure is None:
        return "-"
    tries = len(figure.values) + len(figure.failures)
    if not tries:
        return "-"
    if not figure.values:
        return f"**failed** {tries} of {tries}: {_most_common(figure.failures)}"
    text = cell_of(figure.values, figure.unit, show)
    if notes := sorted(set(figure.notes)):
        text += (" " if notes[0].startswith("of ") else "; ") + ", ".join(notes)
    if figure.failures:
        text += f"; failed {len(figure.failures)} of {tries}: {_most_common(figure.failures)}"
    return text


def cell_of(values: Sequence[float], unit: str, show: Callable[[Sequence[float]], str] = median) -> str:
    """Values without their unit; what has none is a count."""
    return show(values) if unit else f"{statistics.median(values):g}"


def _most_common(words: Sequence[str]) -> str:
    return max(dict.fromkeys(words), key=words.count).replace("|", "/")


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table; the first line is its head."""
    [head, *rows] = [[text or " " for text in line] for line in lines]
    every = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in every)


def table(
    results: Results,
    whos: Sequence[str],
    rows: Sequence[str] = (),
    show: Callable[[Sequence[float]], str] = spread,
) -> str:
    """Rows down, contestants across, in the order of `whos`; all rows, or these."""
    figures = {(figure.row, figure.who): figure for figure in results.figures}
    columns, units = columns_of([results], whos), {figure.row: figure.unit for figure in results.figures}
    lines = []
    for row in rows or rows_of(results):
        name = f"{row}, {units[row]}" if units.get(row) else row
        lines.append([name, *(cell(figures.get((row, who)), show) for who in columns)])
    return markdown([["", *columns], *lines])


def columns_of(group: Iterable[Results], whos: Sequence[str]) -> list[str]:
    """Of these contestants those that were measured, in this order."""
    measured = {figure.who for one in group for figure in one.figures}
    return [who for who in whos if who in measured]


def middle(figure: Figure) -> float | None:
    """The median; None where every run failed."""
    return statistics.median(figure.values) if figure.values else None


def rows_of(results: Results) -> list[str]:
    return list(dict.fromkeys(figure.row for figure in results.figures))


def quiet_limit(machine: str) -> float:
    """The load above which a machine had other work: half of its CPUs."""
    return int(machine.split()[0]) / 2


def circumstances(group: Sequence[Results], machines: Sequence[str]) -> str:
    """When, where and at which commit these were measured, and how to repeat it; `machines` ends the page."""
    dates = sorted(results.date[:10] for results in group)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    places = ", ".join(
        f"[{number}]" for number in sorted({machines.index(results.machine) + 1 for results in group})
    )
    commits = ", ".join(dict.fromkeys(results.versions.get(OURS, "?") for results in group))
    busy = [results.section for results in group if results.load > quiet_limit(results.machine)]
    sections = group[0].section if len(group) == 1 else group[0].section.partition("-")[0]
    repeat = f'`make bench BENCH_ARGS="--only {sections}"`'
    lines = [
        f"{when} on {places}, version {commits}. {repeat}",
        *([f"**The machine was not idle for {', '.join(busy)}: these are approximate.**"] if busy else []),
        *dict.fromkeys(f"Not measured: {who}: {why}." for results in group for who, why in results.absent.items()),
    ]
    return "  \n".join(lines)  # a break after each


def versions(measured: Iterable[Results]) -> str:
    """The versions of all that was measured beside this project."""
    by_name: dict[str, set[str]] = {}
    for results in measured:
        for name, version in results.versions.items():
            by_name.setdefault(name, set()).add(version)
    names = sorted(set(by_name) - {OURS})
    return ", ".join(f"{name} {' and '.join(sorted(by_name[name]))}" for name in names)
