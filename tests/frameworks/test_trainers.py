"""Transformers, Lightning and torchtune, each with its example, under our torch engine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.launching import Started
from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]


TYPED = {
    "transformers": "train_transformers.py --steps 80 --checkpoints {}",
    "lightning": "train_lightning.py --steps 80 --checkpoints {}",
    "torchtune": "tune run --nproc_per_node 1 train_torchtune.py --config train_torchtune.yaml steps=80 "
    "checkpoint={}/c",
}
TRAINJOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: local}
spec:
  runtimeRef: {name: torchtune-qwen2.5-1.5b}
  trainer:
    numNodes: 2
    numProcPerNode: 1
    command: [trainer-launch, run, --, tune, run, --nproc_per_node, "1"]
    args: [train_torchtune.py, --config, train_torchtune.yaml, steps=80, checkpoint=/workspace/c]
"""


@pytest.mark.parametrize("name", TYPED)
def test_a_job_goes_on_after_a_killed_worker_and_a_lost_pod(name: str, tmp_path: Path) -> None:
    goes_on(name, "--nodes", "2", last=("--", *TYPED[name].format(tmp_path / "saved").split()))


def test_a_trainjob_of_a_torchtune_runtime_goes_on_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TRAINJOB)
    goes_on("torchtune", "-f", str(tmp_path / "job.yaml"))


def goes_on(name: str, *options: str, last: tuple[str, ...] = ()) -> None:
    faults = ("--fault", "kill worker node=1 at=step:30", "--fault", "kill pod node=1 at=step:60")
    words = ("rehearse", *options, *faults, *last)
    beside = {"PATH": f"{Path(frameworks.python(name)).parent}:{os.environ['PATH']}"}
    with Started(words, frameworks.env(beside), frameworks.EXAMPLES, frameworks.launcher(name)) as job:
        output = job.ends_with(0, RUN_S)
    assert {f"rank {rank} of 2" for rank in (0, 1)} <= set(re.findall(r"rank \d of \d", output))
    first, second = map(int, re.findall(r"resumed at step (\d+)", output))
    assert 20 <= first < second < 80
    told = losses(output)
    assert told[0] > 3 > told[-1], "a model that knows nothing has 5.55"
    pods = re.findall(r"^local-node-0-(\d) +Succeeded +(\d) +0 ", output, re.MULTILINE)
    assert pods == [("0", "1"), ("1", "2")], "only the lost pod was created anew"
