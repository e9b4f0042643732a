"""A spare takes the place of a lost node at once, and the pod that comes back becomes the spare."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.survival.jobs import MARKS, Recovery, begun, completed, kill_pod, lose_pod, trainer_v2, training
from tests.survival.kubelet import Job, job, wait_until

pytestmark = MARKS
NAMES = tuple(f"job-node-0-{node}" for node in range(4))
SPARE = "this node was a spare, and the job did not need it"


def env_of(node: int, nodes: int = 3) -> dict[str, str]:
    return trainer_v2(node, nodes) | {"TRAINER_LAUNCH_SPARES": "1"}


def states(job: Job, node: int, tmp: Path) -> list[str]:
    """The nodes' states as `status` prints them in a pod; none while it cannot tell."""
    inside = ("nsenter", "-t", str(job.pods[node].launcher().pid), "--net", "--pid", "--mount", "--uts")
    words = (*(inside if hasattr(job.machines[node], "namespace") else ()), *LAUNCHER, "status", "--json")
    env = clean_env({"TMPDIR": str(tmp), "PYTHONPATH": str(Path.cwd())})
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    table = json.loads(done.stdout or "{}").get("job")
    return [row[2] for row in table["nodes"]] if table else []


def test_the_spare_replaces_a_killed_pod_which_comes_back_as_the_spare(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    with job(
        NAMES[:3],
        training(tmp_path),
        lambda node: env_of(node) | {"TMPDIR": str(tmp)} if not node else env_of(node),
    ) as running:
        begun(running, 2)
        wait_until(lambda: states(running, 0, tmp) == ["running", "running", "spare"], "a spare", running.pods, 60)
        recovery = Recovery(running)
        kill_pod(1)(running)
        recovery.wait(2)
        wait_until(
            lambda: states(running, 0, tmp) == ["running", "spare", "running"], "it as the spare", running.pods, 60
        )
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
