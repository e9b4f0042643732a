"""The page: every section, measured or not, whoever measured it when; which sections are asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import page, results, survival
from benchmarks.results import Figure, Refused, Results
from benchmarks.sections import SECTIONS, chosen

ROW = survival.ROWS["pod-1"]
OURS = "trainer-launch, fixed"


def measured(section: str, *figures: Figure, machine: str = "2 CPUs (Model), 23 GiB, Linux 6") -> Results:
    return Results(
        section=section, date="2026-11-22T01:10Z", machine=machine, versions={"torch": "2.13"}, load=0.1, repeats=1,
        command=f"make {section}", figures=list(figures),
    )  # fmt: skip


def fault(*values: float, starts: str = "1/2/1", beyond: float = 1.6) -> list[Figure]:
    whole = Figure(ROW.text, OURS, "s", list(values), [starts] * len(values))
    return [whole, Figure(survival.BEYOND, OURS, "s", [beyond] * len(values))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results"


def drawn(folder: Path) -> str:
    path = folder.parent / "RESULTS.md"
    page.write(SECTIONS, folder, path)
    return path.read_text()


def test_every_section_is_on_the_page_also_where_nobody_measured_it(folder: Path) -> None:
    text = drawn(folder)
    assert all(f"## {section.title}" in text for section in SECTIONS if section.name not in survival.NAMES)
    assert "## Survival" in text
    assert text.count("Not measured yet") == len(SECTIONS) - len(survival.NAMES) + 1


def test_each_section_has_its_own_machine_versions_date_and_how_to_repeat(folder: Path) -> None:
    results.save(measured("idle", Figure("memory (PSS)", "tini", "MB", [0.2])), folder)
    text = drawn(folder)
    for word in ("0.200 MB", "2 CPUs (Model)", "torch 2.13", "2026-11-22T01:10Z", "`make idle`", "Load 0.1"):
        assert word in text


def test_faults_of_different_machines_stand_in_tables_of_their_own(folder: Path) -> None:
    results.save(measured("survival-pod-1", *fault(4.6)), folder)
    results.save(measured("survival-hang", Figure(survival.ROWS["hang"].text, OURS, "s", [5.4], ["1/1/1"])), folder)
    late = Figure(survival.ROWS["late"].text, OURS, "s", [2.0], ["1/1/1"])
    results.save(measured("survival-late", late, machine="8 CPUs (Model), 64 GiB"), folder)
    text = drawn(folder).partition("## Survival")[2]
    assert text.count("| fault |") == 2
    assert (text.count("2 CPUs (Model)"), text.count("8 CPUs (Model)")) == (1, 1)
    assert "| `survival-hang` | 2026-11-22T01:10Z | 1 | 0.1 at the start |" in text


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (fault(4.6), "4.60 s, +1.60, 1/2/1"),
        (fault(4.6, beyond=2.1), "4.60 s, +2.10, 1/2/1 — **missed 1 of 1**"),
        (fault(4.6, 4.6, starts="2/2/2"), "4.60 s, +1.60, 2/2/2 — **missed 2 of 2**"),
        ([Figure(ROW.text, OURS, "s", [], [], ["never, 1/2/2"])], "**never** 1 of 1: never, 1/2/2"),
        ([], "-"),
    ],
)
def test_what_this_project_must_do_and_did_not_is_said(figures: list[Figure], text: str) -> None:
    assert survival.cell(ROW, OURS, measured("survival-pod-1", *figures)) == text


def test_a_peer_promises_nothing() -> None:
    figures = [dataclasses.replace(one, who="torchrun, fixed") for one in fault(60.0, starts="3/3/3")]
    assert "missed" not in survival.cell(ROW, "torchrun, fixed", measured("survival-pod-1", *figures))


def test_sections_are_asked_for_by_name_and_all_faults_by_one_word() -> None:
    assert [section.name for section in chosen("idle,startup")] == ["startup", "idle"]
    assert tuple(section.name for section in chosen("survival")) == survival.NAMES
    assert [section.name for section in chosen(None) if section.name in survival.NAMES] == ["survival-worker-1"]
    assert "schedule" not in [section.name for section in chosen(None)], "it takes a quarter of an hour"
    assert [section.name for section in chosen("schedule")] == ["schedule"]
    with pytest.raises(Refused, match="'nothing' is none of startup"):
        chosen("nothing")


def test_the_page_of_this_repository_shows_its_raw_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    anew = tmp_path / "RESULTS.md"
    page.write(SECTIONS, results.FOLDER, anew)
    assert page.PAGE.read_text(encoding="utf-8") == anew.read_text(encoding="utf-8"), "make bench BENCH_ARGS=--draw"
