"""What a cell of the picture of faults says."""

from __future__ import annotations

from benchmarks import plots
from benchmarks.results import Figure


def figure(*values: float, failures: int = 0) -> Figure:
    return Figure("a fault", "who", "s", list(values), ["1/2/1"] * len(values), ["never, 1/2/2"] * failures)


def said(main: Figure | None, beyond: Figure | None = None) -> tuple[str, str]:
    return plots.fate(main, beyond)[:2]


def test_the_pods_own_absence_is_not_counted_where_it_is_known():
    assert said(figure(4.0, 9.0, 5.0)) == ("5.0 s", "1/2/1")
    assert said(figure(4.0, 9.0, 5.0), figure(1.0, 6.0, 2.0)) == ("2.0 s", "1/2/1")


def test_who_never_trained_again_or_not_always_is_said_so():
    assert said(figure(failures=2)) == ("never", "")
    assert said(figure(5.0, 6.0, failures=1), figure(2.0, 3.0)) == ("2.5 s", "1 of 3: never")


def test_what_was_not_measured_is_a_dash():
    assert said(None) == said(figure()) == ("-", "")
