"""What Kubeflow's SDK puts into a pod, made by the SDK itself, runs under the launcher by its shims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.frameworks import frameworks
from tests.ports import free_port

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + 120)]

# The SDK takes the function's source; `CustomTrainer(func=…)` ends up in this call.
FUNCTION = """
def train(steps):
    import os, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, pid = dist.get_rank(), os.getpid()
    print(f"rank {rank} of {int(total)}, restart {restarts}, {steps} steps, pid {pid}.", flush=True)
    if restarts == "0":
        time.sleep(120)
"""
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from user_code import train
from kubeflow.trainer.backends.kubernetes import utils
from kubeflow.trainer.constants import constants
from kubeflow.trainer.types import types

trainer = types.RuntimeTrainer(trainer_type=types.TrainerType.CUSTOM_TRAINER, framework="torch", image="any")
trainer.set_command(constants.TORCH_COMMAND)
runtime = types.Runtime(name="torch-distributed", trainer=trainer, kind=list(types.RuntimeKind)[0])
command = utils.get_command_using_train_func(runtime, train, {"steps": 5}, [], None)
print(json.dumps(command))
"""


def test_a_function_that_the_sdk_submits_recovers_in_place_from_a_killed_worker(tmp_path: Path) -> None:
    sdk = frameworks.python("kubeflow")
    (tmp_path / "user_code.py").write_text(FUNCTION)
    made = subprocess.run([sdk, "-c", ASK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    command = json.loads(made.stdout)
    assert command[0] == "bash", "the image's ENTRYPOINT does not run"
    shims = tmp_path / "shims"
    assert launch("install-shims", str(shims)).returncode == 0
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    port = str(free_port())
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pods = []
    for rank in range(2):
        home = tmp_path / f"pod-{rank}"  # the SDK's command writes the function into the working directory
        home.mkdir()
        env = frameworks.env({**both, "PET_NODE_RANK": str(rank), "JOB_COMPLETION_INDEX": str(rank), "PATH": path})
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pods.append(subprocess.Popen(command, env=env, cwd=home, text=True, **ends))  # type: ignore[call-overload]
    try:
        line = next(line for line in pods[1].stdout if "rank 1 of 2, restart 0, 5 steps" in line)
        os.kill(int(line.rpartition("pid ")[2].rstrip(".\n")), signal.SIGKILL)
        said = [pod.communicate(timeout=100)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert all(f"rank {rank} of 2, restart 1, 5 steps" in said[rank] for rank in range(2))
