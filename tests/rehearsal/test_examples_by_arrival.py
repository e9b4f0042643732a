"""The two examples of docs/running.md in which the same torchrun command stands on every node, tried."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, launch
from tests.kubernetes.pages import FOLDER, blocks
from tests.ports import free_port

TRAINS = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)}", flush=True)
dist.destroy_process_group()
"""
# Starts the step's task on two nodes, which are this machine, with what Slurm tells each.
SRUN = """#!/bin/bash
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=127.0.0.1,node-b
[ "$1" = --ntasks-per-node=1 ] && shift
SLURM_NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0 "$@" & other=$!
SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $other
"""
SCONTROL = "#!/bin/sh\necho 127.0.0.1\necho node-b\n"


def example(language: str, word: str) -> str:
    return next(block for block in blocks(FOLDER / "running.md", language) if word in block)


def ranks(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d", output))


@pytest.mark.process
@pytest.mark.torch
def test_a_job_of_kubernetes_with_a_headless_service_trains_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "job.yaml").write_text(example("yaml", "kind: Job"))
    done = launch("rehearse", "-f", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == ["rank 0 of 2", "rank 1 of 2"], done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.torch
def test_srun_with_torchrun_trains_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    env = clean_env()
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    env["PATH"] = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    text = example("bash", "srun").replace(":29400", f":{free_port()}")
    done = subprocess.run(["bash", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == ["rank 0 of 2", "rank 1 of 2"], done.stdout + done.stderr
