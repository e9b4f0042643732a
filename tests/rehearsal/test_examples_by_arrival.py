"""The same torchrun command on every node: the two examples of docs/running.md, and a clustered task of Flyte 2."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, launched
from tests.kubernetes.pages import FOLDER, blocks
from tests.ports import free_port

TRAINS = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)} in {os.environ['TORCHELASTIC_RUN_ID']}", flush=True)
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
# As Flyte's backend makes it of a clustered task.
JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: f3c9, namespace: project-development}}
spec:
  replicatedJobs:
  - name: workers
    template:
      spec:
        completionMode: Indexed
        completions: 2
        parallelism: 2
        template:
          spec:
            restartPolicy: Never
            containers:
            - name: primary
              image: i
              args: {args}
              env:
              - {{name: NNODES, value: "2"}}
              - {{name: NPROC_PER_NODE, value: "1"}}
              - {{name: MASTER_PORT, value: "29500"}}
              - {{name: RDZV_BACKEND, value: static}}
              - {{name: JOBSET_MAX_RESTARTS, value: "0"}}
              - name: JOBSET_NAME
                valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}}}
              - name: JOBSET_RESTART_ATTEMPT
                valueFrom: {{fieldRef: {{fieldPath: "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}}}
              - name: POD_NAMESPACE
                valueFrom: {{fieldRef: {{fieldPath: metadata.namespace}}}}
"""
# What Flyte's own entry point becomes, but that it waits for node 0's name first.
CLUSTERED = """#!/bin/sh
node_0=$JOBSET_NAME-workers-0-0.$JOBSET_NAME.$POD_NAMESPACE.svc.cluster.local
exec torchrun --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --node-rank="$JOB_COMPLETION_INDEX" \\
  --rdzv-backend="$RDZV_BACKEND" --rdzv-id="$JOBSET_NAME-$JOBSET_RESTART_ATTEMPT" \\
  --rdzv-endpoint="$node_0:$MASTER_PORT" --no-python -- python "$@"
"""


def example(language: str, word: str) -> str:
    return next(block for block in blocks(FOLDER / "running.md", language) if word in block)


def ranks(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d", output))


@pytest.mark.process
@pytest.mark.torch
def test_a_job_of_kubernetes_with_a_headless_service_trains_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "job.yaml").write_text(example("yaml", "kind: Job"))
    done = launched("rehearse", "-f", "job.yaml", cwd=tmp_path)
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


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("args", ["[train.py]", "[./clustered, train.py]"], ids=["a script", "Flyte's entry point"])
def test_both_nodes_of_a_clustered_task_train_together(args: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "clustered").write_text(CLUSTERED)
    (tmp_path / "clustered").chmod(0o755)
    (tmp_path / "job.yaml").write_text(JOBSET.format(args=args))
    done = launched("rehearse", "-f", "job.yaml", cwd=tmp_path)
    ranks = sorted(re.findall(r"rank \d of \d in \S+", done.stdout))
    assert ranks == ["rank 0 of 2 in f3c9-0", "rank 1 of 2 in f3c9-0"], done.stdout + done.stderr
