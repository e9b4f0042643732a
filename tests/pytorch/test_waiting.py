"""A node says what it waits for: its coordinator, other nodes, or its own import of torch."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.pytorch.nodes import MEMBER, PLAN, Here
from tests.supervisor.fakes import Program
from trainer_launch.membership import protocol as say
from trainer_launch.model import Plan, Verdict
from trainer_launch.supervisor import outcome

CLOSED = "the coordinator has closed the connection"
ENDS = [Program(ends_s=1)]
MISSING = say.Waiting(present=1, wanted=3, missing=("node 1 (job-node-0-1)", "node 2"))


def waiting(tmp_path: Path, plan: Plan = PLAN) -> Here:
    """A node that has not been connected yet."""
    here = Here(tmp_path, plan=plan)
    here.coordinator._news.clear()
    here.coordinator._is_away = True
    here.coordinator.connection = CLOSED
    return here


def plan_for(patience_s: float) -> Plan:
    return replace(PLAN, membership=replace(MEMBER, patience_s=patience_s))


def test_what_a_node_waits_for_is_said_again_with_the_time_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ended = waiting(tmp_path, plan_for(100.0)).run()
    again = [line for line in caplog.messages if line.startswith(CLOSED)]
    assert again == [f"{CLOSED}; giving up in {left} s" for left in (75, 50, 25)]
    assert ended.verdict is Verdict.FAILED


def test_a_node_that_was_connected_says_nothing_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    here = Here(tmp_path)
    here.coordinator.forms = False
    here.system.signalled(200, signal.SIGTERM)
    here.run()
    assert "giving up" not in caplog.text


@pytest.mark.parametrize(
    ("news", "said"),
    [
        (None, f"it was waiting: {CLOSED}"),
        (MISSING, "it was waiting: 1 of 3 nodes, without node 1 (job-node-0-1), node 2"),
    ],
)
def test_a_node_that_is_stopped_while_it_waits_says_for_what(
    news: say.Waiting | None, said: str, tmp_path: Path
) -> None:
    here = waiting(tmp_path) if news is None else Here(tmp_path).hears(1, news)
    here.coordinator.forms = False
    here.system.signalled(5, signal.SIGTERM)
    ended = here.run()
    line = outcome.summary(ended)
    assert line.startswith("reason=Stopped exit=143 ")
    assert line.endswith(f" | {said}")


@pytest.mark.parametrize("state", ["imports", "could not be started yet"])
def test_a_node_whose_fork_server_is_not_ready_says_so_and_then_that_it_is(tmp_path: Path, state: str) -> None:
    here = Here(tmp_path, rank_0=ENDS, rank_1=ENDS)
    if state == "imports":
        here.does(300, lambda: None)
        here.starter.ready_at_s = 300
    else:
        here.starter.retry_at_s = 20
    assert here.run().verdict is Verdict.SUCCEEDED
    assert [join.prepared for join in here.coordinator.joins] == [False, True]
