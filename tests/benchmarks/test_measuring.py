"""Contestants in turn; a run that fails, hangs or leaves something behind harms none of the others."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest

from benchmarks import measuring
from benchmarks.measuring import Case, Failed, Reading, Section, Setup, Terms, measure
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


def test_a_run_may_have_a_reading_for_one_row_and_a_reason_for_another() -> None:
    case = Case(
        "a", {"cold": "s", "warm": "s"}, lambda: {"cold": Reading(1.0, "1/1/1"), "warm": "never", "more": 2.0}
    )
    [cold, warm] = measured(section(case), repeats=1).figures
    assert (cold.values, cold.notes, warm.failures) == ([1.0], ["1/1/1"], ["never"])


def test_those_who_are_not_asked_for_do_not_run() -> None:
    log: list[str] = []
    it = section(*(Case(name, {"row": "s"}, noting(log, name)) for name in ("tini", "s6", "tin")))
    measured(it, repeats=1, who=("ti", "x"))
    assert log == ["tini", "tin"]


def test_extra_rows_are_taken_where_they_are_read() -> None:
    case = Case("a", {"whole": "s"}, lambda: {"whole": 1.0, "fewer": 0.5}, extra={"fewer": "s", "beyond": "s"})
    assert [one.row for one in measured(section(case), repeats=1).figures] == ["whole", "fewer"]


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


def test_no_run_is_begun_when_the_time_is_over() -> None:
    log: list[str] = []
    measured(section(Case("a", {"row": "s"}, noting(log, "a"))), until_s=time.monotonic() - 1)
    assert log == []
