"""A clustered task of Flyte 2, as its backend makes a JobSet of it: its nodes train together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.launching import launch

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
TRAINS = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)} in {os.environ['TORCHELASTIC_RUN_ID']}", flush=True)
dist.destroy_process_group()
"""
# What Flyte's own entry point becomes, but that it waits for node 0's name first.
CLUSTERED = """#!/bin/sh
node_0=$JOBSET_NAME-workers-0-0.$JOBSET_NAME.$POD_NAMESPACE.svc.cluster.local
exec torchrun --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --node-rank="$JOB_COMPLETION_INDEX" \\
  --rdzv-backend="$RDZV_BACKEND" --rdzv-id="$JOBSET_NAME-$JOBSET_RESTART_ATTEMPT" \\
  --rdzv-endpoint="$node_0:$MASTER_PORT" --no-python -- python "$@"
"""


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("args", ["[train.py]", "[./clustered, train.py]"], ids=["a script", "Flyte's entry point"])
def test_both_nodes_of_a_clustered_task_train_together(args: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "clustered").write_text(CLUSTERED)
    (tmp_path / "clustered").chmod(0o755)
    (tmp_path / "job.yaml").write_text(JOBSET.format(args=args))
    done = launch("rehearse", "-f", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = sorted(re.findall(r"rank \d of \d in \S+", done.stdout))
    assert ranks == ["rank 0 of 2 in f3c9-0", "rank 1 of 2 in f3c9-0"], done.stdout + done.stderr
