"""Torch jobs of three pods as Kubeflow Trainer v2 makes them, in containers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.containers.images import ROOT, image
from tests.containers.podman import Cluster, Container

EXAMPLES = ROOT / "docker" / "examples"
PODS = 3


def env_of(node: int, job: str = "job", pods: int = PODS) -> dict[str, str]:
    """What kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go gives a pod."""
    return {
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": f"{job}-node-0-0",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(node),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def options(cluster: Cluster, job: str = "job", *, more: Sequence[str] = ()) -> list[str]:
    """The user's code, and a claim for checkpoints."""
    volumes = ["-v", f"{EXAMPLES}:/code:ro", "-v", f"{cluster.volume(job)}:/checkpoints", "-w", "/code"]
    return [*volumes, *more]


def train(steps: int) -> list[str]:
    words = ["--steps", str(steps), "--batch", "4", "--seq", "16", "--log-every", "1", "--checkpoint-every", "5"]
    return ["train_charlm.py", *words, "--checkpoint", "/checkpoints/model.pt"]


def start_pod(cluster: Cluster, node: int, words: Sequence[str], job: str = "job") -> Container:
    """A pod of the job, or the next one in its place."""
    made = options(cluster, job)
    return cluster.start(f"{job}-node-0-{node}", image("torch"), words, env=env_of(node, job), options=made)


def start_job(cluster: Cluster, words: Sequence[str], job: str = "job") -> list[Container]:
    return [start_pod(cluster, node, words, job) for node in range(PODS)]


def steps_in(text: str) -> list[int]:
    """The steps that a log tells of, in their order."""
    return [int(number) for number in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


def checkpoint(cluster: Cluster, job: str = "job") -> Path:
    return Path(cluster.volume(job)) / "model.pt"
