"""The engine of mpirun: what its agent is told of signals, and by which it is asked to stop."""

from __future__ import annotations

import signal

import pytest

from tests.planning.requests import request, spec_of
from trainer_launch.model import Job, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines

ALONE = Job(contract="unknown")


@pytest.mark.parametrize("line", ["mpirun -np 2 x", "horovodrun -np 2 x"])
def test_the_agent_knows_what_signals_are_for_and_is_asked_to_stop_by_one_that_says_so(line: str) -> None:
    text = "TERM=drain,USR1=checkpoint"
    plan = engines.plan(request(line, ALONE, signals=text))
    told = spec_of(plan).task.signals
    assert told == signal_policy.parse(text)
    assert plan.stop_signal == signal.SIGINT


def test_by_default_it_is_sigterm() -> None:
    plan = engines.plan(request("mpirun -np 2 x", ALONE))
    told = spec_of(plan).task.signals
    assert (plan.stop_signal, told) == (signal.SIGTERM, {})


def test_some_signal_has_to_be_left_to_stop_by() -> None:
    given = "TERM=drain,INT=drain,QUIT=drain,HUP=drain"
    with pytest.raises(UsageError, match="no signal that stops the job"):
        engines.plan(request("mpirun -np 2 x", ALONE, signals=given))
