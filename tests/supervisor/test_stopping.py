"""How a program is stopped, also by Ctrl-C, and what comes of its end: runs on a system that is not there."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.supervisor.fakes import KILL, TERM, FakeSystem, Program, failure_of
from trainer_launch.model import Death, Outcome, Plan, Process, Verdict
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.processes import LAST_KILL_S, Processes
from trainer_launch.supervisor.run_loop import ProgramLoop
from trainer_launch.supervisor.run_observer import RunObserver

USR1, USR2 = int(signal.SIGUSR1), int(signal.SIGUSR2)
FORWARD, _, DRAIN, TERMINATE = SignalAction
IGNORES = Program(term_s=None)  # SIGTERM
STUCK = Program(term_s=None, is_stuck=True)  # in the kernel


def plan(**fields):
    processes = (Process(name="a", argv=("a",), env={}),)
    return Plan(**{"engine": "test", "processes": processes, "grace_s": 10.0, "signals": {USR2: DRAIN}, **fields})


def run(start: Plan, system: FakeSystem, watch=None) -> tuple[Outcome, list[tuple]]:
    return ProgramLoop(Processes(start, system, RunObserver()), watch).run(), system.calls


# -- rungs --------------------------------------------------------------------------------------


def test_a_stop_climbs_to_everyone_at_most_of_the_grace_and_to_sigkill_at_its_end() -> None:
    ended, calls = run(plan(), FakeSystem({"a": [IGNORES]}).signalled(1, TERM))
    assert calls[1:-1] == [(1, "leader", "a", TERM), (9, "all again", TERM), (11, "all again", KILL)]
    assert (ended.verdict, outcome.exit_code(ended)) == (Verdict.STOPPED, 143)


def test_each_further_request_climbs_at_once() -> None:
    system = FakeSystem({"a": [IGNORES]}).signalled(1, TERM).signalled(2, TERM).signalled(3, signal.SIGINT)
    assert run(plan(), system)[1][1:-1] == [
        (1, "leader", "a", TERM),
        (2, "all again", TERM),
        (3, "all again", KILL),
    ]


def test_sigkill_is_sent_again_and_what_hangs_in_the_kernel_is_named_and_keeps_us_for_3_s() -> None:
    ended, calls = run(plan(), FakeSystem({"a": [STUCK]}).signalled(1, TERM))
    assert [at_s for at_s, *words in calls if words == ["all again", KILL]] == [11, 11.1, 11.3, 11.7, 12.5]
    assert (len(ended.survivors), ended.took_s) == (1, 14.0)
    assert outcome.exit_code(ended) == 143


@pytest.mark.parametrize(("grace_s", "kill_s"), [(10.0, 3), (1.0, 2)])
def test_the_time_for_what_the_last_one_left_is_cut_by_the_grace(grace_s: float, kill_s: float) -> None:
    _, calls = run(plan(grace_s=grace_s), FakeSystem({"a": [Program(ends_s=1, leaves=(IGNORES,))]}))
    assert (kill_s, "all again", KILL) in calls


@pytest.mark.parametrize(
    ("signals", "shell", "kill_s"),
    [
        ((TERM,), Program(leaves=(IGNORES,)), 11),
        ((USR2,), Program(dies_of=(USR2,), leaves=(IGNORES,)), 11.1),
        ((), Program(ends_s=1, number=KILL, leaves=(IGNORES,)), 3),
    ],
    ids=["asked to stop", "drained", "killed by somebody else"],
)
def test_what_a_shell_that_dies_of_the_request_has_left_has_the_rest_of_the_grace_to_save(
    signals: tuple[int, ...], shell: Program, kill_s: float
) -> None:
    system = FakeSystem({"a": [shell]})
    _, calls = run(plan(), system.signalled(1, *signals) if signals else system)
    assert (kill_s, "all again", KILL) in calls


# -- the cause ----------------------------------------------------------------------------------


def test_a_request_or_a_drain_after_the_work_is_done_does_not_spoil_it() -> None:
    for number in (TERM, USR2):
        system = FakeSystem({"a": [Program(ends_s=1, leaves=(Program(term_s=1.5),))]}).signalled(2, number)
        assert run(plan(), system)[0].verdict is Verdict.SUCCEEDED


@pytest.mark.parametrize("number", [TERM, USR2])
@pytest.mark.parametrize("at_s", [0.5, 1.5, 3.05])
def test_a_failure_before_a_request_or_a_drain_stays_the_cause_also_during_the_last_kills(
    number: int, at_s: float
) -> None:
    """It was killed at 1 s; what it left behind is killed at 3 s, and takes a moment to die."""
    slow = Program(ends_s=3.1, number=KILL, term_s=None, is_stuck=True)
    system = FakeSystem({"a": [Program(ends_s=1, number=KILL, term_s=None, leaves=(slow,))]})
    ended, _ = run(plan(), system.signalled(at_s, number))
    assert ended.verdict is (Verdict.STOPPED if at_s < 1 else Verdict.FAILED), "it had failed before"


@pytest.mark.parametrize("number", [TERM, USR2])
def test_so_does_a_hang_where_the_request_or_the_drain_comes_while_it_is_stopped(number: int) -> None:
    ended, _ = run(plan(), FakeSystem({"a": [IGNORES]}).signalled(12, number), Watch())
    assert outcome.exit_code(ended) == 138


# -- signals ------------------------------------------------------------------------------------


def test_a_stop_signal_that_is_forwarded_asks_nobody_to_stop() -> None:
    ended, calls = run(
        plan(signals={TERM: FORWARD}), FakeSystem({"a": [Program(2, term_s=None)]}).signalled(1, TERM)
    )
    assert (ended.verdict, (1, "leader", "a", TERM) in calls) == (Verdict.SUCCEEDED, True)


def test_a_request_to_stop_puts_a_bound_to_a_drain_and_the_first_of_both_is_told() -> None:
    ended, calls = run(plan(), FakeSystem({"a": [IGNORES]}).signalled(1, USR2).signalled(5, TERM))
    assert (ended.stop_signal, (15, "all again", KILL) in calls) == (USR2, True)


def test_any_signal_can_be_a_request_to_stop_and_leaders_hear_the_plans_own() -> None:
    start = plan(signals={USR1: TERMINATE, TERM: DRAIN}, stop_signal=2)
    _, calls = run(start, FakeSystem({"a": [Program(2)]}).signalled(1, USR1))
    assert (1, "leader", "a", 2) in calls


# -- hangs --------------------------------------------------------------------------------------


class Watch:
    """Is due each second, and finds a hang at the tenth look."""

    def __init__(self) -> None:
        self.due_s = 0.0
        self.looked: list[float] = []

    def look(self, now_s: float) -> Death | None:
        self.looked.append(now_s)
        self.due_s = now_s + 1
        is_found = len(self.looked) == 10
        return Death(reason="Hung", message="asleep", lines=("state S",), at_s=now_s - 5) if is_found else None


@pytest.mark.parametrize("program", [Program(term_code=0), Program(term_code=1), IGNORES, STUCK])
def test_what_hangs_is_ended_politely_and_the_hang_is_the_cause_however_it_ends(program: Program) -> None:
    ended, calls = run(plan(), FakeSystem({"a": [program]}), Watch())
    assert calls[1] == (9, "leader", "a", TERM)
    assert (failure_of(ended).reason, failure_of(ended).message) == ("Hung", "asleep")
    assert (failure_of(ended).last_lines, outcome.exit_code(ended)) == (("state S",), 138)
    assert len(ended.survivors) == program.is_stuck


def test_the_watch_looks_at_its_own_pace_and_only_at_what_runs_and_is_to_run() -> None:
    watch = Watch()
    run(plan(), FakeSystem({"a": [IGNORES]}).signalled(4.5, TERM), watch)
    assert watch.looked == [0, 1, 2, 3, 4]


# -- any history --------------------------------------------------------------------------------

TIMES = st.floats(0, 60).map(lambda at_s: round(at_s, 1))
LIFE = st.builds(
    Program,
    ends_s=st.none() | TIMES,
    code=st.sampled_from([0, 1, 138]),
    number=st.none() | st.just(KILL),
    term_s=st.sampled_from([0.1, 3.0, None]),
    dies_of=st.sampled_from([(), (USR2,)]),
    is_stuck=st.booleans(),
    leaves=st.sampled_from([(), (Program(),), (IGNORES,)]),
)
LIVES = st.lists(LIFE, max_size=3)


@given(LIVES, st.lists(st.tuples(st.sampled_from([TERM, USR2]), TIMES), max_size=4), st.booleans())
@settings(deadline=None)
def test_any_history_ends_in_time(lives, signals, hangs) -> None:
    system = FakeSystem({"a": lives})
    for number, at_s in signals:
        system.signalled(at_s, number)
    start = plan()
    ended, _ = run(start, system.signalled(300, TERM), Watch() if hangs else None)
    assert ended.took_s <= 300 + start.grace_s + LAST_KILL_S


INT, QUIT = int(signal.SIGINT), int(signal.SIGQUIT)
DEAF = Program(term_s=None)


def told(system: FakeSystem, **fields: Any) -> list[tuple[object, ...]]:
    """What a run that is stopped does, from its first request to the end."""
    processes = (Process(name="a", argv=("a",), env={}),)
    plan = Plan(engine="test", processes=processes, grace_s=10.0, **fields)
    ended = ProgramLoop(Processes(plan, system, RunObserver())).run()
    assert ended.verdict is Verdict.STOPPED
    assert outcome.exit_code(ended) in (130, 143)
    return [call for call in system.calls if call[1] in ("leader", "all again")]


def test_it_is_the_leaders_as_from_a_terminal() -> None:
    assert told(FakeSystem({"a": [Program(dies_of=(INT,))]}).signalled(1, INT)) == [(1, "leader", "a", INT)]


def test_the_second_one_kills_at_once() -> None:
    system = FakeSystem({"a": [DEAF]}).signalled(1, INT).signalled(2, INT)
    assert told(system) == [(1, "leader", "a", INT), (2, "all again", KILL)]


@pytest.mark.parametrize("number", [TERM, QUIT])
def test_it_kills_at_once_what_somebody_else_has_asked_to_stop(number: int) -> None:
    system = FakeSystem({"a": [DEAF]}).signalled(1, number).signalled(2, INT)
    assert told(system) == [(1, "leader", "a", TERM), (2, "all again", KILL)]


def test_a_request_of_the_platform_after_it_climbs_as_ever() -> None:
    system = FakeSystem({"a": [DEAF]}).signalled(1, INT).signalled(2, TERM).signalled(3, TERM)
    assert told(system) == [(1, "leader", "a", INT), (2, "all again", TERM), (3, "all again", KILL)]


def test_who_has_given_it_another_meaning_is_obeyed() -> None:
    system = FakeSystem({"a": [DEAF]}).signalled(1, INT).signalled(2, TERM).signalled(3, INT).signalled(4, TERM)
    assert told(system, signals={INT: SignalAction.FORWARD}) == [
        (1, "leader", "a", INT),
        (2, "leader", "a", TERM),
        (3, "leader", "a", INT),
        (4, "all again", TERM),
        (12, "all again", KILL),
    ]
