"""An elastic job goes on without node 0, and with it again; a fixed one that may shrink goes on with fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pods import job, wait_until
from tests.survival.jobs import (
    DEADLINE_S,
    ELASTIC,
    FIXED,
    LONG,
    MARKS,
    Recovery,
    begun,
    completed,
    is_steady,
    lose_pod,
    move_pod,
    node_states,
    training,
)

pytestmark = [*MARKS, LONG, pytest.mark.usefixtures("names")]


def test_an_elastic_job_goes_on_without_node_0_and_every_pod_can_tell(tmp_path: Path) -> None:
    with job(ELASTIC.names, training(tmp_path), ELASTIC.env_of) as running:
        begun(running)
        for node in range(3):
            assert node_states(running, node) == ["running"] * 3
        recovery = Recovery(running)
        lose_pod(0)(running)
        recovery.wait(workers=2)
        for node in (1, 2):
            assert sorted(node_states(running, node)) == ["missing", "running", "running"]
        completed(running)
        assert recovery.starts == [0, 0, 0]


def test_node_0_comes_back_late_and_under_another_address(tmp_path: Path) -> None:
    """The others have gone on by then; all meet at node 0 again."""
    with job(ELASTIC.names, training(tmp_path), ELASTIC.env_of, restart_s=600.0) as running:
        begun(running)
        recovery = Recovery(running)
        move_pod(0)(running)
        recovery.wait(workers=2)
        running.pods[0].come_back()
        wait_until(lambda: is_steady(tmp_path, 3), "all three to train again", running.pods, DEADLINE_S)
        completed(running)
        assert recovery.starts == [1, 0, 0]


def test_a_fixed_job_with_a_minimum_goes_on_with_fewer(tmp_path: Path) -> None:
    options = ("--min-nodes", "2", "--shrink-after", "1")
    with job(FIXED.names, training(tmp_path), FIXED.env_of, *options) as running:
        begun(running)
        recovery = Recovery(running)
        lose_pod(2)(running)
        recovery.wait(workers=2)
        completed(running)
        assert recovery.starts == [0, 0, 0]
