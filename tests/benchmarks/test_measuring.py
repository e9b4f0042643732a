"""`python -m benchmarks`: contestants in turn; a run that fails, hangs or leaves something harms no other."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

import benchmarks.__main__ as command
from benchmarks import measuring, results
from benchmarks.measuring import Case, Failed, Section, Setup
from benchmarks.page import SECTIONS
from benchmarks.results import Results
from benchmarks.survival import NAMES

Run = Callable[[], Mapping[str, float]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Raw data goes to a folder of the test's own, and no page is drawn."""
    monkeypatch.setattr("benchmarks.page.write", lambda: None)
    monkeypatch.setattr(command, "save", lambda made: results.save(made, tmp_path))
    monkeypatch.setattr(command, "settle", lambda _: None)
    return tmp_path


def section(name: str = "x", limit_s: float = 60.0, **runs: Run) -> Section:
    def opened() -> Setup:
        if not runs:
            raise OSError("no such device")
        cases = [Case(who, {"row": "s"}, run, limit_s) for who, run in runs.items()]
        return Setup(cases, {"s6": "is not here"})

    return Section(name=name, title=name, about="", open=opened, versions=dict, whos=tuple(runs))


def measured(it: Section, repeats: int, folder: Path) -> Results:
    assert command.measure_all([it], repeats, ()) == 0
    made = results.load(it.name, folder)
    assert made is not None
    return made


def test_contestants_run_in_turn(folder: Path) -> None:
    log: list[str] = []

    def noting(name: str) -> Mapping[str, float]:
        log.append(name)
        return {"row": len(log)}

    a, b, c = (functools.partial(noting, name) for name in "abc")
    made = measured(section(a=a, b=b, c=c), 2, folder)
    assert "".join(log) == "abcabc"
    assert {one.who: one.values for one in made.figures} == {"a": [1, 4], "b": [2, 5], "c": [3, 6]}
    assert (made.repeats, made.absent) == (2, {"s6": "is not here"})


def test_a_run_that_fails_or_hangs_is_noted_and_the_others_go_on(folder: Path) -> None:
    def fails() -> Mapping[str, float]:
        raise Failed("it ended with 1")

    def hangs() -> Mapping[str, float]:
        subprocess.run(("sleep", "600"), check=True)
        return {}

    made = measured(section(limit_s=0.3, a=fails, b=hangs, c=lambda: {"row": 1.0}), 3, folder)
    failures = {one.who: one.failures for one in made.figures}
    assert failures["a"] == ["it ended with 1"] * 2, "what never works is not tried thrice"
    assert failures["b"] == ["not done within 0.3 s"] * 2
    assert made.figure("row", "c", "s").values == [1.0] * 3


def test_nothing_is_left_of_a_run_but_what_runs_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "KEPT", set())
    left: list[subprocess.Popen[bytes]] = []

    def leaves() -> Mapping[str, float]:
        left.append(subprocess.Popen(("sleep", "600")))
        return {"row": 1.0}

    with subprocess.Popen(("sleep", "600")) as shared:
        measuring.keep_running()
        measured(section(a=leaves), 1, folder)
        assert psutil.pid_exists(shared.pid)
        shared.kill()
    assert not psutil.pid_exists(left[0].pid)
    left[0].wait()


def test_a_section_that_cannot_begin_stops_none_of_the_others(folder: Path) -> None:
    assert command.measure_all([section("bad"), section("good", a=lambda: {"row": 1.0})], 1, ()) == 1
    assert [path.name for path in folder.iterdir()] == ["good.json"]


def test_what_is_measured_of_some_contestants_alone_is_printed_and_not_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.measure_all([section(a=lambda: {"row": 1.0}, b=lambda: {"row": 2.0})], 1, ("a",))
    assert list(folder.iterdir()) == []
    assert "| |a|\n|---|---|\n|row, s|1.00|" in capsys.readouterr().out


def test_sections_are_asked_for_by_name_and_all_faults_by_one_word() -> None:
    assert [section.name for section in command.chosen("idle,startup")] == ["idle", "startup"]
    assert tuple(section.name for section in command.chosen("survival")) == NAMES
    quick = [section.name for section in command.chosen(None)]
    assert {section.name for section in SECTIONS} - set(quick) == {"schedule", "keeping-state", *NAMES[1:]}, (
        "they take hours"
    )


def test_an_unknown_section_is_one_sentence() -> None:
    words = (sys.executable, "-m", "benchmarks", "--only", "nothing")
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: --only 'nothing' is none of survival-")
    assert done.stderr.count("\n") == 1
