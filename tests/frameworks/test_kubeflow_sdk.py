"""What Kubeflow's SDKs submit recovers in place from a killed worker, by shims: in rehearsal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch
from tests.conftest import require
from tests.frameworks import frameworks
from tests.frameworks.kubeflow_api import EXAMPLE, submitted

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + 240)]

RUNTIME = frameworks.EXAMPLES.parent / "kubernetes" / "runtimes" / "torch-distributed-launch.yaml"
# An image that has the whole training process: the SDK writes no command, so the image's ENTRYPOINT and CMD run.
CONTAINER = """
from kubeflow.trainer import CustomTrainerContainer, TrainerClient
from kubeflow.trainer.options import Name

TrainerClient().train(trainer=CustomTrainerContainer(image="line", num_nodes=2), options=[Name("line")])
"""
# A function over MPI: the command that the SDK writes begins with mpirun, and each rank writes the function's file.
OVER_MPI = """
import sys
from kubeflow.trainer import CustomTrainer, TrainerClient
from kubeflow.trainer.options import Name

def train(steps: int, checkpoint: str) -> None:
    import os, time
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    begin = int(open(checkpoint).read()) if world.rank == 0 and os.path.exists(checkpoint) else 0
    begin = world.bcast(begin)
    if world.rank == 0 and begin:
        print(f"resumed at step {begin}", flush=True)
    for step in range(begin + 1, steps + 1):
        assert world.allreduce(1) == 2
        if world.rank == 0:
            with open(checkpoint + ".new", "w") as file:
                file.write(str(step))
            os.replace(checkpoint + ".new", checkpoint)
            print(f"step {step}/{steps}", flush=True)
        time.sleep(0.05)
        world.Barrier()

TrainerClient().train(
    runtime=sys.argv[1],
    trainer=CustomTrainer(func=train, func_args={"steps": 60, "checkpoint": sys.argv[2]}, num_nodes=2),
    options=[Name("line")],
)
"""


def rehearsed(folder: Path, job: object, *fault: str, more: tuple[str, ...] = ()) -> str:
    """What `rehearse -f` prints of it, with shims first in PATH, as in an image of `--target shims`."""
    (folder / "job.yaml").write_text(json.dumps(job))
    shims = folder / "shims"
    assert launch("install-shims", str(shims)).returncode == 0
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    # The SDK's command writes the function into the working directory.
    words = (sys.executable, "-m", "trainer_launch", "rehearse", "-f", "job.yaml", *more, "--fault", *fault)
    env = frameworks.env({"PATH": path, "TMPDIR": str(folder)})
    ended = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def check(output: str, pods: tuple[str, str]) -> None:
    assert "generation 2: 2 nodes, 1 restart so far" in output
    assert "step 60/60" in output
    rows = [line.split() for line in output.splitlines() if line.startswith(pods)]
    # POD STATUS CREATED RESTARTS EXIT: workers were restarted, no container was.
    assert [row[:5] for row in rows] == [[pod, "Succeeded", "1", "0", "0"] for pod in pods]


def test_the_example_of_the_sdk(tmp_path: Path) -> None:
    job = submitted([EXAMPLE, "--steps", "60", "--checkpoint", tmp_path / "line.pt"], tmp_path)
    assert job["kind"] == "TrainJob"
    assert job["spec"]["trainer"]["command"][0] == "bash", "the image's ENTRYPOINT does not run"
    check(rehearsed(tmp_path, job, "kill worker node=1 at=step:20"), ("line-node-0-0", "line-node-0-1"))


@pytest.mark.parametrize("runtime", ["deepspeed-distributed", "mlx-distributed"])
def test_a_function_over_mpi_that_the_sdk_submits(runtime: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    require(shutil.which("orterun") and shutil.which("sshd", path="/usr/sbin:/usr/bin"), "needs Open MPI and sshd")
    (tmp_path / "submit.py").write_text(OVER_MPI)
    job = submitted([tmp_path / "submit.py", runtime, tmp_path / "line.txt"], tmp_path)
    assert job["spec"]["trainer"]["command"][0] == "mpirun", "the image's ENTRYPOINT does not run"
    output = rehearsed(tmp_path, job, "kill worker node=0 at=step:20")
    assert re.search(r"rank \d ended with signal SIGKILL \(on \S+\); restart 1 of 3", output), output
    (step,) = re.findall(r"resumed at step (\d+)", output)
    assert int(step) >= 20
    assert "step 60/60" in output
    assert re.search(r"^line-launcher-0-0 +Succeeded +1 +0 ", output, re.MULTILINE), output


def of_container(folder: Path) -> dict[str, Any]:
    """The TrainJob that `CustomTrainerContainer` submits, with our runtime in place of the stock one."""
    (folder / "submit.py").write_text(CONTAINER)
    job = submitted([folder / "submit.py"], folder)
    assert "command" not in job["spec"]["trainer"]
    job["spec"]["runtimeRef"] = {"name": "torch-distributed-launch"}
    return job


def test_an_image_that_has_the_whole_training_runs_its_own_command(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    function = text[text.index("def train(") : text.index("def create_job(")]
    (tmp_path / "line.py").write_text(f"{function}\ntrain(60, {str(tmp_path / 'line.pt')!r})\n")
    command = f"trainer-launch run -- {tmp_path / 'line.py'}"  # the image's ENTRYPOINT and CMD
    more = ("-f", str(RUNTIME), "--command", command)
    told = rehearsed(tmp_path, of_container(tmp_path), "kill worker node=1 at=step:20", more=more)
    check(told, ("line-node-0-0", "line-node-0-1"))
