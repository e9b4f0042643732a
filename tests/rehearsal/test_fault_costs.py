"""From what happened to what people are told: the pods' timelines, steps, downtime, repeated steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rehearsal.told import Tale, finished, restarted
from trainer_launch.rehearsal.history import KEPT, FaultReport, History, HistoryEntry, Recorder, What
from trainer_launch.rehearsal.rehearsal_report import effect, report_of


def near(value: float, within: float = 1e-6) -> Any:
    """Any: pairs with it may be compared."""
    return pytest.approx(value, abs=within)


def fault_of(tale: Tale, ended_s: float = 9.0) -> FaultReport:
    """The only fault of a job that then succeeds."""
    (fault,) = finished(tale, ended_s).report().faults
    return fault


def timeline(tale: Tale, pod: int = 0, took_s: float | None = None) -> list[tuple[str, float, float, int]]:
    segments = tale.report(took_s).pods[pod].timeline
    return [(segment.state, segment.begin_s, segment.end_s, segment.attempt) for segment in segments]


def test_a_pod_waits_checks_runs_is_stopped_is_away_and_runs_again() -> None:
    tale = Tale("a").add(1.0, What.STATUS, "a", text="Init").start(2.5)
    tale.stop(5.0, "a").end(6.0, "a", 143, "Restarting").start(8.0, "a").end(9.0, "a", 0).condition(9.0)
    assert timeline(tale, took_s=12.0) == [
        ("Pending", 0.0, 1.0, 0),
        ("Init", 1.0, 2.5, 0),
        ("Running", 2.5, 5.0, 1),
        ("Terminating", 5.0, 6.0, 1),
        ("Restarting", 6.0, 8.0, 1),
        ("Running", 8.0, 9.0, 2),
    ]


def test_downtime_ends_with_the_first_step_beyond_those_reached_and_repeated_steps_are_counted() -> None:
    report = restarted(before=40, resumed=31).report()
    (fault,) = report.faults
    assert (fault.reached_step, fault.resumed_step, fault.repeated_steps) == (40, 30, 10)
    assert fault.downtime_s == near(2.0 + 10 * 0.1)  # on again after 2 s, and ten steps twice
    assert (report.repeated_steps, report.downtime_s) == (10, near(3.0))
    assert [(line.points[0][1], line.points[-1][1]) for line in report.steps] == [(1, 40), (31, 60)]


def test_a_line_that_says_where_it_goes_on_is_no_step_done_again() -> None:
    tale = (
        Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Restarting")
    )
    tale.start(3.0).steps(4.0, [10], text="resumed at step 10 from /ckpt").steps(4.1, range(11, 21))
    fault = fault_of(tale)
    assert (fault.repeated_steps, fault.resumed_step, fault.downtime_s) == (0, 10, near(2.1))


def test_a_line_still_on_its_way_when_the_fault_comes_does_not_end_the_downtime() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 11)).fault(1.95, "kill worker", "a")
    fault = fault_of(tale.steps(1.96, [11]).meet(3.0).steps(4.0, range(11, 21)))
    assert (fault.reached_step, fault.repeated_steps, fault.downtime_s) == (11, 1, near(4.1 - 1.96))


@pytest.mark.parametrize(("on_its_way", "reached", "downtime_s"), [([], 10, 8.0), ([11], 11, 7.9)])
def test_a_job_that_never_goes_on_is_down_to_its_end(
    on_its_way: list[int], reached: int, downtime_s: float
) -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "kill pod", "b").steps(2.1, on_its_way)
    (fault,) = tale.condition(10.0, "Failed (PodLost): b", 138).report(30.0, 138).faults
    assert (fault.recovered, fault.reached_step, fault.downtime_s) == (False, reached, near(downtime_s))


def test_a_fault_that_stills_the_job_for_a_while_without_a_restart_costs_that_time() -> None:
    tale = Tale("a", "b").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "partition node=1 for=3s", "b")
    tale.add(5.0, What.FAULT_OVER, "b", text="partition node=1 for=3s").steps(5.5, range(11, 21))
    fault = fault_of(tale)
    assert (fault.downtime_s, fault.repeated_steps, fault.over_s) == (near(3.5), 0, 5.0)


def test_workers_with_steps_of_their_own_go_on_while_one_begins_again() -> None:
    tale = Tale("ps", "w0", "w1").start(0.0).steps(1.0, range(1, 90), "w0").steps(1.0, range(1, 31), "w1")
    tale.fault(4.05, "kill pod", "w1").end(4.05, "w1", 137, "Restarting").start(6.0, "w1")
    report = finished(tale.steps(7.0, range(1, 20), "w1"), 12.0).report()
    assert (report.faults[0].repeated_steps, report.repeated_steps, len(report.steps)) == (0, 0, 1)
    assert report.faults[0].downtime_s == near(0.05, within=0.06)


def test_where_steps_restart_each_epoch_downtime_ends_with_the_first_one() -> None:
    tale = Tale("a").start(0.0)
    for epoch in range(3):
        tale.steps(1.0 + epoch, range(1, 9))
    tale.fault(4.0, "kill worker", "a").meet(5.0).steps(6.0, range(1, 9))
    report = finished(tale, 9.0).report()
    assert (report.highest_step, report.repeated_steps) == (8, None)
    assert (report.faults[0].downtime_s, report.faults[0].resumed_step) == (near(2.0), None)


def test_workers_of_one_pod_that_say_their_steps_out_of_order_begin_nothing_anew() -> None:
    tale = Tale("a").start(0.0)
    for number in range(1, 20):
        tale.steps(1.0 + number, [number + 1, number, number + 1])
    report = finished(tale, 60.0).report()
    assert (report.repeated_steps, len(report.steps), report.steps[0].points[-1][1]) == (0, 1, 20)


def test_workers_that_begin_again_unseen_are_noticed_by_their_steps_right_after_a_fault() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 41)).fault(5.0, "kill worker", "a")
    assert fault_of(tale.steps(9.0, range(21, 61)), 20.0).repeated_steps == 20


def test_a_new_rank_0_on_another_node_takes_up_the_steps() -> None:
    tale = Tale("a", "b").start(0.0).meet(0.5).steps(1.0, range(1, 41), "a").fault(5.0, "kill pod back=never", "a")
    tale.end(5.0, "a", 137, "Terminated").meet(6.0, "b").steps(7.0, range(31, 61), "b")
    fault = fault_of(tale, 12.0)
    assert (fault.repeated_steps, fault.downtime_s) == (10, near(3.0))


def test_the_step_in_flight_is_no_repeated_step_where_ranks_keep_their_state() -> None:
    """Rank 0 may have shown step 40 before a peer was through it."""
    for text, resumed, repeated in ((KEPT, 40, 0), (KEPT, 41, 0), (KEPT, 31, 10), ("", 40, 1)):
        tale = Tale("a", "b").start(0.0).meet(1.0).steps(1.1, range(1, 41)).fault(5.1, "kill worker", "b")
        for pod in tale.pods:
            tale.add(5.2, What.GENERATION, pod, text=text)
        fault = fault_of(tale.steps(5.6, range(resumed, 61)), 9.0)
        assert (fault.repeated_steps, fault.downtime_s) == (repeated, near(0.5 + repeated / 10))
        assert ("surviving ranks kept their state" in effect(fault)) is (text == KEPT)


def test_downtime_that_two_faults_share_counts_once() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 11)).fault(2.0, "kill worker", "a")
    tale.fault(3.0, "kill worker #2", "a").meet(4.0).steps(5.0, range(6, 21))
    report = finished(tale, 9.0).report()
    assert (report.downtime_s, report.repeated_steps) == (near(3.5, within=0.1), 5)


def test_a_fault_that_never_came_has_its_reason_and_fails_the_rehearsal() -> None:
    tale = Tale("a").start(0.0).add(3.0, What.FAULT_MISSED, text="kill worker at=step:900", why="it was late")
    report = finished(tale, 4.0).report()
    assert [(fault.happened, fault.why_not) for fault in report.faults] == [(False, "it was late")]
    assert (report.happened, report.exit_code) == ((), 1)


def test_of_steps_in_quick_succession_the_last_before_anything_else_is_kept() -> None:
    recorder = Recorder()
    for number in range(1_000):
        recorder.add(HistoryEntry(at_s=number / 1_000, what=What.STEP, pod="a", step=number))
    recorder.add(HistoryEntry(at_s=1.0, what=What.FAULT, pod="a"))
    recorder.add(HistoryEntry(at_s=0.5, what=What.GENERATION, pod="a"))
    entries = recorder.entries()
    steps = [entry.step for entry in entries if entry.what is What.STEP]
    assert (len(steps) < 30, steps[0], steps[-1]) == (True, 0, 999)
    assert [entry.at_s for entry in entries] == sorted(entry.at_s for entry in entries)


PODS = ("a", "b", "c")
entry = st.builds(
    HistoryEntry,
    at_s=st.floats(0, 1000, allow_nan=False),
    what=st.sampled_from(What),
    pod=st.sampled_from((*PODS, None)),
    step=st.none() | st.integers(0, 1000),
    code=st.none() | st.integers(0, 255),
    text=st.sampled_from(
        ("", "Running", "Failed", "Succeeded", "kill pod", "delay dns", "training", "stopping", "resumed at step 3")
    ),
)
histories = st.builds(
    lambda entries, exit_code: History(
        kind="TrainJob",
        name="x",
        entries=tuple(sorted(entries, key=lambda entry: entry.at_s)),
        took_s=1000.0,
        exit_code=exit_code,
        pods=Tale(*PODS).history().pods,
    ),
    st.lists(entry, max_size=60),
    st.sampled_from((0, 1, 130)),
)


@given(histories)
def test_whatever_happened_a_timeline_is_in_order_and_sums_make_sense(history: History) -> None:
    report = report_of(history)
    for pod in report.pods:
        assert all(segment.begin_s <= segment.end_s for segment in pod.timeline)
        assert all(segment.end_s <= after.begin_s for segment, after in pairwise(pod.timeline))
    for line in report.steps:
        assert all(point[0] <= after[0] for point, after in pairwise(line.points))
    for fault in report.faults:
        assert fault.downtime_s is None or 0 <= fault.downtime_s <= report.took_s
        assert fault.repeated_steps is None or fault.repeated_steps >= 0
    assert report.downtime_s is None or 0 <= report.downtime_s <= report.took_s


@given(st.integers(2, 80), st.integers(1, 80))
def test_repeated_steps_are_those_done_twice(before: int, resumed: int) -> None:
    if resumed <= before + 1:
        report = restarted(before, resumed, last=max(before, resumed) + 5).report()
        assert report.faults[0].repeated_steps == report.repeated_steps == before - resumed + 1
