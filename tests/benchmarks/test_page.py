"""Raw data in files, and the page that is drawn of them: every section, measured or not, on whatever machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import page, results, survival, tables
from benchmarks.page import SECTIONS
from benchmarks.results import Figure, Refused, Results

ROW = survival.ROWS["pod-1"]
OURS = "trainer-launch, elastic"


def measured(section: str, *figures: Figure, machine: str = "2 CPUs (Model), 23 GiB", load: float = 0.1) -> Results:
    return Results(
        section=section, date="2026-11-22T01:10Z", machine=machine, versions={"torch": "2.13"}, load=load,
        repeats=1, command=f"make {section}", absent={"s6": "is not here"}, figures=list(figures),
    )  # fmt: skip


def fault(*values: float, starts: str = "1/2/1", beyond: float = 1.6) -> list[Figure]:
    whole = Figure(ROW.text, OURS, "s", list(values), [starts] * len(values))
    return [whole, Figure(survival.BEYOND, OURS, "s", [beyond] * len(values))]


def drawn(folder: Path) -> str:
    path = folder.parent / "RESULTS.md"
    page.write(folder, path)
    return path.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_what_was_written_is_read_again_and_a_figure_is_one_line(folder: Path) -> None:
    made = measured("idle", *(Figure("memory", who, "MB", [0.1] * 9, ["ü"], ["late"], [0.3]) for who in "abc"))
    results.save(made, folder)
    assert results.load("idle", folder) == made
    assert [path.name for path in folder.iterdir()] == ["idle.json"]
    assert sum('"who"' in line for line in (folder / "idle.json").read_text().splitlines()) == 3


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', json.dumps({"format": 1, "section": "x"})])
def test_a_file_of_another_format_is_refused_in_a_sentence(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "idle.json").write_text(text)
    with pytest.raises(Refused, match=r"idle.json is not the raw data of a section \(.*; measure it again"):
        results.load("idle", folder)


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (Figure("r", "w", "s"), "-"),
        (Figure("r", "w", "s", [1.0, 2.0, 3.0]), "2.00 (1.00 to 3.00)"),
        (Figure("r", "w", "s", [1.0], ["1/2/1", "1/2/1"]), "1.00; 1/2/1"),
        (Figure("r", "w", "s", [1.0], [], ["late"]), "1.00; failed 1 of 2: late"),
        (Figure("r", "w", "s", [], [], ["a", "b | c", "b | c"]), "**failed** 3 of 3: b / c"),
    ],
)
def test_a_cell_says_what_failed_beside_what_did_not(figure: Figure | None, text: str) -> None:
    assert tables.cell(figure) == text


def test_each_section_that_is_shown_is_on_the_page_also_where_nobody_measured_it(folder: Path) -> None:
    folder.mkdir()
    text = drawn(folder)
    shown = [section for section in SECTIONS if section.name not in survival.NAMES]
    assert all(f"## {section.title}" in text for section in shown)
    assert "## A fault in an elastic job" in text
    assert text.count("Not measured yet") == len(shown) + 2


def test_where_this_project_loses_stands_with_its_cause_behind_all_figures(folder: Path) -> None:
    results.save(measured("idle", Figure("memory (PSS)", "tini", "MB", [0.2])), folder)
    text = drawn(folder)
    assert "(#where-it-loses-and-why)" in text.partition("## ")[0]
    before, _, causes = text.partition("## Where it loses, and why")
    assert "## Cluster preflight" in before
    assert [line[:24] for line in causes.splitlines() if line.startswith("- ")] == ["- PID 1 while idle: The "]


def test_a_section_has_its_own_date_and_command_and_the_page_ends_with_machines_and_versions(folder: Path) -> None:
    figure = Figure("to the program's first line", "torchrun", "s", [0.2])
    results.save(measured("startup", figure), folder)
    text = drawn(folder)
    for word in (
        "|to the program's first line, s|0.200|",
        "2026-11-22 on [1]",
        '--only startup"',
        "1. 2 CPUs (Model)",
        "torch 2.13",
    ):
        assert word in text
    assert "Not measured: s6: is not here." in text
    assert "The machine was not idle" not in text
    results.save(measured("startup", figure, load=6.0), folder)
    assert "**The machine was not idle for startup" in drawn(folder)


def test_a_fault_measured_on_another_machine_stands_in_the_same_table_with_both_machines_below(
    folder: Path,
) -> None:
    results.save(measured("survival-pod-1", *fault(4.6)), folder)
    late = Figure(survival.ROWS["late"].text, OURS, "s", [2.0], ["1/1/1"])
    results.save(measured("survival-late", late, machine="8 CPUs (Model), 64 GiB"), folder)
    text = drawn(folder)
    assert text.count("|fault|") == 1
    assert "on [1], [2]" in text
    picture = (folder / "survival.svg").read_text()
    assert 'viewBox="0 0 800' in picture
    assert "4.60 s" in picture
    assert "2.00 s" in picture


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (fault(4.6), "4.60 (1/2/1)"),
        (fault(4.6, beyond=2.1), "4.60 (1/2/1) — **missed 1 of 1**"),
        (fault(4.6, 4.6, starts="2/2/2"), "4.60 (2/2/2) — **missed 2 of 2**"),
        ([Figure(ROW.text, OURS, "s", [], [], ["never, 1/2/2"])], "**never**"),
        ([], "-"),
    ],
)
def test_what_this_project_must_do_and_did_not_is_said(figures: list[Figure], text: str) -> None:
    assert survival.cell(ROW, OURS, measured("survival-pod-1", *figures)) == text


def test_the_page_of_this_repository_shows_its_raw_data(tmp_path: Path) -> None:
    shutil.copytree(results.FOLDER, tmp_path / "results")
    page.write(tmp_path / "results", tmp_path / "RESULTS.md")
    for path in (page.PAGE, *results.FOLDER.glob("*.svg")):
        anew = tmp_path / path.relative_to(page.PAGE.parent)
        assert path.read_text(encoding="utf-8") == anew.read_text(encoding="utf-8"), "make bench BENCH_ARGS=--draw"
