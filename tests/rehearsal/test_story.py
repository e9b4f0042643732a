"""From what happened to what people are told: lanes, steps, downtime, lost steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rehearsal.told import Tale, finished, restarted
from trainer_launch.rehearsal.report.fault_costs import analyse
from trainer_launch.rehearsal.report.history import Doing, Entry, History, What


def near(value: float, within: float = 1e-6) -> Any:
    """Any: pairs with it may be compared."""
    return pytest.approx(value, abs=within)


def doings(history: History, pod: int = 0) -> list[tuple[str, float, float, int]]:
    return [(one.doing.value, one.begin_s, one.end_s, one.attempt) for one in analyse(history).lanes[pod].segments]


def test_a_pod_waits_checks_runs_is_stopped_is_away_and_runs_again() -> None:
    tale = Tale("a").add(1.0, What.POD_STARTED, "a", attempt=1)
    tale.add(1.0, What.CONTAINER_STARTED, "a", container="check", attempt=1, text="init")
    tale.add(2.0, What.CONTAINER_ENDED, "a", container="check", code=0)
    tale.add(2.5, What.CONTAINER_STARTED, "a", container="main", attempt=1)
    tale.stop(5.0, "a").end(6.0, "a", 143, "Pending").start(8.0, "a").end(9.0, "a", 0).condition(9.0)
    assert doings(tale.history(ended_s=12.0)) == [
        ("waiting", 0.0, 1.0, 0),
        ("init", 1.0, 2.0, 0),
        ("waiting", 2.0, 2.5, 0),
        ("running", 2.5, 5.0, 1),
        ("stopping", 5.0, 6.0, 1),
        ("down", 6.0, 8.0, 1),
        ("running", 8.0, 9.0, 2),
    ]


def test_workers_that_meet_again_begin_another_attempt_of_the_same_life() -> None:
    tale = Tale("a").start(0.0).meet(1.0).meet(4.0, 2)
    tale.add(6.0, What.CONTAINER_ENDED, "a", container="main", code=0)
    assert doings(tale.history()) == [("running", 0.0, 4.0, 1), ("running", 4.0, 6.0, 2)]
    assert analyse(tale.history()).totals.attempts == 2


def test_a_pod_that_is_not_made_anew_is_down_until_the_job_ends() -> None:
    tale = (
        Tale("a", "b")
        .start(0.0)
        .fault(3.0, "kill pod", "b")
        .end(3.0, "b", 137, "Terminated")
        .condition(5.0, "Failed", 1)
    )
    assert doings(tale.history(ended_s=9.0, succeeded=False), 1)[-1] == ("down", 3.0, 5.0, 1)


def test_a_pod_that_joins_later_has_a_lane_of_its_own() -> None:
    tale = Tale("a").start(0.0).start(4.0, "b")
    assert [lane.pod for lane in analyse(tale.history(ended_s=5.0)).lanes] == ["a", "b"]
    assert doings(tale.history(ended_s=5.0), 1) == [("running", 4.0, 5.0, 1)]


def test_downtime_ends_with_the_first_step_beyond_those_reached_and_repeated_steps_are_lost() -> None:
    analysis = analyse(restarted(before=40, resumed=31))
    (cost,) = analysis.costs
    assert (cost.reached, cost.resumed, cost.lost) == (40, 30, 10)
    assert cost.downtime_s == near(2.0 + 10 * 0.1)  # on again after 2 s, and ten steps twice
    assert analysis.totals.lost == 10
    assert analysis.totals.downtime_s == near(3.0)
    assert [(stretch.points[0][1], stretch.points[-1][1]) for stretch in analysis.curve] == [(1, 40), (31, 60)]


def test_a_checkpoint_at_each_step_loses_none() -> None:
    (cost,) = analyse(restarted(before=40, resumed=41)).costs
    assert (cost.lost, cost.downtime_s) == (0, near(2.0))


def test_a_line_that_says_where_it_goes_on_is_no_step_done_again() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Pending")
    tale.start(3.0).steps(4.0, [10], text="resumed at step 10 from /ckpt").steps(4.1, range(11, 21))
    (cost,) = analyse(finished(tale, 9.0)).costs
    assert (cost.lost, cost.resumed, cost.downtime_s) == (0, 10, near(2.1))
    assert cost.away_s == near(1.0)


def test_a_line_still_on_its_way_when_the_fault_comes_does_not_end_the_downtime() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 11)).fault(1.95, "kill worker", "a")
    tale.steps(1.96, [11]).meet(3.0, 2).steps(4.0, range(11, 21))
    (cost,) = analyse(finished(tale, 9.0)).costs
    assert (cost.reached, cost.lost, cost.downtime_s) == (11, 1, near(4.1 - 1.96))


def test_a_job_that_never_goes_on_is_down_to_its_end() -> None:
    tale = (
        Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Terminated")
    )
    (cost,) = analyse(tale.condition(10.0, "Failed", 137).history(ended_s=30.0, succeeded=False)).costs
    assert (cost.is_open, cost.downtime_s) == (True, near(8.0))


def test_a_line_on_its_way_at_the_fault_does_not_make_a_job_go_on_that_never_does() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "kill pod", "b").steps(2.1, [11])
    (cost,) = analyse(tale.condition(10.0, "Failed", 138).history(ended_s=30.0, succeeded=False)).costs
    assert (cost.is_open, cost.reached, cost.downtime_s) == (True, 11, near(7.9))


def test_a_fault_after_the_last_step_of_a_job_that_succeeds_costs_nothing() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 11)).fault(5.0, "delay dns", "a")
    (cost,) = analyse(finished(tale, 9.0)).costs
    assert (cost.is_open, cost.downtime_s, cost.lost) == (False, 0.0, 0)


def test_a_fault_that_stills_the_job_for_a_while_without_a_restart_costs_that_time() -> None:
    tale = Tale("a", "b").start(0.0).steps(1.0, range(1, 11)).fault(2.0, "partition node=1 for=3s", "b")
    tale.add(5.0, What.FAULT_OVER, "b", text="partition node=1 for=3s").steps(5.5, range(11, 21))
    (cost,) = analyse(finished(tale, 9.0)).costs
    assert (cost.downtime_s, cost.lost, cost.over_s) == (near(3.5), 0, 5.0)


def test_workers_with_steps_of_their_own_go_on_while_one_begins_again() -> None:
    tale = Tale("ps", "w0", "w1").start(0.0).steps(1.0, range(1, 90), "w0").steps(1.0, range(1, 31), "w1")
    tale.fault(4.05, "kill pod", "w1").end(4.05, "w1", 137, "Pending").start(6.0, "w1").steps(
        7.0, range(1, 20), "w1"
    )
    analysis = analyse(finished(tale, 12.0))
    assert (analysis.costs[0].lost, analysis.totals.lost) == (0, 0)
    assert analysis.costs[0].downtime_s == near(0.05, within=0.06)
    assert [one.is_apart for one in analysis.resumes] == [True]
    assert len(analysis.curve) == 1


def test_steps_that_begin_anew_each_epoch_count_on() -> None:
    tale = Tale("a").start(0.0)
    for epoch in range(3):
        tale.steps(1.0 + epoch, range(1, 9))
    analysis = analyse(finished(tale, 9.0))
    assert analysis.resumes == ()
    assert analysis.curve[0].points[-1][1] == 24
    assert analysis.totals.top == 8


def test_epochs_of_growing_length_count_on() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 6)).steps(2.0, range(1, 8)).steps(3.0, range(1, 10))
    assert analyse(finished(tale, 9.0)).curve[0].points[-1][1] == 5 + 7 + 9


def test_the_steps_of_a_validation_in_between_are_no_epochs() -> None:
    tale = Tale("a").start(0.0).meet(0.5)
    for number in range(3):
        tale.steps(1.0 + 3 * number, range(number * 10 + 1, number * 10 + 11)).steps(3.0 + 3 * number, range(1, 6))
    tale.steps(11.0, range(31, 34)).fault(12.0, "kill worker", "a").meet(13.0, 2).steps(14.0, range(1, 40))
    analysis = analyse(finished(tale, 30.0))
    assert analysis.curve[0].points[-1][1] == 33
    assert [one.is_counted for one in analysis.resumes] == [True]
    assert analysis.totals.lost == 33


def test_workers_of_one_pod_that_say_their_steps_out_of_order_begin_nothing_anew() -> None:
    tale = Tale("a").start(0.0)
    for number in range(1, 20):
        tale.steps(1.0 + number, [number + 1, number, number + 1])
    analysis = analyse(finished(tale, 60.0))
    assert (analysis.resumes, analysis.curve[0].points[-1][1]) == ((), 20)


def test_workers_that_begin_again_unseen_are_noticed_by_their_steps_right_after_a_fault() -> None:
    tale = Tale("a").start(0.0).steps(1.0, range(1, 41)).fault(5.0, "kill worker", "a").steps(9.0, range(21, 61))
    (cost,) = analyse(finished(tale, 20.0)).costs
    assert cost.lost == 20


def test_a_new_rank_0_on_another_node_takes_up_the_steps() -> None:
    tale = Tale("a", "b").start(0.0).meet(0.5).steps(1.0, range(1, 41), "a").fault(5.0, "kill pod back=never", "a")
    tale.end(5.0, "a", 137, "Terminated").meet(6.0, 2, "b").steps(7.0, range(31, 61), "b")
    (cost,) = analyse(finished(tale, 12.0)).costs
    assert (cost.lost, cost.downtime_s) == (10, near(3.0))


def test_downtime_that_two_faults_share_counts_once() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 11)).fault(2.0, "kill worker", "a")
    tale.fault(3.0, "kill worker #2", "a").meet(4.0, 2).steps(5.0, range(6, 21))
    analysis = analyse(finished(tale, 9.0))
    assert analysis.totals.downtime_s == near(3.5, within=0.1)
    assert analysis.totals.lost == 5


def test_without_steps_a_pod_s_absence_is_what_is_known() -> None:
    tale = Tale("a").start(0.0).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Pending").start(4.5)
    (cost,) = analyse(finished(tale, 9.0)).costs
    assert (cost.downtime_s, cost.lost, cost.away_s) == (None, None, 2.5)


def test_a_fault_that_never_came_is_counted_apart() -> None:
    tale = Tale("a").start(0.0).add(3.0, What.FAULT_MISSED, "a", text="kill worker at=step:900")
    analysis = analyse(finished(tale, 4.0))
    assert (analysis.totals.faults, analysis.totals.missed, analysis.costs[0].is_missed) == (0, 1, True)


PODS = ("a", "b", "c")
entry = st.builds(
    Entry,
    at_s=st.floats(0, 1000, allow_nan=False),
    what=st.sampled_from(What),
    pod=st.sampled_from((*PODS, None)),
    container=st.sampled_from(("main", "side", None)),
    attempt=st.none() | st.integers(1, 5),
    step=st.none() | st.integers(0, 1000),
    code=st.none() | st.integers(0, 255),
    text=st.sampled_from(
        ("", "init", "fault", "Failed", "Succeeded", "kill pod", "delay dns", "resumed at step 3")
    ),
)
histories = st.builds(
    lambda entries, ended, succeeded: History(
        kind="TrainJob",
        name="x",
        pods=PODS,
        entries=tuple(sorted(entries, key=lambda one: one.at_s)),
        ended_s=1000.0 if ended else None,
        succeeded=succeeded,
    ),
    st.lists(entry, max_size=60),
    st.booleans(),
    st.sampled_from((True, False, None)),
)


@given(histories)
def test_whatever_happened_a_lane_is_in_order_and_sums_make_sense(history: History) -> None:
    analysis = analyse(history)
    for lane in analysis.lanes:
        assert all(one.begin_s < one.end_s for one in lane.segments)
        assert all(one.end_s <= after.begin_s for one, after in pairwise(lane.segments))
        assert all(one.doing is not Doing.OVER for one in lane.segments)
    for stretch in analysis.curve:
        assert all(one[0] <= after[0] and one[1] < after[1] for one, after in pairwise(stretch.points))
    for cost in analysis.costs:
        assert cost.downtime_s is None or 0 <= cost.downtime_s <= analysis.totals.took_s
        assert cost.lost is None or cost.lost >= 0
    assert len(analysis.costs) == analysis.totals.faults + analysis.totals.missed
    assert analysis.totals.downtime_s is None or 0 <= analysis.totals.downtime_s <= analysis.totals.took_s


@given(st.integers(2, 80), st.integers(1, 80))
def test_lost_steps_are_those_done_twice(before: int, resumed: int) -> None:
    if resumed <= before + 1:
        analysis = analyse(restarted(before, resumed, last=max(before, resumed) + 5))
        assert analysis.costs[0].lost == analysis.totals.lost == before - resumed + 1
