"""Raw data as text: medians with their spread, failures, losses, tables that may not be mixed."""

from __future__ import annotations

import math

import pytest

from benchmarks import tables
from benchmarks.results import Figure, Results


def results(*figures: Figure, **more: object) -> Results:
    given = {
        "section": "startup",
        "date": "2026-11-22T01:10Z",
        "machine": "2 CPUs (Model), 23 GiB, Linux 6",
        "versions": {"torch": "2.13"},
        "load": 0.1,
        "repeats": 3,
        "command": "make bench",
    }
    return Results(**{**given, **more}, figures=list(figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (Figure("r", "w", "s"), "-"),
        (Figure("r", "w", "s", [1.0, 2.0, 3.0]), "2.00 (1.00 to 3.00) s"),
        (Figure("r", "w", "s", [1.0], ["1/2/1", "1/2/1"]), "1.00 s; 1/2/1"),
        (Figure("r", "w", "s", [1.0], [], ["late"]), "1.00 s; failed 1 of 2: late"),
        (Figure("r", "w", "s", [], [], ["a", "b | c", "b | c"]), "**failed** 3 of 3: b / c"),
    ],
)
def test_a_cell_says_what_failed_beside_what_did_not(figure: Figure | None, text: str) -> None:
    assert tables.cell(figure) == text


def test_rows_that_this_project_loses_are_told_with_the_cause() -> None:
    made = results(
        Figure("memory", "trainer-launch", "MB", [28.0]),
        Figure("memory", "trainer-launch, plain", "MB", [20.0]),
        Figure("memory", "tini", "MB", [0.1]),
        Figure("time", "trainer-launch", "s", [1.0]),
        Figure("time", "tini", "s", [0.95]),  # within the noise
        Figure("other", "trainer-launch", "s", [1.0]),
        Figure("other", "tini", "s", [0.5]),
    )
    assert tables.losses(made, {"memory": "Python."}, more_is_better=False) == [
        "- Python.",
        "  - memory: 28.0 MB trainer-launch; tini 0.100 MB",
        "  - memory: 20.0 MB trainer-launch, plain; tini 0.100 MB",
        "- The cause is not known.",
        "  - other: 1.00 s here; tini 0.500 s",
    ]


def test_conclusions_compare_with_the_best_other_launcher_and_apart_from_it_with_none() -> None:
    made = results(
        Figure("start", "trainer-launch", "s", [2.0]),
        Figure("start", "trainer-launch, plain", "s", [0.1]),  # another form, for other programs
        Figure("start", "torchrun", "s", [3.0]),
        Figure("start", "ft_launcher", "s", [4.0]),
        Figure("start", "0.2.0", "s", [1.0]),
        Figure("start", "shell", "s", [0.5]),
        Figure("recovery", "trainer-launch", "s", [1.0]),
        Figure("recovery", "torchrun", "s", [], [], ["never"]),
        Figure("wake-ups", "trainer-launch", "/s", [0.0]),
        Figure("wake-ups", "torchrun", "/s", [0.0]),
        Figure("memory", "trainer-launch", "MB", [10.0]),
        Figure("memory", "torchrun", "MB", [4.0]),
        Figure("alone", "trainer-launch", "s", [1.0]),
        Figure("failed", "trainer-launch", "s", [], [], ["late"]),
        Figure("failed", "torchrun", "s", [1.0]),
    )
    rows = tables.rows_of(made)
    launchers = tables.factors(made, rows, more_is_better=False)
    without = tables.factors(made, rows, more_is_better=False, without=True)
    assert launchers == {"start": 1.5, "recovery": math.inf, "wake-ups": 1.0, "memory": 0.4}
    assert without == {"start": 0.25}
    assert tables.conclusion("Start-up", launchers, without) == [
        "Start-up",
        "2: 1.5 to any factor (recovery)",
        "1",
        "1: 2.5 times (memory)",
        "1: 4 times (start)",
    ]
    assert tables.conclusion("Start-up", {}, {})[1:] == ["-", "-", "-", "-"]


def test_machines_and_versions_are_never_mixed_in_a_table() -> None:
    here, again = results(section="a"), results(section="b")
    elsewhere, newer = results(section="c", machine="8 CPUs"), results(section="d", versions={"torch": "2.14"})
    groups = tables.alike([here, elsewhere, again, newer])
    assert [[one.section for one in group] for group in groups] == [["a", "b"], ["c"], ["d"]]


def test_a_machine_with_other_work_is_told_so() -> None:
    quiet, busy = results(load=0.4), results(load=6.0, absent={"dlrover-run": "pip has none"})
    assert "Other work" not in tables.circumstances(quiet)
    told = tables.circumstances(busy)
    assert "Load 6.0 at the start" in told
    assert "The machine was not idle" in told
    assert "Not measured: dlrover-run: pip has none." in told
