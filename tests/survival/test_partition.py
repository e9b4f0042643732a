"""The network falls apart: at most one side goes on, and when it heals all train together again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pods import job, wait_until
from tests.survival.jobs import (
    DEADLINE_S,
    ELASTIC,
    FIXED,
    MARKS,
    Recovery,
    begun,
    completed,
    is_steady,
    plug,
    steps,
    training,
    unplug,
)

pytestmark = [*MARKS, pytest.mark.long("tests/membership/test_divided.py"), pytest.mark.usefixtures("names")]


@pytest.mark.parametrize("alone", [0, 2], ids=["node-0-alone", "node-2-alone"])
def test_the_majority_of_an_elastic_job_goes_on_and_the_other_side_waits(alone: int, tmp_path: Path) -> None:
    with job(ELASTIC.names, training(tmp_path), ELASTIC.env_of) as running:
        begun(running)
        recovery = Recovery(running)
        unplug(alone)(running)
        recovery.wait(workers=2)
        wait_until(lambda: not running.pods[alone].workers(), "the minority to stop", running.pods, DEADLINE_S)
        plug(alone)(running)
        wait_until(lambda: is_steady(tmp_path, 3), "all three to train again", running.pods, DEADLINE_S)
        completed(running)
        assert recovery.starts == [0, 0, 0]
    assert {step.workers for step in steps(tmp_path)} == {2, 3}, "nobody has trained alone"


def test_a_fixed_job_waits_until_the_network_heals(tmp_path: Path) -> None:
    with job(FIXED.names, training(tmp_path), FIXED.env_of) as running:
        begun(running)
        recovery = Recovery(running)
        unplug(0)(running)
        are_stopped = lambda: not any(pod.workers() for pod in running.pods)  # noqa: E731
        wait_until(are_stopped, "all workers to stop", running.pods, DEADLINE_S)
        plug(0)(running)
        recovery.wait()
        completed(running)
        assert recovery.starts == [0, 0, 0]
