"""RESULTS.md and its pictures, drawn from the raw data of each section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    coordinator,
    idle,
    incidents,
    keeping_state,
    mpi,
    output,
    picture,
    preflight,
    preflight_faults,
    recovery,
    schedule,
    startup,
    stragglers,
    survival,
    tables,
)
from benchmarks.measuring import Section
from benchmarks.results import FOLDER, Figure, Results, load

PAGE = Path(__file__).with_name("RESULTS.md")
SECTIONS: tuple[Section, ...] = (
    *survival.SECTIONS,
    schedule.SECTION,
    keeping_state.SECTION,
    recovery.SECTION,
    startup.SECTION,
    coordinator.SECTION,
    incidents.SECTION,
    stragglers.SECTION,
    preflight_faults.SECTION,
    idle.SECTION,
    output.SECTION,
    mpi.SECTION,
    preflight.SECTION,
)
HEAD = """\
# Results

`make bench` writes this page from the [raw data](results), which has more rows, more peers and every single run.
Contestants run in turn (A B C A B C …) on one machine; a cell is the median. Memory is PSS.
At the end: [where trainer-launch loses](#where-it-loses-and-why)."""


def write(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Draw the page anew, and one picture per section beside the raw data.

    Raises:
        Refused: the raw data of a section has another format.
    """
    measured = {section.name: results for section in SECTIONS if (results := load(section.name, folder))}
    machines = list(dict.fromkeys(results.machine for results in measured.values()))
    faults = [measured[name] for name in survival.NAMES if name in measured]
    parts = ["## A fault in an elastic job", survival.ABOUT, *_survival(faults, folder, page, machines)]
    for section in SECTIONS:
        if section.name in survival.NAMES:
            continue
        parts += [f"## {section.title}", section.about]
        if section.name in measured:
            parts += _section(section, measured[section.name], folder, page, machines)
        else:
            parts += [f"Not measured yet: {section.missing() or 'nobody ran it'}."]
    causes = [
        f"- {section.title}: {section.loses_because}"
        for section in SECTIONS
        if section.loses_because and section.name in measured
    ]
    parts += ["## Where it loses, and why", "\n".join(causes) or "Not measured yet."]
    where = [f"{number}. {text}" for number, text in enumerate(machines, 1)]
    below = ["## Machines and versions", "\n".join(where), tables.versions(measured.values())] if where else []
    text = "\n\n".join([HEAD, *parts, *below])
    page.write_text(f"{text}\n", encoding="utf-8")


def _section(section: Section, results: Results, folder: Path, page: Path, machines: list[str]) -> list[str]:
    whos = section.beside or section.whos
    parts = [tables.table(results, whos, section.shows, tables.median)]
    if section.pictured:
        groups = [(row, _bars([f for f in results.figures if f.row == row], whos)) for row in section.pictured]
        parts.append(_picture(section.name, section.title, groups, folder, page))
    return [*parts, tables.circumstances([results], machines)]


def _survival(faults: Sequence[Results], folder: Path, page: Path, machines: list[str]) -> list[str]:
    if not faults:
        return ["Not measured yet."]
    groups = []
    for results in faults:
        [row] = survival.rows(results)
        groups.append((row, _bars([f for f in results.figures if f.row == row], survival.COLUMNS)))
    image = _picture("survival", "Seconds from the fault until all train again", groups, folder, page)
    return [survival.table(faults), image, tables.circumstances(faults, machines)]


def _bars(figures: Sequence[Figure], whos: Sequence[str]) -> list[picture.Bar]:
    bars = []
    for who in whos:
        for figure in figures:
            if figure.who == who:
                value = tables.middle(figure)
                text = f"{tables.cell_of(figure.values, figure.unit)} {figure.unit}" if figure.values else "never"
                bars.append(picture.Bar(who, value, text.rstrip(), who.startswith(tables.OURS)))
    return bars


def _picture(
    name: str, title: str, groups: Sequence[tuple[str, Sequence[picture.Bar]]], folder: Path, page: Path
) -> str:
    path = folder / f"{name}.svg"
    path.write_text(picture.drawn(groups), encoding="utf-8")
    return f"![{title}]({path.relative_to(page.parent)})"
