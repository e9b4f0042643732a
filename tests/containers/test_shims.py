"""What Kubeflow's SDK submits, in an image of `--target shims`: its torchrun runs under the launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.containers import jobs
from tests.containers.images import MAKING_S, image
from tests.containers.podman import Cluster
from tests.frameworks import frameworks
from tests.frameworks.kubeflow_api import submitted

pytestmark = [
    pytest.mark.containers,
    pytest.mark.process,
    pytest.mark.timeout(MAKING_S + frameworks.MAKING_S),
]
PODS = 2


def test_a_killed_worker_is_restarted_in_place(cluster: Cluster, tmp_path: Path) -> None:
    example = frameworks.EXAMPLES / "create_job.py"
    job = submitted([example, "--steps", "2000", "--checkpoint", "/checkpoints/line.pt"], tmp_path)
    command = job["spec"]["trainer"]["command"]
    # The SDK's command writes the function into the working directory.
    places = ["-v", f"{cluster.volume('job')}:/checkpoints", "-w", "/tmp"]
    pods = [
        cluster.start(
            f"job-node-0-{node}",
            image("shims"),
            command,
            env=jobs.env_of(node, pods=PODS),
            options=places,
            entrypoint=False,
        )
        for node in range(PODS)
    ]
    pods[0].until_it_says("step 20/")
    worker = re.search(r"rank 1 of 2, pid (\d+)", pods[1].logs())
    assert worker is not None, pods[1].logs()
    assert pods[1].execute("sh", "-c", f"kill -9 {worker[1]}").returncode == 0
    pods[0].until_it_says("generation 2: 2 nodes, 1 restart so far")
    pods[0].until_it_says("resumed at step ")
    assert all(pod.is_running for pod in pods), "no container was restarted"
