"""The raw data of a section: what was measured, where, with which versions; kept as one small JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).with_name("results")
FORMAT = 1


class Refused(Exception):
    """Raw data that cannot be used for what was asked; a sentence for the user."""


@dataclass(slots=True)
class Figure:
    """All runs of one contestant in one row, in the order they were made."""

    row: str
    who: str
    unit: str
    values: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)  # of the minute before each run, failed ones too


@dataclass(slots=True, kw_only=True)
class Results:
    """One section, measured once."""

    section: str
    date: str  # UTC, as in 2026-11-21T23:00Z
    machine: str
    versions: dict[str, str]
    load: float  # of the minute before
    repeats: int
    command: str  # how to repeat it
    absent: dict[str, str] = field(default_factory=dict)  # contestants that are not here: why
    took_s: float = 0.0
    figures: list[Figure] = field(default_factory=list)

    def figure(self, row: str, who: str, unit: str) -> Figure:
        """The figure of this row and contestant, made when it is asked for first."""
        for figure in self.figures:
            if (figure.row, figure.who) == (row, who):
                return figure
        self.figures.append(Figure(row, who, unit))
        return self.figures[-1]

    def is_like(self, other: Results) -> bool:
        """Whether both may stand in one table: the same machine, the same versions."""
        return (self.machine, self.versions) == (other.machine, other.versions)


def machine() -> str:
    """What the figures were taken on, in a line."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{len(os.sched_getaffinity(0))} CPUs ({cpu}), {gib:.0f} GiB, Linux {platform.release()}"


def path_of(section: str, folder: Path = FOLDER) -> Path:
    return folder / f"{section}.json"


def save(results: Results, folder: Path = FOLDER) -> None:
    """Write a section's raw data, whole or not at all: one figure a line, so that changes can be read."""
    head = asdict(results)
    figures = head.pop("figures")
    lines = [_line({name: value for name, value in figure.items() if value != []}) for figure in figures]
    text = json.dumps({"format": FORMAT, **head}, ensure_ascii=False, indent=1)
    body = ",\n  ".join(lines)
    path = path_of(results.section, folder)
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(f'{text[:-2]},\n "figures": [\n  {body}\n ]\n}}\n', encoding="utf-8")
    beside.replace(path)


def _line(figure: Mapping[str, object]) -> str:
    return json.dumps(figure, ensure_ascii=False, separators=(",", ":"))


def load(section: str, folder: Path = FOLDER) -> Results | None:
    """A section's raw data; None if it was never measured.

    Raises:
        Refused: the file is none of ours.
    """
    path = path_of(section, folder)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Refused(f"{path} is no JSON ({error}); measure the section anew, or restore the file") from None
    return _results(read, path)


def _results(read: object, path: Path) -> Results:
    if not isinstance(read, Mapping) or read.get("format") != FORMAT:
        raise Refused(f"{path} is not in format {FORMAT} of this program; measure the section anew")
    fields = {name: value for name, value in read.items() if name not in {"format", "figures"}}
    try:
        return Results(**fields, figures=[Figure(**figure) for figure in read["figures"]])
    except (TypeError, KeyError) as error:
        raise Refused(f"{path} lacks what a section's raw data has ({error}); measure it anew") from None


def continued(earlier: Results | None, now: Results) -> Results:
    """The earlier raw data of a section, to be added to; `now` where there is none.

    Raises:
        Refused: it is of another machine, or of other versions.
    """
    if earlier is None:
        return now
    if earlier.is_like(now):
        earlier.absent = now.absent
        return earlier
    differ = sorted(set(earlier.versions.items()) ^ set(now.versions.items()))
    what = f"{earlier.machine}, here is {now.machine}" if earlier.machine != now.machine else f"{dict(differ)}"
    raise Refused(f"{now.section} cannot be continued: it was measured with {what}; leave out --continue")
