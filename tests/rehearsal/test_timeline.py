"""Every fault comes once, at its time, its step or its line."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.grammar import Fault
from trainer_launch.rehearsal.faults.injection import Timeline


def begin(*texts: str) -> Timeline:
    return Timeline(map(grammar.parse, texts))


def texts(faults: list[Fault]) -> list[str]:
    return [fault.text for fault in faults]


def test_a_fault_comes_at_its_time_once() -> None:
    timeline = begin("kill pod at=2s", "add node at=1s")
    assert timeline.due_s() == 1.0
    come = timeline.come(at_s=0.9)
    assert come == []
    come = timeline.come(at_s=1.0)
    assert texts(come) == ["add node at=1s"]
    assert timeline.due_s() == 2.0
    come = timeline.come(at_s=60.0)
    assert texts(come) == ["kill pod at=2s"]
    assert timeline.due_s() is None
    assert timeline.come(at_s=90.0) == []


def test_a_step_that_was_jumped_over_counts_as_reached() -> None:
    timeline = begin("kill worker at=step:40", "kill pod at=step:60")
    come = timeline.come(step=39)
    assert come == []
    come = timeline.come(step=50)
    assert texts(come) == ["kill worker at=step:40"]
    come = timeline.come(step=40)  # after a restart
    assert come == []
    assert texts(timeline.waiting) == ["kill pod at=step:60"]


def test_a_line_is_looked_through_for_the_pattern_up_to_a_length() -> None:
    timeline = begin(r"kill pod at=line:loss\s+nan", "add node at=1h")
    assert any(timeline.patterns)
    come = timeline.come(line="x" * MAX_LINE + "loss nan")
    assert come == []
    come = timeline.come(line="12:00 loss   nan!")
    assert len(come) == 1
    assert not any(timeline.patterns)
    assert timeline.come(line="loss nan") == []


def test_a_pattern_that_fits_an_empty_line_waits_for_a_line() -> None:
    timeline = begin("kill pod at=line:x*")
    assert timeline.come(at_s=5.0) == timeline.come(step=5) == []
    assert len(timeline.come(line="")) == 1


events = st.lists(
    st.one_of(
        st.floats(0, 1e6).map(lambda at_s: {"at_s": at_s}),
        st.integers(0, 100).map(lambda step: {"step": step}),
        st.text(max_size=30).map(lambda line: {"line": line}),
        st.sampled_from(["go", "loss nan"]).map(lambda line: {"line": line}),
    ),
    max_size=30,
)
given_faults = st.lists(
    st.sampled_from(
        ["add node at=3s", "kill pod at=line:go", "kill worker at=step:7", "term pod", "partition at=1h"]
    ),
    max_size=6,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(given_faults, events)
def test_no_fault_comes_twice_and_none_is_lost(given: list[str], happens: list) -> None:
    timeline = begin(*given)
    asked = sorted(texts(timeline.waiting))
    came: list[str] = []
    for event in happens:
        came += texts(timeline.come(**event))
    assert sorted([*came, *texts(timeline.waiting)]) == asked
