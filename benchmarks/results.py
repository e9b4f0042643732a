"""The raw data of a section: what was measured, where, with which versions; kept as one small JSON file."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).with_name("results")


class Refused(Exception):
    """What was asked cannot be done; a sentence for the user."""


class Figure(msgspec.Struct, omit_defaults=True):
    """All runs of one contestant in one row, in the order they were made."""

    row: str
    who: str
    unit: str
    values: list[float] = []
    notes: list[str] = []
    failures: list[str] = []
    loads: list[float] = []  # of the minute before each run, failed ones too


class Results(msgspec.Struct, kw_only=True):
    """One section, measured once."""

    format: Literal[1] = 1
    section: str
    date: str  # UTC, as in 2026-11-21T23:00Z
    machine: str
    versions: dict[str, str]
    load: float  # of the minute before
    repeats: int
    command: str  # how to repeat it
    absent: dict[str, str] = {}  # contestants that are not here: why
    took_s: float = 0.0
    figures: list[Figure] = []

    def figure(self, row: str, who: str, unit: str) -> Figure:
        """The figure of this row and contestant, made when it is asked for first."""
        for figure in self.figures:
            if (figure.row, figure.who) == (row, who):
                return figure
        self.figures.append(Figure(row, who, unit))
        return self.figures[-1]


def machine() -> str:
    """What the figures were taken on, in a line."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{len(os.sched_getaffinity(0))} CPUs ({cpu}), {gib:.0f} GiB, Linux {platform.release()}"


def save(results: Results, folder: Path = FOLDER) -> None:
    """Write a section's raw data, whole or not at all: one figure a line, so that changes can be read."""
    head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(results, figures=[])), indent=1)
    figures = b",\n  ".join(map(msgspec.json.encode, results.figures))
    folder.mkdir(exist_ok=True)
    new = folder / f"{results.section}.new"
    new.write_bytes(head.removesuffix(b"[]\n}") + b"[\n  " + figures + b"\n ]\n}\n")
    new.replace(folder / f"{results.section}.json")


def load(section: str, folder: Path = FOLDER) -> Results | None:
    """A section's raw data; None if it was never measured.

    Raises:
        Refused: the file has another format.
    """
    path = folder / f"{section}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise Refused(f"{path} is not the raw data of a section ({error}); measure it again") from None
