"""The page of a rehearsal: what it says, and how a real browser shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rehearsal import scenes
from tests.rehearsal.browser import Browser, browser_in
from tests.rehearsal.told import Tale, finished
from trainer_launch.observability.html import clean
from trainer_launch.rehearsal.html_page import page
from trainer_launch.rehearsal.rehearsal_report import RehearsalReport

SCENES = ("small", "bad", "crowd", "nasty", "without_steps", "lost")


def scene(name: str) -> RehearsalReport:
    report: RehearsalReport = getattr(scenes, name)()
    return report


def head_of(report: RehearsalReport) -> list[tuple[str, str]]:
    return re.findall(r'<header class="(.*?)"><h1>(.*?)</h1>', page(report))


def test_the_verdict_comes_first() -> None:
    assert head_of(scenes.small()) == [("good", "Survived 3 faults")]
    assert head_of(scenes.bad()) == [("bad", "FAILED: the script did not resume from its checkpoint")]
    assert head_of(scenes.nasty()) == [("bad", "The job failed")]
    assert head_of(scenes.without_steps()) == [("bad", "1 fault never happened")]
    assert head_of(finished(Tale("a").start(0.0), 2.0).report()) == [("good", "The job succeeded")]
    assert head_of(Tale("a").start(0.0).report(2.0, 130)) == [("plain", "Stopped before the job ended")]
    assert page(scenes.bad()).index("Failed checks") < page(scenes.bad()).index("Pods over time")


def test_a_pod_that_never_came_back_is_named_and_drawn_as_such() -> None:
    text = page(scenes.lost())
    assert (
        "Failed after 14.0 s (TrainJobFailed): charlm-large-node-0-1: deleted, and not created again; its node"
        in text
    )
    states = re.findall(r'title="(\w+), attempt \d+, ([^"]*)"', text)
    assert ("Terminated", "9.0 s to 14.0 s") in states, "until the end"
    legend = text.partition('class="legend"')[2].partition("</ul>")[0]
    assert "terminated, not to be created again" in legend
    assert "restarting" not in legend


def test_each_fault_and_each_pod_has_a_row() -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", page(scenes.small()))
    cells = [re.findall(r">([^<]*)</td>", row) for row in rows]
    assert cells[1] == [
        "1", "11.6 s", "kill worker node=1 at=step:40", "worker-0", "3.9 s", "10",
        "reached step 40, resumed from step 30",
    ]  # fmt: skip
    assert cells[-1] == ["demo-worker-0", "Succeeded", "2", "0", "0", "reason=Succeeded exit=0"]


def test_nothing_comes_from_elsewhere_and_nothing_runs() -> None:
    for name in SCENES:
        text = page(scene(name))
        assert "<script" not in text
        assert not re.search(r"<(link|iframe|object|embed|img)|@import|url\(|\bon\w+=\"|(src|href)=\"", text)
        assert "default-src 'none'" in text


def test_what_others_wrote_is_escaped_cleaned_of_secrets_and_cut() -> None:
    text = page(scenes.nasty())
    assert "hunter2" not in text
    assert "[redacted]" in text
    assert "&lt;script&gt;" in text
    assert not any(mark in text for mark in ("\x1b", "\u202e"))
    assert "y" * 210 not in text
    assert clean("a\x00b\x1b[31mred\x1b[0m\n") == "a bred"


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return browser_in(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("name", ["small", "crowd", "nasty", "without_steps"])
def test_a_browser_shows_all_of_it_without_overlap_on_wide_and_narrow_screens(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"{name}.html"
    report = scene(name)
    file.write_text(page(report), encoding="utf-8")
    found = browser.measure(file, (1280, 390), dark=name == "small")
    assert set(found) == {1280, 390}
    for width, seen in found.items():
        assert seen["dark"] == (name == "small")
        assert (seen["page"], seen["outside"], seen["cut"]) == (width, [], [])
        assert set(seen["overlaps"].values()) == {0}, seen["overlaps"]
        assert seen["labels"] == [], "labels that reach into their values"
        assert seen["broken"] == [] or width < 640, "names on several lines"
        assert len(seen["lanes"]) == len(report.pods)
        assert len({tuple(lane[:2]) for lane in [*seen["lanes"], *seen["steps"]]}) == 1, "one axis of time for all"
        assert all(lane[1] > 0.6 * width and lane[2] >= 12 for lane in seen["lanes"])
        assert seen["smallest"] >= 11
        assert seen["faintest"] >= 4.5
        if name != "nasty":  # there one fault is for all pods
            assert len(seen["hits"]) == len(report.happened)
        assert seen["lines"] >= (name != "without_steps")
