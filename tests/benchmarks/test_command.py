"""`python -m benchmarks`: what it measures in what order, and what it refuses before it begins."""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks import results
from benchmarks.measuring import Case, Section, Setup
from benchmarks.results import Refused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order; raw data goes to a folder of the test's own, and no page is drawn."""
    monkeypatch.setattr("benchmarks.page.write", lambda _: None)
    monkeypatch.setattr(command, "save", lambda made: results.save(made, tmp_path))
    monkeypatch.setattr(command, "load", lambda name: results.load(name, tmp_path))
    monkeypatch.setattr(command, "settle", lambda _: None)
    return []


def section(name: str, log: list[str], *, fails: bool = False, takes_turns: bool = False) -> Section:
    def run() -> Mapping[str, float]:
        log.append(name)
        return {"row": 1.0}

    @contextlib.contextmanager
    def opened() -> Iterator[Setup]:
        if fails:
            raise OSError("no such device")
        yield Setup([Case("a", {"row": "s"}, run)])

    return Section(
        name=name, title=name, about="", open=opened, versions=dict, whos=("a",), takes_turns=takes_turns
    )


def asked(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"repeats": 2, "minutes": math.inf, "who": (), "goes_on": False, **more})


def test_a_section_that_cannot_begin_stops_none_of_the_others(log: list[str], tmp_path: Path) -> None:
    assert command.measure_all([section("bad", log, fails=True), section("good", log)], asked()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good.json"]
    made = results.load("good", tmp_path)
    assert made is not None
    assert (made.figures[0].values, made.repeats) == ([1.0, 1.0], 2)


def test_a_section_is_continued_only_where_it_was_begun(log: list[str], tmp_path: Path) -> None:
    command.measure_all([section("x", log)], asked())
    command.measure_all([section("x", log)], asked(goes_on=True))
    made = results.load("x", tmp_path)
    assert made is not None
    assert made.repeats == 4
    made.machine = "64 CPUs (Other), 512 GiB"
    results.save(made, tmp_path)
    with pytest.raises(Refused, match="64 CPUs"):
        command.measure_all([section("first", log), section("x", log)], asked(goes_on=True))
    assert "first" not in log


def test_what_is_measured_of_some_contestants_alone_is_printed_and_not_kept(
    log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.measure_all([section("x", log)], asked(who=("a",)))
    assert list(tmp_path.iterdir()) == []
    assert "| row | 1.00 s |" in capsys.readouterr().out


def test_an_unknown_section_is_one_sentence() -> None:
    words = (sys.executable, "-m", "benchmarks", "--only", "nothing")
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: --only 'nothing' is none of startup, ")
    assert done.stderr.count("\n") == 1
