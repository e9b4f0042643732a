"""Which programs are shown up, with what words, and which are not."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.rehearsal.test_story import histories
from tests.rehearsal.told import Tale, finished, restarted
from trainer_launch.rehearsal.report.fault_costs import analyse
from trainer_launch.rehearsal.report.history import History, What
from trainer_launch.rehearsal.script_checks import FailedCheck, ScriptCheck, Verdict, judge


def verdict(history: History, max_lost_steps: int = 100) -> Verdict:
    return judge(analyse(history), max_lost_steps)


def broken(history: History, max_lost_steps: int = 100) -> list[str]:
    return [one.check.value for one in verdict(history, max_lost_steps).failed]


def terminated(code: int, after_s: float = 0.5, again: bool = True, last_step: int = 20) -> Tale:
    """One pod of two is asked to stop after step 20, and is made anew."""
    tale = Tale("demo-0", "demo-1").start(0.0).meet(0.5).steps(1.0, range(1, last_step + 1), "demo-0")
    stop_s = 1.0 + last_step * 0.1
    tale.fault(stop_s, "term pod node=1 grace=10", "demo-1").stop(stop_s, "demo-1")
    tale.end(stop_s + after_s, "demo-1", code, "Pending")
    if again:
        resumed_s = stop_s + after_s + 2
        tale.start(resumed_s - 1, "demo-1").meet(resumed_s - 0.5, 2)
        tale.steps(resumed_s, range(last_step + 1, 41), "demo-0")
    return tale


# -- no resume ------------------------------------------------------------------------------------


def test_a_program_that_begins_all_over_again_is_shown_up_with_both_pods_and_numbers() -> None:
    told = verdict(restarted(before=40, resumed=1))
    (one,) = told.failed
    assert (one.check, one.pods) == (ScriptCheck.RESUME, ("demo-0", "demo-1"))
    text = told.text()
    assert text.startswith(
        "This job does not survive preemption: 1 check failed.\n"
        "  FAILED: the script did not resume from its checkpoint, demo-0, demo-1 at 7.1 s:"
    )
    assert "after 'kill worker node=1' training restarted at step 1, after it had reached step 40" in flat(text)
    assert "What to do: load the newest checkpoint when the script starts" in text
    assert max(map(len, text.splitlines())) <= 100


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_program_that_resumes_is_not_accused() -> None:
    told = verdict(restarted(before=40, resumed=31))
    assert told == Verdict()
    assert (told.text(), told.exit_code(0)) == ("", 0)


@pytest.mark.parametrize(("before", "fault_at"), [(1, 1), (3, 1)], ids=["one step", "more of them on their way"])
def test_a_job_that_had_hardly_begun_is_not_accused(before: int, fault_at: int) -> None:
    tale = (
        Tale("a")
        .start(0.0)
        .meet(0.5)
        .steps(1.0, range(1, before + 1))
        .fault(1.0 + fault_at * 0.1 - 0.05, "kill worker")
    )
    told = verdict(finished(tale.meet(3.0, 2).steps(4.0, range(1, 10)), 9.0))
    assert told.failed == ()
    assert "hardly a step was done" in flat(told.text())


def test_one_fault_before_the_first_checkpoint_is_no_accusation_where_another_shows_that_it_resumes() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 6)).fault(1.6, "kill worker", "a")
    tale.meet(2.0, 2).steps(2.5, range(1, 31)).fault(6.0, "kill worker", "a").meet(7.0, 3).steps(8.0, range(21, 41))
    assert broken(finished(tale, 20.0)) == []


def test_steps_that_begin_anew_each_epoch_are_no_lost_steps() -> None:
    tale = Tale("a").start(0.0).meet(0.5)
    for epoch in range(4):
        tale.steps(1.0 + epoch, range(1, 9))
    assert broken(finished(tale.fault(5.0, "delay dns"), 9.0)) == []


def test_after_an_epoch_was_seen_a_resume_at_the_first_step_proves_nothing_and_that_is_said() -> None:
    tale = (
        Tale("a")
        .start(0.0)
        .meet(0.5)
        .steps(1.0, range(1, 9))
        .steps(2.0, range(1, 6))
        .fault(3.0, "kill worker", "a")
    )
    told = verdict(finished(tale.meet(4.0, 2).steps(5.0, range(1, 9)), 9.0))
    assert told.failed == ()
    assert "the step number restarts each epoch" in flat(told.text())


def test_parameter_servers_workers_count_for_themselves() -> None:
    tale = Tale("w0", "w1").start(0.0).steps(1.0, range(1, 90), "w0").steps(1.0, range(1, 31), "w1")
    tale.fault(4.05, "kill pod", "w1").end(4.05, "w1", 137, "Pending").start(6.0, "w1").steps(
        7.0, range(1, 20), "w1"
    )
    assert broken(finished(tale, 12.0)) == []


def test_a_pod_that_alone_begins_anew_in_a_job_that_meets_again_has_lost_its_checkpoint() -> None:
    tale = Tale("a", "b").start(0.0).meet(0.5).steps(1.0, range(1, 41)).fault(5.0, "kill pod", "b")
    tale.end(5.0, "b", 137, "Pending").start(6.0, "b").meet(6.5, 2).steps(7.0, range(41, 50), "a").steps(
        7.0, range(1, 9), "b"
    )
    (one,) = verdict(finished(tale, 12.0)).failed
    assert (one.check, one.pods) == (ScriptCheck.RESUME, ("b",))


def test_without_steps_nobody_is_accused_and_it_is_said_how_to_tell_them() -> None:
    tale = Tale("a").start(0.0).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Pending").start(4.5)
    told = verdict(finished(tale, 9.0))
    assert (told.failed, told.exit_code(0)) == ((), 0)
    assert "steps are unknown. Print lines such as 'step 40', or call trainer_launch.report(step=40)" in flat(
        told.text()
    )


def test_without_a_fault_nothing_is_judged() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 41)).meet(6.0, 2).steps(7.0, range(1, 60))
    assert verdict(finished(tale, 20.0)) == Verdict()


def test_a_job_that_ended_before_the_fault_keeps_all_promises() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 41)).end(6.0, "a", 0).condition(6.0)
    assert verdict(tale.fault(6.1, "term pod", "a").history()) == Verdict()


# -- steps lost -----------------------------------------------------------------------------------


def test_a_program_that_saves_too_rarely_is_shown_up() -> None:
    history = restarted(before=180, resumed=51, last=200)
    (one,) = verdict(history).failed
    assert (one.check, one.pods) == (ScriptCheck.STEPS, ("demo-0", "demo-1"))
    assert (
        "training resumed from step 50, after it had reached step 180: 130 repeated steps, more than 100"
        in one.evidence
    )
    assert "save more often" in one.advice
    assert broken(history, max_lost_steps=130) == []


def test_the_limit_may_be_zero() -> None:
    assert broken(restarted(before=40, resumed=40), 0) == ["a restart repeated too many steps"]
    assert broken(restarted(before=40, resumed=41), 0) == []


# -- exit 0 on SIGTERM, ignored SIGTERM -----------------------------------------------------------


def test_exit_0_on_sigterm_is_shown_up() -> None:
    (one,) = verdict(finished(terminated(0), 12.0)).failed
    assert (one.check, one.pods, one.at_s) == (ScriptCheck.EXIT_CODE, ("demo-1",), 3.5)
    assert (
        one.evidence == "container main was asked to stop and exited with 0 after 0.5 s, before its work was done"
    )
    assert "such as 143" in one.advice


@pytest.mark.parametrize("code", [143, 1, 138])
def test_any_other_code_on_sigterm_is_fine(code: int) -> None:
    assert broken(finished(terminated(code), 12.0)) == []


def test_ignoring_sigterm_until_the_grace_is_over_is_shown_up() -> None:
    (one,) = verdict(finished(terminated(137, after_s=10.0), 40.0)).failed
    assert one.check is ScriptCheck.SIGTERM
    assert (
        one.evidence
        == "container main was asked to stop, and was killed 10.0 s later, at the end of its grace period"
    )


def test_who_was_killed_by_another_fault_meanwhile_ignored_nothing() -> None:
    tale = Tale("a").start(0.0).fault(2.0, "term pod grace=10", "a").stop(2.0, "a").fault(3.0, "kill pod", "a")
    assert broken(finished(tale.end(3.0, "a", 137, "Pending").start(4.0), 9.0)) == []


@pytest.mark.parametrize("by", ["controller", "user"])
def test_being_stopped_by_others_than_a_fault_is_not_judged(by: str) -> None:
    tale = Tale("a", "b").start(0.0).fault(1.0, "delay dns", "a").stop(2.0, "a", by=by)
    assert broken(finished(tale.end(3.0, "a", 0), 9.0)) == []


def test_a_pod_that_had_just_done_its_last_step_may_end_with_0() -> None:
    tale = (
        Tale("a")
        .start(0.0)
        .steps(1.0, [58, 59, 60], text="step 60/60  loss 1.0")
        .fault(1.3, "term pod", "a")
        .stop(1.3, "a")
    )
    assert broken(tale.end(1.4, "a", 0).condition(1.4).history()) == []
    tale = Tale("a", "b").start(0.0).steps(1.0, range(1, 61)).fault(7.0, "term pod", "a").stop(7.0, "a")
    assert broken(tale.end(7.1, "a", 0).end(7.2, "b", 0).condition(7.2).history()) == []


def test_a_pod_that_leaves_with_0_counts_as_done_though_its_job_then_succeeds() -> None:
    tale = (
        Tale("a", "b")
        .start(0.0)
        .steps(1.0, range(1, 21))
        .fault(3.0, "term pod", "a")
        .stop(3.0, "a")
        .end(3.5, "a", 0)
    )
    tale.steps(4.0, range(21, 61), "b").end(9.0, "b", 0).condition(9.0)
    assert broken(tale.history()) == ["the script exited with 0 on SIGTERM"]
    alone = (
        Tale("a").start(0.0).steps(1.0, range(1, 21)).fault(3.0, "term pod", "a").stop(3.0, "a").end(3.5, "a", 0)
    )
    assert broken(alone.condition(3.5).history()) == ["the script exited with 0 on SIGTERM"]


def test_a_sidecar_or_an_init_container_may_end_with_0() -> None:
    tale = Tale("a").start(0.0).add(0.0, What.CONTAINER_STARTED, "a", container="side", attempt=1)
    tale.add(0.0, What.CONTAINER_STARTED, "a", container="check", attempt=1, text="init")
    tale.steps(1.0, range(1, 21)).fault(3.0, "term pod", "a")
    for container, code in (("side", 0), ("check", 0), ("main", 143)):
        tale.add(3.0, What.STOP_ASKED, "a", container=container, text="fault")
        tale.add(3.1, What.CONTAINER_ENDED, "a", container=container, code=code)
    assert broken(tale.add(3.1, What.POD_ENDED, "a", text="Pending").start(4.0).history()) == []


# -- the verdict ----------------------------------------------------------------------------------


def test_a_job_that_succeeded_but_broke_a_promise_fails_the_rehearsal_and_no_other_code_is_hidden() -> None:
    told = verdict(restarted(before=40, resumed=1))
    assert [told.exit_code(code) for code in (0, 1, 137, 143)] == [1, 1, 137, 143]


def test_of_many_pods_the_first_are_named() -> None:
    pods = tuple(f"demo-{number}" for number in range(50))
    one = FailedCheck(check=ScriptCheck.STEPS, pods=pods, at_s=1.0, evidence="x")
    assert "demo-0, demo-1, demo-2 and 47 more at 1.0 s" in Verdict(failed=(one,)).text()


@given(histories)
def test_whatever_happened_a_verdict_is_reached_and_names_pods(history: History) -> None:
    told = verdict(history)
    assert all(one.pods for one in told.failed)
    assert bool(told.failed) <= ("does not survive" in told.text())
