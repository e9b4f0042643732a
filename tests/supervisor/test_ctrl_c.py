"""Ctrl-C, on a system that is not there: whom it reaches, and what the second one does."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.supervisor.fakes import KILL, TERM, FakeSystem, Program
from trainer_launch.model import Plan, Process, Verdict
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.program_loop import supervise

INT, QUIT = int(signal.SIGINT), int(signal.SIGQUIT)
DEAF = Program(term_s=None)


def told(system: FakeSystem, **fields: Any) -> list[tuple[object, ...]]:
    """What a run that is stopped does, from its first request to the end."""
    processes = (Process(name="a", argv=("a",), env={}),)
    plan = Plan(engine="test", processes=processes, grace_s=10.0, **fields)
    ended = supervise(plan, system)
    assert ended.verdict is Verdict.STOPPED
    assert outcome.exit_code(ended) in (130, 143)
    return [call for call in system.calls if call[1] in ("leader", "all again")]


def test_it_is_the_leaders_as_from_a_terminal() -> None:
    assert told(FakeSystem({"a": [Program(dies_of=(INT,))]}).signalled(1, INT)) == [(1, "leader", "a", INT)]


def test_who_ignores_it_is_stopped_as_ever() -> None:
    assert told(FakeSystem({"a": [DEAF]}).signalled(1, INT)) == [
        (1, "leader", "a", INT),
        (9, "all again", TERM),
        (11, "all again", KILL),
    ]


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
