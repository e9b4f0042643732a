"""A spare takes the place of a lost node at once, and the pod that comes back becomes the spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pods import job, wait_until
from tests.survival.jobs import (
    DEADLINE_S,
    MARKS,
    Recovery,
    begun,
    completed,
    kill_pod,
    lose_pod,
    node_states,
    trainer_v2,
    training,
)

pytestmark = MARKS
NAMES = tuple(f"job-node-0-{node}" for node in range(4))
SPARE = "this node was a spare, and the job did not need it"


def env_of(node: int, nodes: int = 3) -> dict[str, str]:
    return trainer_v2(node, nodes) | {"TRAINER_LAUNCH_SPARES": "1"}


def test_the_spare_replaces_a_killed_pod_which_comes_back_as_the_spare(tmp_path: Path) -> None:
    with job(NAMES[:3], training(tmp_path), env_of) as running:
        begun(running, 2)
        states = lambda: node_states(running, 0)  # noqa: E731
        wait_until(lambda: states() == ["running", "running", "spare"], "a spare", running.pods, DEADLINE_S)
        recovery = Recovery(running)
        kill_pod(1)(running)
        recovery.wait(2)
        wait_until(lambda: states() == ["running", "spare", "running"], "it as the spare", running.pods, DEADLINE_S)
        completed(running)
        assert (recovery.starts, recovery.failures) == ([0, 1, 0], 0)
        assert [SPARE in pod.last_words[-1] for pod in running.pods] == [False, True, False]
        assert "node 2 (job-node-0-2) replaces node 1 (job-node-0-1)" in "".join(running.pods[0].lines)


@pytest.mark.long("tests/survival/test_spares.py")
@pytest.mark.usefixtures("names")
def test_a_fixed_job_with_a_spare_goes_on_without_node_0(tmp_path: Path) -> None:
    """Node 0 had the coordinator: the others elect another one."""
    with job(NAMES, training(tmp_path), lambda node: env_of(node, 4)) as running:
        begun(running)
        recovery = Recovery(running)
        lose_pod(0)(running)
        recovery.wait()
        completed(running)
        assert recovery.starts == [0, 0, 0, 0]
