"""Every cell of the drawing."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from trainer_launch.model import Exit, Plan, Process, Verdict
from trainer_launch.model.errors import InternalError
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import state_machine
from trainer_launch.supervisor.events import Phase

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
A, B = (Process(name=name, argv=(name,), env={}) for name in "ab")


USR1, USR2 = int(signal.SIGUSR1), int(signal.SIGUSR2)
FORWARD, CHECKPOINT, DRAIN, TERMINATE = SignalAction


def plan(**fields):
    signals = {USR2: DRAIN}
    return Plan(**{"engine": "test", "processes": (A, B), "grace_s": 10.0, "signals": signals, **fields})


def ended(name, code=0, at_s=1.0):
    return ev.Exited(at_s, Exit(process=name, code=code, signal=None, at_s=at_s))


def play(start, *events):
    """Feed events to a plan; return the last state and the actions of the last step."""
    state, actions = state_machine.begin(start, 0.0)
    for event in events:
        state, actions = state_machine.step(state, event)
    return state, actions


ASK = ev.Signalled(1.0, TERM)
AT = {  # one way into each state
    Phase.WAITING: (plan(wait_for=("x",), wait_s=5.0),),
    Phase.RUNNING: (plan(),),
    Phase.STOPPING: (plan(), ASK),
    Phase.CLEARING: (plan(), ended("a"), ended("b")),
    Phase.KILLING: (plan(), ASK, ASK, ASK),
    Phase.DONE: (plan(), ended("a"), ended("b"), ev.Childless(1.0)),
}
EVENTS = {
    "opened": ev.Resolved(2.0),
    "unresolved": ev.Unresolved(2.0, "x: unknown"),
    "ended": ended("a", at_s=2.0),
    "not spawned": ev.SpawnFailed(2.0, "a", 127, "no a"),
    "stop": ev.Signalled(2.0, TERM),
    "drain": ev.Signalled(2.0, USR2),
    "other": ev.Signalled(2.0, USR1),
    "deadline": ev.Deadline(100.0),
    "childless": ev.Childless(2.0),
}
ILLEGAL = "illegal"
ENDED = ("ended", "not spawned")
DRAWING: dict[Phase, dict[str, Any]] = {
    Phase.WAITING: {
        "opened": Phase.RUNNING,
        "unresolved": Phase.WAITING,
        "stop": Phase.DONE,
        "drain": Phase.DONE,
        "deadline": Phase.DONE,
    }
    | {"other": Phase.WAITING}
    | dict.fromkeys((*ENDED, "childless"), ILLEGAL),
    Phase.RUNNING: {"unresolved": Phase.RUNNING, "ended": Phase.RUNNING, "not spawned": Phase.STOPPING}
    | {"stop": Phase.STOPPING, "drain": Phase.RUNNING, "other": Phase.RUNNING}
    | dict.fromkeys(("opened", "deadline", "childless"), ILLEGAL),
    Phase.STOPPING: dict.fromkeys(("unresolved", *ENDED, "stop", "drain", "other"), Phase.STOPPING)
    | {"deadline": Phase.KILLING}
    | dict.fromkeys(("opened", "childless"), ILLEGAL),
    Phase.CLEARING: dict.fromkeys(("unresolved", "stop", "drain", "other"), Phase.CLEARING)
    | {"deadline": Phase.KILLING, "childless": Phase.DONE}
    | dict.fromkeys(("opened", *ENDED), ILLEGAL),
    Phase.KILLING: dict.fromkeys(("unresolved", *ENDED, "stop", "drain", "other"), Phase.KILLING)
    | {"deadline": Phase.DONE, "childless": Phase.DONE, "opened": ILLEGAL},
    Phase.DONE: dict.fromkeys(EVENTS, Phase.DONE),
}
CELLS = [(phase, name) for phase in Phase for name in EVENTS]


@pytest.mark.parametrize(("phase", "name"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_each_cell_leads_where_the_drawing_says(phase, name):
    state, _ = play(*AT[phase])
    assert state.phase is phase
    wanted = DRAWING[phase][name]
    if wanted == ILLEGAL:
        with pytest.raises(InternalError, match=rf"{type(EVENTS[name]).__name__}.* while {phase.value}"):
            state_machine.step(state, EVENTS[name])
    else:
        assert state_machine.step(state, EVENTS[name])[0].phase is wanted


def test_names_that_never_resolve_fail_with_what_the_resolver_said():
    state, actions = play(*AT[Phase.WAITING], EVENTS["unresolved"], ev.Deadline(5.0))
    assert (state.names_failed, state.text, actions) == (True, "x: unknown", (ev.StopResolving(),))
    assert state.verdict is Verdict.FAILED
    assert "has not answered for x" in play(*AT[Phase.WAITING], ev.Deadline(5.0))[0].text


def test_the_first_request_does_not_hurry_a_stop_that_a_failure_began():
    state, actions = play(plan(), ended("a", 3), ASK)
    assert (state.phase, actions, state.stopped) == (Phase.STOPPING, (), False)
    assert play(plan(), ended("a", 3), ASK, ASK)[1] == (ev.SignalAll(TERM, again=True),)


def test_what_an_ended_process_left_is_told_at_once_and_killed_after_two_seconds():
    state, actions = play(plan(), ended("a"))
    assert (actions, state.deadline_s) == ((ev.SignalGroup("a", TERM),), 3.0)
    state, actions = state_machine.step(state, ev.Deadline(3.0))
    assert (actions, state.deadline_s) == ((ev.SignalGroup("a", KILL),), None)


def test_the_time_for_leftovers_is_cut_by_the_rest_of_the_grace():
    assert play(plan(), ended("a"), ended("b"))[0].deadline_s == 3.0
    assert play(plan(grace_s=1.0), ended("a"), ended("b"))[0].deadline_s == 2.0
    assert play(plan(), ASK, ended("a", at_s=2.0), ended("b", at_s=10.5))[0].deadline_s == 11.0


def killed(name, at_s, number=TERM):
    return ev.Exited(at_s, Exit(process=name, code=None, signal=number, at_s=at_s))


def test_what_a_shell_that_dies_of_the_request_left_has_the_rest_of_the_grace_to_save():
    state, _ = play(plan(), ASK, ended("a", at_s=1.1), killed("b", 1.2))
    assert (state.phase, state.deadline_s) == (Phase.CLEARING, 11.0)
    assert play(plan(), ASK, killed("a", 1.1), ended("b", at_s=1.2))[0].deadline_s == 11.0, "a's still save"
    assert play(plan(), EVENTS["drain"], killed("a", 2.1), killed("b", 3.0))[0].deadline_s == 13.0
    assert play(plan(), ended("a", 3), killed("b", 1.2))[0].deadline_s == 11.0, "a failure stops b likewise"


def test_nobody_has_longer_for_a_leader_that_was_killed_without_a_request():
    assert play(plan(processes=(A,)), killed("a", 1.0, KILL))[0].deadline_s == 3.0


def test_a_request_after_the_work_is_done_does_not_spoil_it():
    assert play(*AT[Phase.CLEARING], ASK, ev.Childless(2.0))[0].verdict is Verdict.SUCCEEDED


def to_leaders(number):
    return ev.SignalLeader("a", number), ev.SignalLeader("b", number)


def test_a_stop_signal_that_is_forwarded_asks_nobody_to_stop():
    state, actions = play(plan(signals={TERM: FORWARD}), ASK)
    assert (state.phase, state.stopped, actions) == (Phase.RUNNING, False, to_leaders(TERM))
    assert state.handed_on == {TERM}


def test_nothing_is_started_again_after_a_drain():
    one, dies = plan(processes=(A,), restarts=3), killed("a", 3.0, KILL)
    assert play(one, EVENTS["drain"], dies, ev.Childless(4.0))[0].phase is Phase.DONE
    assert play(one, dies, EVENTS["drain"], ev.Childless(4.0))[0].verdict is Verdict.FAILED
    assert play(one, dies, ev.Childless(4.0))[0].phase is Phase.RUNNING


def test_a_drain_after_the_work_is_done_does_not_spoil_it():
    assert play(*AT[Phase.CLEARING], EVENTS["drain"], ev.Childless(2.0))[0].verdict is Verdict.SUCCEEDED


def test_a_request_to_stop_puts_a_bound_to_a_drain():
    state, actions = play(plan(), EVENTS["drain"], ev.Signalled(5.0, TERM))
    assert (state.phase, state.kill_at_s, state.stop_signal) == (Phase.STOPPING, 15.0, TERM)
    assert actions == to_leaders(TERM)


def test_any_signal_can_be_a_request_to_stop_and_leaders_hear_term():
    state, actions = play(plan(signals={USR1: TERMINATE}), EVENTS["other"])
    assert (state.phase, actions) == (Phase.STOPPING, to_leaders(TERM))


def test_leaders_are_asked_by_the_signal_that_the_plan_says():
    assert play(plan(stop_signal=2, signals={TERM: DRAIN}), ev.Signalled(1.0, 2))[1] == to_leaders(2)


@pytest.mark.parametrize("action", SignalAction)
def test_while_names_are_awaited_there_is_nobody_to_hand_a_stop_signal_to(action):
    state, _ = play(plan(wait_for=("x",), wait_s=5.0, signals={TERM: action}), ASK)
    assert (state.phase, state.verdict) == (Phase.DONE, Verdict.STOPPED)


def test_after_a_victim_the_worker_at_fault_has_a_moment_to_end_and_is_the_cause():
    state, actions = play(plan(), ended("a", 138))
    assert state.phase is Phase.RUNNING
    assert not [action for action in actions if isinstance(action, ev.SignalLeader)], "b may end by itself"
    state, _ = state_machine.step(state, ended("b", 33, at_s=2.0))
    assert state.cause is not None
    assert (state.cause.process, state.cause.exit_code) == ("b", 33)


def test_a_victim_stays_the_cause_when_nobody_else_ends():
    state, _ = play(plan(), ended("a", 138))
    assert state.deadline_s is not None
    while state.phase is Phase.RUNNING:
        state, _ = state_machine.step(state, ev.Deadline(state.deadline_s))
    assert state.phase is Phase.STOPPING
    state, _ = state_machine.step(state, ended("b", 143, at_s=9.0))
    assert state.cause is not None
    assert state.cause.process == "a", "b ended because we asked it to"
