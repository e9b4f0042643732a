"""RESULTS.md, drawn from the raw data of each section, whenever that was measured."""

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
from benchmarks.results import FOLDER, Results, load

PAGE = Path(__file__).with_name("RESULTS.md")
SECTIONS: tuple[Section, ...] = (
    startup.SECTION,
    recovery.SECTION,
    coordinator.SECTION,
    idle.SECTION,
    output.SECTION,
    mpi.SECTION,
    preflight.SECTION,
    preflight_faults.SECTION,
    incidents.SECTION,
    stragglers.SECTION,
    schedule.SECTION,
    keeping_state.SECTION,
    *survival.SECTIONS,
)
HEAD = """\
# Results

Written by `make bench` from the raw data in [results](results), which has more rows, peers and every single run.
Contestants run in turn (A B C A B C …) on one machine. A cell is the median; failed runs are counted separately.

## Conclusions

By how many times this project is better or worse than the best other launcher, and worse than a job without one.
Less than 1.1 times is a draw. In parentheses: the row with the largest factor."""


def write(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Draw all anew.

    Raises:
        Refused: the raw data of a section has another format.
    """
    conclusions = [["section", "wins", "draws", "loses", "loses against no launcher"]]
    parts: list[str] = []
    faults: list[Results] = []
    survived: tuple[dict[str, float], ...] = ({}, {})
    for section in SECTIONS:
        results = load(section.name, folder)
        is_fault = section.name in survival.NAMES
        if results is None:
            why = section.missing() or "nobody ran it"
            parts += [] if is_fault else [f"## {section.title}\n\n{section.about}\n\nNot measured yet: {why}."]
            continue
        rows = survival.rows(results) if is_fault else tables.rows_of(results)
        more = section.more_is_better
        factors = [tables.factors(results, rows, more_is_better=more, without=without) for without in (False, True)]
        if is_fault:
            faults.append(results)
            for all_faults, of_fault in zip(survived, factors, strict=True):
                all_faults.update(of_fault)
            continue
        if any(factors):
            conclusions.append(tables.conclusion(section.title, *factors))
        shown = tables.table(results, section.beside or section.whos, section.shows, tables.median)
        parts += [f"## {section.title}", section.about, shown]
        parts.append(tables.circumstances(results))
    if any(survived):
        conclusions.append(tables.conclusion("Survival", *survived))
    text = "\n\n".join([HEAD, tables.markdown(conclusions), *parts, *_survival(faults)])
    page.write_text(f"{text}\n", encoding="utf-8")


def _survival(faults: Sequence[Results]) -> list[str]:
    """The faults, those of one machine and the same versions in one table."""
    groups: dict[str, list[Results]] = {}
    for results in faults:
        groups.setdefault(tables.where(results), []).append(results)
    parts = ["## Survival", survival.ABOUT]
    for group in groups.values():
        parts += [survival.table(group), tables.circumstances(*group)]
    return parts if groups else [*parts, "Not measured yet."]
