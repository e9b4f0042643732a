"""A JobSet and an Indexed Job without an operator above them train on two nodes here, and survive a fault."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.conftest import require
from tests.rehearsal.controllers.test_plain_jobs import INDEXED, TWO, a_job, a_set

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/rehearsal/test_faults.py"),
]

EXAMPLES = Path(__file__).parents[2] / "docker" / "examples"
STEPS = ("--steps", "200", "--batch", "2", "--seq", "16", "--checkpoint-every", "10", "--log-every", "10")


def rehearsed(text: str, tmp_path: Path, host: str, nodes: str, fault: str) -> str:
    """What a rehearsal of the manifest said that trains on two nodes and resumed from its checkpoint."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    env = f"env: [{{name: MASTER_ADDR, value: {host}}}, {{name: MASTER_PORT, value: '29500'}}{nodes}]"
    script = [str(EXAMPLES / "train_charlm.py"), *STEPS, "--checkpoint", str(tmp_path / "model.pt")]
    command = ["trainer-launch", "run", *([] if nodes else ["--nodes", "2"]), "--", *script]
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("image: i", f"image: i, {env}, command: {command}"))
    ended = launch("rehearse", "-f", str(path), "--fault", fault)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = re.findall(r"resumed at step (\d+)", ended.stdout)
    assert 10 <= int(step) < 200
    assert re.search(r"rank 1 of 2", ended.stdout)
    return ended.stderr


def test_a_jobset_whose_worker_is_killed_recovers_in_place(tmp_path: Path) -> None:
    text = a_set(f"{TWO}, backoffLimit: 0")
    told = rehearsed(text, tmp_path, "set-w-0-0.set", "", "kill worker node=1 at=step:12")
    assert len(re.findall(r"^set-w-0-\d  Succeeded  1  +0 ", told, re.MULTILINE)) == 2, told
    assert "JobSet set: Succeeded" in told


def test_an_indexed_job_whose_pod_is_killed_gets_it_back(tmp_path: Path) -> None:
    text = a_job(INDEXED, "restartPolicy: Never, subdomain: nodes")
    index = "metadata.annotations[''batch.kubernetes.io/job-completion-index'']"
    rank = f"{{name: RANK, valueFrom: {{fieldRef: {{fieldPath: '{index}'}}}}}}"
    nodes = f", {{name: WORLD_SIZE, value: '2'}}, {rank}"
    told = rehearsed(text, tmp_path, "train-0.nodes", nodes, "kill pod node=1 at=step:12")
    assert re.search(r"^train-1  Succeeded  2 ", told, re.MULTILINE), told
    assert re.search(r"^train-0  Succeeded  1 ", told, re.MULTILINE), told
    assert "Job train: Succeeded" in told


RETRIED = ("--max-restarts", "0", "--fault", "kill worker node=1 at=step:12")


@pytest.mark.parametrize("example", ["job-restart-rules", "jobset-in-place-restart"])
def test_a_retryable_exit_code_restarts_the_containers_in_place(example: str) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    ended = launch("rehearse", "-f", str(EXAMPLES / f"{example}.yaml"), *RETRIED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"resumed at step \d+", ended.stdout)
    assert re.search(r"^\S+-0  Succeeded +1 +[1-9] +0 ", ended.stderr, re.MULTILINE), ended.stderr
    assert re.search(r"^\S+-1  Succeeded +1 +\d +0 ", ended.stderr, re.MULTILINE), ended.stderr


@pytest.mark.parametrize("example", ["job-restart-rules", "jobset-in-place-restart"])
def test_a_permanent_exit_code_fails_a_job_whose_containers_restart_in_place(example: str, tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    text = (EXAMPLES / f"{example}.yaml").read_text(encoding="utf-8")
    path = tmp_path / "job.yaml"
    path.write_text(text.replace('"40"', "forty").replace("train_charlm.py", str(EXAMPLES / "train_charlm.py")))
    ended = launch("rehearse", "-f", str(path))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "(PodFailurePolicy)" in ended.stderr
