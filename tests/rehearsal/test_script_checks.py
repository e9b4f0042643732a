"""Which programs are shown up, with what words, and which are not."""

from __future__ import annotations

import pytest

from tests.rehearsal.told import Tale, finished, restarted
from trainer_launch.rehearsal.html_page import page
from trainer_launch.rehearsal.rehearsal_report import RehearsalReport
from trainer_launch.rehearsal.reporting import text
from trainer_launch.rehearsal.script_checks import ScriptCheck

NOT_CHECKED = "The job succeeded; whether the script resumes was not checked"


def broken(tale: Tale) -> list[str]:
    return [failure.check.value for failure in tale.report().failed_checks]


def flat(report: RehearsalReport) -> str:
    return " ".join(text(report).split())


def terminated(code: int, after_s: float = 0.5) -> Tale:
    """One pod of two is asked to stop after step 20, and is made anew."""
    tale = Tale("demo-0", "demo-1").start(0.0).meet(0.5).steps(1.0, range(1, 21), "demo-0")
    tale.fault(3.0, "term pod node=1 grace=10", "demo-1").stop(3.0, "demo-1")
    tale.end(3.0 + after_s, "demo-1", code, "Restarting")
    tale.start(4.0 + after_s, "demo-1").meet(4.5 + after_s)
    return finished(tale.steps(5.0 + after_s, range(21, 41), "demo-0"), 40.0)


# -- no resume ------------------------------------------------------------------------------------


def test_a_program_that_begins_all_over_again_is_shown_up_with_both_pods_and_numbers() -> None:
    report = restarted(before=40, resumed=1).report()
    (failure,) = report.failed_checks
    assert (failure.check, failure.pods) == (ScriptCheck.RESUME, ("demo-0", "demo-1"))
    assert (
        "This job does not survive preemption: 1 check failed.\n"
        "  FAILED: the script did not resume from its checkpoint, demo-0, demo-1 at 7.1 s:"
    ) in text(report)
    assert "after 'kill worker node=1' training restarted at step 1, after it had reached step 40" in flat(report)
    assert "What to do: load the newest checkpoint when the script starts" in flat(report)


@pytest.mark.parametrize(("before", "fault_at"), [(1, 1), (3, 1)], ids=["one step", "more of them on their way"])
def test_a_job_that_had_hardly_begun_is_not_accused(before: int, fault_at: int) -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, before + 1))
    tale.fault(1.0 + fault_at * 0.1 - 0.05, "kill worker", "a").meet(3.0).steps(4.0, range(1, 10))
    report = finished(tale, 9.0).report()
    assert report.failed_checks == ()
    assert "hardly a step was done" in flat(report)


def test_one_fault_before_the_first_checkpoint_is_no_accusation_where_another_shows_that_it_resumes() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 6)).fault(1.6, "kill worker", "a")
    tale.meet(2.0).steps(2.5, range(1, 31)).fault(6.0, "kill worker", "a").meet(7.0).steps(8.0, range(21, 41))
    assert broken(finished(tale, 20.0)) == []


def test_parameter_servers_workers_count_for_themselves() -> None:
    tale = Tale("w0", "w1").start(0.0).steps(1.0, range(1, 90), "w0").steps(1.0, range(1, 31), "w1")
    tale.fault(4.05, "kill pod", "w1").end(4.05, "w1", 137, "Restarting").start(6.0, "w1")
    assert broken(finished(tale.steps(7.0, range(1, 20), "w1"), 12.0)) == []


def test_a_pod_that_alone_begins_anew_in_a_job_that_meets_again_has_lost_its_checkpoint() -> None:
    tale = Tale("a", "b").start(0.0).meet(0.5).steps(1.0, range(1, 41)).fault(5.0, "kill pod", "b")
    tale.end(5.0, "b", 137, "Restarting").start(6.0, "b").meet(6.5)
    tale.steps(7.0, range(41, 50), "a").steps(7.0, range(1, 9), "b")
    (failure,) = finished(tale, 12.0).report().failed_checks
    assert (failure.check, failure.pods) == (ScriptCheck.RESUME, ("b",))


def test_without_steps_nobody_is_accused_and_it_is_said_how_to_tell_them() -> None:
    tale = Tale("a").start(0.0).fault(2.0, "kill pod", "a").end(2.0, "a", 137, "Restarting").start(4.5)
    report = finished(tale, 9.0).report()
    assert (report.failed_checks, report.summary, report.exit_code) == ((), NOT_CHECKED, 0)
    assert "steps are unknown. Print lines such as 'step 40', or call trainer_launch.report(step=40)" in flat(
        report
    )


def test_without_a_fault_nothing_is_judged() -> None:
    tale = Tale("a").start(0.0).meet(0.5).steps(1.0, range(1, 41)).meet(6.0).steps(7.0, range(1, 60))
    report = finished(tale, 20.0).report()
    assert (report.failed_checks, report.not_checked) == ((), ())


def test_a_fault_before_the_first_step_shows_nothing_of_the_script_and_is_not_survived() -> None:
    tale = Tale("a", "b").start(0.0).meet(1.0).fault(10.0, "kill pod at=10s", "b").end(10.0, "b", 137, "Restarting")
    report = finished(tale.start(11.0, "b").meet(12.0).steps(14.0, range(1, 21)), 20.0).report()
    assert (report.summary, report.repeated_steps, report.exit_code) == (NOT_CHECKED, None, 0)
    assert "hardly a step was done. Inject the fault later (at=step:20)" in report.not_checked[0]
    assert f'<header class="plain"><h1>{NOT_CHECKED}' in page(report)


def test_a_restart_without_a_step_after_it_shows_nothing_either() -> None:
    tale = Tale("a").start(0.0).meet(1.0).steps(2.0, range(1, 5)).fault(10.0, "kill worker at=10s", "a").meet(12.0)
    report = finished(tale, 20.0).report()
    assert (report.summary, report.repeated_steps) == (NOT_CHECKED, None)
    assert report.not_checked == ("whether the script resumes, because no step came after its workers began again",)


def test_a_fault_after_which_no_worker_begins_again_is_survived() -> None:
    tale = Tale("a").start(0.0).meet(1.0).fault(1.5, "stop worker for=3s at=1s", "a").steps(6.0, range(1, 5))
    report = finished(tale, 20.0).report()
    assert (report.summary, report.not_checked, report.repeated_steps) == ("Survived 1 fault", (), 0)


# -- exit 0 on SIGTERM, ignored SIGTERM -----------------------------------------------------------


def test_exit_0_on_sigterm_is_shown_up() -> None:
    (failure,) = terminated(0).report().failed_checks
    assert (failure.check, failure.pods, failure.at_s) == (ScriptCheck.EXIT_CODE, ("demo-1",), 3.5)
    assert failure.evidence == "the pod was asked to stop and exited with 0 after 0.5 s, before its work was done"
    assert "such as 143" in failure.advice


def test_ignoring_sigterm_until_the_grace_is_over_is_shown_up() -> None:
    (failure,) = terminated(137, after_s=10.0).report().failed_checks
    assert failure.check is ScriptCheck.STOP_SIGNAL
    assert (
        failure.evidence
        == "the pod was asked to stop by SIGTERM, and was killed 10.0 s later, at the end of its grace period"
    )


def test_who_was_killed_by_another_fault_meanwhile_ignored_nothing() -> None:
    tale = Tale("a").start(0.0).fault(2.0, "term pod grace=10", "a").stop(2.0, "a").fault(3.0, "kill pod", "a")
    assert broken(finished(tale.end(3.0, "a", 137, "Restarting").start(4.0), 9.0)) == []


def test_a_pod_that_had_just_done_its_last_step_may_end_with_0() -> None:
    tale = Tale("a", "b").start(0.0).steps(1.0, range(1, 61)).fault(7.0, "term pod", "a").stop(7.0, "a")
    assert broken(tale.end(7.1, "a", 0).end(7.2, "b", 0).condition(7.2)) == []


def test_a_pod_that_leaves_with_0_before_the_others_last_step_is_shown_up_though_the_job_succeeds() -> None:
    tale = Tale("a", "b").start(0.0).steps(1.0, range(1, 21)).fault(3.0, "term pod", "a").stop(3.0, "a")
    tale.end(3.5, "a", 0).steps(4.0, range(21, 61), "b").end(9.0, "b", 0).condition(9.0)
    assert broken(tale) == ["the script exited with 0 on SIGTERM"]


# -- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "ends_with"), [(0, 1), (1, 1), (137, 137), (143, 143)])
def test_a_job_that_succeeded_but_failed_a_check_fails_the_rehearsal_and_no_other_code_is_hidden(
    code: int, ends_with: int
) -> None:
    assert restarted(before=40, resumed=1).report(exit_code=code).exit_code == ends_with
