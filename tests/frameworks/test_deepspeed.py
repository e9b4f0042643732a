"""DeepSpeed on CPUs: its script under our torch engine, by the `deepspeed` command, and over mpirun."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import require
from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, changed, got_over, lives, losses, succeeded
from trainer_launch.rehearsal import pod_isolation

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("deepspeed-master-0", "deepspeed-worker-0")
TYPED = "deepspeed, --num_gpus, '1', --no_local_rank, train_deepspeed.py"
OVER_MPIRUN = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: deepspeed}}
spec:
  runtimeRef: {{name: deepspeed-distributed}}
  trainer:
    numNodes: 2
    numProcPerNode: 1
    command: [trainer-launch, run, --]
    args: [mpirun, python, train_deepspeed.py, --steps, "200", --checkpoints, "{folder}"]
"""


def test_a_script_of_deepspeed_gets_over_the_loss_of_a_pod_while_the_other_stays() -> None:
    output = got_over("deepspeed", "pytorchjob-deepspeed.yaml", PODS[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)]
    told = losses(output)
    assert told[0] > 2.5 > 2.2 > told[-1], "a model that knows nothing has 5.55"


def test_the_deepspeed_command_gets_over_the_loss_of_a_pod_and_gives_its_own_variables(tmp_path: Path) -> None:
    manifest = changed(
        "pytorchjob-deepspeed.yaml",
        tmp_path,
        lambda text: text.replace("[train_deepspeed.py", f"[{TYPED}", 1),
    )
    output = got_over("deepspeed", manifest, PODS[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)], output


def test_over_mpirun_a_script_of_deepspeed_goes_on_from_its_checkpoint_after_a_killed_rank(tmp_path: Path) -> None:
    """`deepspeed.init_distributed` asks MPI for ranks, and counts the local ones by host name."""
    pytest.importorskip("mpi4py")
    require(shutil.which("orterun") and shutil.which("sshd", path="/usr/sbin:/usr/bin"), "needs Open MPI and sshd")
    why = pod_isolation.capability().why_not
    require(not why, why)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(OVER_MPIRUN.format(folder=tmp_path / "checkpoints"))
    faults = ("delay dns 1s", "kill worker node=0 at=step:75")  # the first gives host names
    output = succeeded("deepspeed", manifest, *faults)
    again = r"rank \d ended with signal SIGKILL \(on deepspeed-node-0-0\S*\); restart 1 of 3"
    assert re.search(again, output), output
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert lives(output, "deepspeed-launcher-0-0") == (1, 0), "no pod was made again"
    assert "step 200/200" in output
