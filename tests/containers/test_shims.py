"""What Kubeflow's SDKs submit, in an image of `--target shims`: its torchrun runs under the launcher."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers import jobs
from tests.containers.images import MAKING_S, image
from tests.containers.podman import Cluster
from tests.frameworks import frameworks
from tests.frameworks.kubeflow_api import EXAMPLE, submitted, submitted_by_v1

pytestmark = [
    pytest.mark.containers,
    pytest.mark.process,
    pytest.mark.timeout(MAKING_S + frameworks.MAKING_S),
]
PODS = 2


STEPS, CHECKPOINT = 30_000, "/checkpoints/line.pt"


def trainjob(folder: Path) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Its pods' command, and each one's variables, by the pod's name."""
    job = submitted([EXAMPLE, "--steps", str(STEPS), "--checkpoint", CHECKPOINT], folder)
    pods = {f"job-node-0-{node}": jobs.env_of(node, pods=PODS) for node in range(PODS)}
    return job["spec"]["trainer"]["command"], pods


def pytorchjob(folder: Path) -> tuple[list[str], dict[str, dict[str, str]]]:
    """As training-operator 1.9 makes them: pkg/controller.v1/pytorch/envvar.go."""
    job = submitted_by_v1(folder, STEPS, CHECKPOINT)
    made = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    same = {
        "MASTER_ADDR": "line-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(PODS),
        "PYTHONUNBUFFERED": "1",
    }
    same |= {f"PET_{name}": same[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    same |= {"PET_NNODES": str(PODS), "PYTHONUNBUFFERED": "1"}
    names = ("line-master-0", "line-worker-0")
    pods = {
        name: {**same, "RANK": str(node), "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "1"}
        for node, name in enumerate(names)
    }
    return [*made["command"], *made["args"]], pods


@pytest.mark.parametrize("job", [trainjob, pytorchjob])
def test_a_killed_worker_is_restarted_in_place(
    job: Callable[[Path], tuple[list[str], dict[str, dict[str, str]]]], cluster: Cluster, tmp_path: Path
) -> None:
    command, variables = job(tmp_path)
    # The SDK's command writes the function into the working directory.
    places = ["-v", f"{cluster.volume('job')}:/checkpoints", "-w", "/tmp"]
    pods = [
        cluster.start(name, image("shims"), command, env=env, options=places, entrypoint=False)
        for name, env in variables.items()
    ]
    pods[0].until_it_says("step 20/")
    worker = re.search(r"rank 1 of 2, pid (\d+)", pods[1].logs())
    assert worker is not None, pods[1].logs()
    assert pods[1].execute("sh", "-c", f"kill -9 {worker[1]}").returncode == 0
    pods[0].until_it_says("generation 2: 2 nodes, 1 restart so far")
    pods[0].until_it_says("resumed at step ")
    for pod in pods:
        assert pod.is_running, pod.logs()  # no container was restarted
