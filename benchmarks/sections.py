"""All sections, in the order of the page."""

from __future__ import annotations

from benchmarks import (
    coordinator,
    idle,
    incidents,
    mpi,
    output,
    preflight,
    recovery,
    schedule,
    startup,
    survival,
)
from benchmarks.measuring import Section
from benchmarks.results import Refused

SECTIONS: tuple[Section, ...] = (
    startup.SECTION,
    recovery.SECTION,
    coordinator.SECTION,
    idle.SECTION,
    output.SECTION,
    mpi.SECTION,
    preflight.SECTION,
    incidents.SECTION,
    schedule.SECTION,
    *survival.SECTIONS,
)


def chosen(only: str | None, sections: tuple[Section, ...] = SECTIONS) -> list[Section]:
    """The sections that are asked for by name, `survival` for all its rows; without names: those of `make bench`.

    Raises:
        Refused: there is none of that name.
    """
    if only is None:
        return [section for section in sections if section.is_by_default]
    wanted = [word.strip() for word in only.split(",")]
    for word in wanted:
        if not any(_is_named(section, word) for section in sections):
            raise Refused(f"--only {word!r} is none of {', '.join(section.name for section in sections)}")
    return [section for section in sections if any(_is_named(section, word) for word in wanted)]


def _is_named(section: Section, word: str) -> bool:
    return section.name == word or section.name.startswith(f"{word}-")
