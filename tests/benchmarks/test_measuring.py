"""Contestants in turn; a run that fails, hangs or leaves something behind harms none of the others."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest

from benchmarks import measuring
from benchmarks.measuring import Case, Failed, Section, Setup, Terms, measure
from benchmarks.results import Results


def section(*cases: Case, is_warmed: bool = False) -> Section:
    @contextlib.contextmanager
    def opened() -> Iterator[Setup]:
        yield Setup(cases, {"s6": "is not here"})

    return Section(name="x", title="X", about="", open=opened, versions=dict, whos=("a", "b"), is_warmed=is_warmed)


def measured(it: Section, repeats: int = 3, until_s: float = float("inf"), who: tuple[str, ...] = ()) -> Results:
    made = Results(section="x", date="", machine="2 CPUs", versions={}, load=0.0, repeats=repeats, command="")
    measure(it, made, Terms(repeats=repeats, until_s=until_s, who=who))
    return made


def noting(log: list[str], name: str) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        log.append(name)
        return {"row": len(log)}

    return run


def test_contestants_run_in_turn_and_the_warm_up_is_thrown_away() -> None:
    log: list[str] = []
    it = section(*(Case(name, {"row": "s"}, noting(log, name)) for name in "abc"), is_warmed=True)
    made = measured(it, repeats=2)
    assert "".join(log) == "abc" * 3
    assert {one.who: one.values for one in made.figures} == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}
    assert made.absent == {"s6": "is not here"}


def test_a_run_that_fails_is_noted_and_the_others_go_on() -> None:
    def fails() -> Mapping[str, float]:
        raise Failed("it ended with 1")

    made = measured(section(Case("a", {"row": "s"}, fails), Case("b", {"row": "s"}, lambda: {"row": 1.0})))
    assert made.figure("row", "a", "s").failures == ["it ended with 1"] * 2, "what never works is not tried thrice"
    assert made.figure("row", "b", "s").values == [1.0] * 3


def test_a_run_that_hangs_ends_at_its_deadline() -> None:
    def hangs() -> Mapping[str, float]:
        subprocess.run(("sleep", "600"), check=True)
        return {}

    began_s = time.monotonic()
    made = measured(section(Case("a", {"row": "s"}, hangs, limit_s=0.3)), repeats=1)
    assert time.monotonic() - began_s < 30
    assert made.figures[0].failures == ["not done within 0.3 s"]


def test_nothing_is_left_of_a_run_but_what_runs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "KEPT", set())
    left: list[subprocess.Popen[bytes]] = []

    def leaves() -> Mapping[str, float]:
        left.append(subprocess.Popen(("sleep", "600")))
        return {"row": 1.0}

    with subprocess.Popen(("sleep", "600")) as shared:
        measuring.keep_running()
        measured(section(Case("a", {"row": "s"}, leaves)), repeats=1)
        assert psutil.pid_exists(shared.pid)
        shared.kill()
    assert not psutil.pid_exists(left[0].pid)
    left[0].wait()
