"""The history as it is written: steps thinned out without losing what counts, everything else whole."""

from __future__ import annotations

from trainer_launch.rehearsal.report.history import Entry, Recorder, What


def recorder() -> Recorder:
    return Recorder("TrainJob", "j", ("a", "b"))


def step(at_s: float, number: int, pod: str = "a") -> Entry:
    return Entry(at_s=at_s, what=What.STEP, pod=pod, step=number)


def kept(made: Recorder) -> list[int]:
    return [one.step for one in made.history({}, {}).entries if one.step is not None]


def test_of_many_steps_some_are_kept_and_always_the_last() -> None:
    made = recorder()
    for number in range(10_000):
        made.add(step(number / 1000, number))
    made.finish(10.0, succeeded=True)
    found = kept(made)
    assert found[0] == 0
    assert found[-1] == 9_999
    assert len(found) < 300


def test_the_last_step_before_anything_else_and_the_first_after_a_beginning_are_kept() -> None:
    made = recorder()
    for number in range(50):
        made.add(step(1 + number / 1000, number))
    made.add(Entry(at_s=1.05, what=What.FAULT, text="kill worker"))
    made.add(Entry(at_s=1.06, what=What.GENERATION, pod="a", attempt=2))
    made.add(step(1.061, 50))
    made.add(step(1.062, 51))
    made.finish(2.0, succeeded=True)
    assert kept(made) == [0, 49, 50, 51]


def test_where_steps_go_back_both_are_kept() -> None:
    made = recorder()
    for when, number in enumerate((1, 2, 3, 4, 3, 4, 5)):
        made.add(step(1 + when / 10_000, number))
    made.finish(2.0, succeeded=None)
    assert kept(made) == [1, 4, 3, 5]


def test_pods_that_come_later_are_named() -> None:
    made = recorder()
    made.add(Entry(at_s=0.0, what=What.POD_STARTED, pod="c", attempt=1))
    for number in range(9):
        made.add(step(1.0 + number / 1000, number, "c"))
    assert kept(made) == [0]
    made.finish(2.0, succeeded=False)
    whole = made.history({"a": "hello"}, {})
    assert (whole.pods, whole.succeeded, whole.ended_s, whole.seen) == (("a", "b", "c"), False, 2.0, {"a": "hello"})
    assert kept(made) == [0, 8]


def test_what_is_told_late_stands_where_it_belongs() -> None:
    made = recorder()
    made.add(Entry(at_s=2.0, what=What.FAULT, text="x"))
    made.add(step(1.9, 7))
    assert [one.what for one in made.history({}, {}).entries] == [What.STEP, What.FAULT]
