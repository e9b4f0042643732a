"""Whole runs, as scripts of events, through the loop and a fake system."""

from __future__ import annotations

import signal

from tests.supervisor.fakes import FakeSystem
from trainer_launch.model import Exit, Plan, Process, Verdict
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.loop import supervise

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


def plan(*names, **fields):
    processes = tuple(Process(name=name, argv=(name,), env={}) for name in names or ("a",))
    return Plan(**{"engine": "test", "processes": processes, "grace_s": 10.0, **fields})


def ended(at_s, name="a", code=0, number=None):
    return ev.Exited(at_s, Exit(process=name, code=None if number else code, signal=number, at_s=at_s))


def run(start, *script, **world):
    system = FakeSystem(*script, **world)
    return supervise(start, system), system.calls


def test_what_hangs_in_the_kernel_does_not_keep_us():
    ended_, _ = run(plan(), ev.Signalled(1, TERM), immortal=["pid 7 (a, stuck)"])
    assert (ended_.survivors, ended_.took_s) == (("pid 7 (a, stuck)",), 14.0)
    assert outcome.exit_code(ended_) == 143


def test_what_somebody_killed_is_started_again_on_clean_ground():
    ended_, calls = run(plan(restarts=1), ended(1, number=KILL), ev.Childless(2), ended(5))
    assert calls == [
        (0, "spawn", "a"),
        (1, "look"),
        (1, "all", TERM),
        (2, "clean"),
        (2, "spawn", "a"),
        (5, "all", TERM),
        (5, "drain"),
    ]
    assert (ended_.verdict, [end.exit_code for end in ended_.exits]) == (Verdict.SUCCEEDED, [137, 0])


def test_it_is_started_again_only_so_often():
    ended_, calls = run(plan(restarts=1), ended(1, number=KILL), ev.Childless(2), ended(3, number=KILL))
    assert [call[1] for call in calls].count("spawn") == 2
    assert (ended_.failure.reason, outcome.exit_code(ended_)) == ("Killed", 137)


def test_only_the_last_hours_starts_count_in_a_job_of_weeks():
    killed = [
        event for hour in range(9) for event in (ended(hour * 3601 + 1, number=KILL), ev.Childless(hour * 3601 + 2))
    ]
    ended_, calls = run(plan(restarts=1), *killed, ended(99_999))
    assert [call[1] for call in calls].count("spawn") == 10
    assert ended_.verdict is Verdict.SUCCEEDED


def test_what_ends_by_itself_is_not_started_again():
    ended_, calls = run(plan(restarts=1), ended(1, code=9))
    assert [call[1] for call in calls].count("spawn") == 1
    assert outcome.exit_code(ended_) == 9


def test_nothing_is_started_again_once_we_were_asked_to_stop():
    ended_, calls = run(plan(restarts=1), ev.Signalled(1, TERM), ended(2, number=KILL))
    assert [call[1] for call in calls].count("spawn") == 1
    assert outcome.exit_code(ended_) == 143


def test_one_of_two_programs_is_not_there():
    ended_, calls = run(plan("a", "b"), ended(2, "b"), missing=["a"])
    assert outcome.exit_code(ended_) == 127
    assert (0, "leader", "b", TERM) in calls


def test_of_two_failures_the_first_counts():
    ended_, _ = run(plan("a", "b"), ended(2, "b", 7), ended(2.5, "a", 9))
    assert (outcome.exit_code(ended_), len(ended_.exits)) == (7, 2)


def test_what_hangs_is_ended_politely_and_the_hang_is_the_cause_however_it_ends():
    for code, number in ((0, None), (1, None), (None, KILL)):
        ended_, calls = run(plan(), ev.Hung(1, "asleep", ("state S",)), ended(3, code=code, number=number))
        assert calls[1] == (1, "leader", "a", TERM)
        assert (ended_.failure.reason, ended_.failure.message) == ("Hung", "asleep")
        assert ended_.failure.last_lines == ("state S",)
        assert outcome.exit_code(ended_) == 138


def test_what_hangs_in_the_kernel_and_cannot_be_ended_is_named():
    ended_, _ = run(plan(), ev.Hung(1, "asleep"), immortal=["pid 7 (a, stuck)"])
    assert (ended_.failure.reason, ended_.survivors) == ("Hung", ("pid 7 (a, stuck)",))


def test_what_hangs_is_started_again_as_often_as_the_plan_says():
    ended_, calls = run(plan(restarts=1), ev.Hung(1, "asleep"), ended(3), ev.Childless(4), ended(9))
    assert [call for call in calls if call[1] == "spawn"] == [(0, "spawn", "a"), (4, "spawn", "a")]
    assert ended_.verdict is Verdict.SUCCEEDED


def test_a_hang_that_is_found_while_all_ends_anyway_changes_nothing():
    ended_, _ = run(plan(), ev.Signalled(1, TERM), ev.Hung(2, "asleep"), ended(3))
    assert (ended_.verdict, ended_.failure) == (Verdict.STOPPED, None)


class Watch:
    """Is due each second, and finds a hang at the tenth."""

    due_s = 0.0

    def __init__(self):
        self.looked = []

    def look(self, now_s):
        self.looked.append(now_s)
        self.due_s = now_s + 1
        return ev.Hung(now_s, "asleep") if len(self.looked) == 10 else None


def test_the_watch_looks_at_its_own_pace_and_only_at_what_runs():
    watch = Watch()
    system = FakeSystem(ended(12))
    ended_ = supervise(plan(), system, watch)
    assert watch.looked == list(range(10))
    assert ended_.verdict is Verdict.FAILED
