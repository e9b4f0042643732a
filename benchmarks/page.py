"""RESULTS.md and its pictures, drawn from the raw data of each section, whenever that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import contestants, plots, survival, tables
from benchmarks.measuring import Section
from benchmarks.results import FOLDER, Results, load

PAGE = Path(__file__).with_name("RESULTS.md")
HEAD = """\
# Results

Written by `make bench` from the raw data in [results](results). [README.md](README.md) explains each section and
what it needs. Contestants run in turn (A B C A B C …) on the same machine. A cell is the median, with minimum and
maximum in parentheses; failed runs are counted separately. Below each table: where this project loses, and why.

## Conclusions

By how many times this project is better or worse than the best other launcher, and worse than a job without one
(bash, bare mpirun, no init, cat). Less than 1.1 times is a draw. In parentheses: the row with the largest factor.
`any factor`: all others failed, or one of the two needs nothing at all."""


def write(sections: Sequence[Section], folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Draw all anew.

    Raises:
        Refused: the raw data of a section is none of ours.
    """
    measured = {section.name: load(section.name, folder) for section in sections}
    parts = [f"{HEAD}\n\n{_conclusions(sections, measured)}"]
    for section in sections:
        results = measured[section.name]
        if section.name in survival.NAMES:
            continue
        parts.append(_section(section, results, page.parent) if results else _unmeasured(section))
    faults = [found for name in survival.NAMES if (found := measured.get(name))]
    parts.append(_survival(faults, page.parent))
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _conclusions(sections: Sequence[Section], measured: Mapping[str, Results | None]) -> str:
    lines = [["section", "wins", "draws", "loses", "loses against no launcher"]]
    faults: tuple[dict[str, float], ...] = ({}, {})
    for section in sections:
        results = measured[section.name]
        if results is None:
            continue
        is_fault = section.name in survival.NAMES
        rows = survival.rows(results) if is_fault else tables.rows_of(results)
        more = section.more_is_better
        found = [tables.factors(results, rows, more_is_better=more, without=without) for without in (False, True)]
        if is_fault:
            for all_of, one in zip(faults, found, strict=True):
                all_of.update(one)
        elif any(found):
            lines.append(tables.conclusion(section.title, *found))
    if any(faults):
        lines.append(tables.conclusion("Survival", *faults))
    return tables.markdown(lines)


def _unmeasured(section: Section) -> str:
    return f"## {section.title}\n\n{section.about}\n\nNot measured yet: {section.missing() or 'nobody ran it'}."


def _section(section: Section, results: Results, folder: Path) -> str:
    parts = [f"## {section.title}", section.about]
    if picture := plots.draw(section, results, folder):
        parts.append(f"![{section.title}]({picture})")
    parts.append(tables.table(results, section.whos))
    if lost := tables.losses(results, section.causes, more_is_better=section.more_is_better):
        parts.append("Where this project loses:\n\n" + "\n".join(lost))
    parts.append(tables.circumstances(results))
    return "\n\n".join(parts)


def _survival(faults: Sequence[Results], folder: Path) -> str:
    parts = ["## Survival", survival.ABOUT]
    if not faults:
        parts.append("Not measured yet.")
    for number, group in enumerate(tables.alike(faults)):
        if picture := plots.draw_survival(group, contestants.NAMES, survival.BEYOND, folder, number):
            parts.append(f"![Survival]({picture})")
        parts.append(survival.table(group))
        parts.append(tables.circumstances_of(group))
    return "\n\n".join(parts)
