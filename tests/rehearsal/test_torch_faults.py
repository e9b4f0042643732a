"""Faults while torch trains: each job goes on from its checkpoint, and its steps tell so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.launching import launched, script

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/rehearsal/test_faults.py"),
]

TRAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
import trainer_launch
dist.init_process_group("gloo")
rank, saved, last, most = dist.get_rank(), pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
step = int(saved.read_text()) if saved.exists() else 0
print("begun at %s with %s\\n" % (step, dist.get_world_size()), end="", flush=True)
while step < last or dist.get_world_size() < most:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    step += 1
    if rank == 0:
        beside = saved.with_name("new")
        beside.write_text(str(step))
        os.replace(beside, saved)
    {say}
dist.barrier()
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""
PRINTS = "print('step', step, flush=True)"
REPORTS = "trainer_launch.report(step=step, metrics={'size': most})"


def begun(stdout: str, node: int) -> list[int]:
    """At which steps the workers of a node began."""
    return [int(found) for found in re.findall(rf"^\[{node}:\d+\] begun at (\d+) ", stdout, re.MULTILINE)]


def test_a_killed_worker_costs_a_few_steps_and_no_pod(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN.replace("{say}", REPORTS))
    fault = ("--fault", "kill worker node=1 at=step:5")
    ended = launched("rehearse", "--nodes", "2", *fault, "--", train, str(tmp_path / "saved"), "100", "2")
    for node in (0, 1):
        first, again = begun(ended.stdout, node)
        assert first == 0
        assert 4 <= again < 100
    assert len(re.findall(r"^local-node-0-\d  Succeeded  1 ", ended.stderr, re.MULTILINE)) == 2


def test_waits_restarts_and_their_causes_are_shown_and_what_each_fault_cost(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN.replace("{say}", PRINTS))
    faults = ("--fault", "kill worker node=1 at=step:5", "--fault", "kill pod node=1 back=3s at=step:20")
    words = ("--report", str(tmp_path / "out.json"), "--", train, str(tmp_path / "saved"), "60", "2")
    ended = launched("rehearse", "--nodes", "2", *faults, *words)
    told = ended.stderr
    assert "[trainer-launch 0] generation 1 is over: rank 1 failed on node 1" in told
    assert "[trainer-launch 0] generation 2: 2 nodes, 1 restart so far" in told
    assert (
        "[trainer-launch] local-node-0-1 ended with exit code 137 (killed by SIGKILL); a new pod follows in 3 s"
        in told
    )
    assert "1 of 2 nodes, waiting up to 600 s for node 1" in told
    assert "generation 1: 2 nodes" not in told, "what goes its ordinary way is not shown"
    price = r" \(kill {}, node-0-1, at [\d.]+ s\) cost [\d.]+ s without a new step, \d+ repeated steps?; reached"
    assert re.search("^Fault 1" + price.format("worker node=1 at=step:5"), told, re.MULTILINE), told
    assert re.search("^Fault 2" + price.format("pod node=1 back=3s at=step:20"), told, re.MULTILINE), told
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(pod["attempts"], pod["created"]) for pod in report["pods"]] == [(3, 1), (3, 2)]
    assert report["steps"][0]["points"][0][1] == 1
    assert (len(report["steps"]), report["steps"][-1]["points"][-1][1]) == (3, 60)
    for fault in report["faults"]:
        assert fault["downtime_s"] > 0.1


def test_the_script_of_the_page_on_surviving_survives(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "surviving.md").read_text(encoding="utf-8")
    train = script(tmp_path, page.partition("```python\n")[2].partition("```")[0])
    fault = ("--fault", "kill worker at=step:20")
    ended = launched("rehearse", "--nodes", "2", *fault, "--", train, cwd=tmp_path)
    steps = [int(found) for found in re.findall(r"^\[0:0\] step (\d+)$", ended.stdout, re.MULTILINE)]
    assert steps.count(1) == 1
    assert steps[-1] == 60


WITH_SECRET = """
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {job-secret: hunter2-hunter2}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: job}
spec:
  nprocPerNode: "1"
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          containers:
          - {name: pytorch, args: WORDS, volumeMounts: [{name: v, mountPath: /etc/trainer-launch, readOnly: true}]}
          volumes: [{name: v, secret: {secretName: s}}]
"""


def test_a_mounted_job_secret_admits_the_jobs_own_pods_also_after_a_fault(tmp_path: Path) -> None:
    words = [script(tmp_path, TRAIN.replace("{say}", PRINTS)), str(tmp_path / "saved"), "40", "2"]
    (tmp_path / "job.yaml").write_text(WITH_SECRET.replace("WORDS", json.dumps(words)))
    fault = ("--fault", "kill pod node=1 at=step:5")
    ended = launched("rehearse", "-f", str(tmp_path / "job.yaml"), *fault, "--log-level", "info")
    assert len(re.findall(r"begun at [1-9]\d* with 2", ended.stdout)) == 2, ended.stdout
    assert "hunter" not in ended.stdout + ended.stderr
