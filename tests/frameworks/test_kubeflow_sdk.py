"""What Kubeflow's SDKs submit recovers in place from a killed worker, by shims: in rehearsal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.frameworks import frameworks
from tests.frameworks.kubeflow_api import submitted

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + 240)]

EXAMPLE = frameworks.EXAMPLES / "create_job.py"
# The SDK of the v1 Training Operator gives the function of the example one argument: a dict.
V1 = """
import sys
from kubeflow.training import TrainingClient

{function}
TrainingClient().create_job(
    name="line",
    train_func=train,
    parameters={{"steps": 60, "checkpoint": sys.argv[1]}},
    num_workers=2,
    num_procs_per_worker=1,
)
"""


def rehearsed(folder: Path, job: object, *fault: str) -> str:
    """What `local -f` prints of it, with shims first in PATH, as in an image of `--target shims`."""
    (folder / "job.yaml").write_text(json.dumps(job))
    shims = folder / "shims"
    assert launch("install-shims", str(shims)).returncode == 0
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    # The SDK's command writes the function into the working directory.
    words = (sys.executable, "-m", "trainer_launch", "local", "-f", "job.yaml", "--fault", *fault)
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


def test_a_function_that_the_sdk_of_v1_submits(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    function = text[text.index("def train(") : text.index("def create_job(")]
    head = "def train(given):\n    steps, checkpoint = given['steps'], given['checkpoint']"
    function = re.sub(r"def train\(.*", head, function, count=1)
    (tmp_path / "submit.py").write_text(V1.format(function=function))
    job = submitted([tmp_path / "submit.py", tmp_path / "line.pt"], tmp_path)
    assert job["kind"] == "PyTorchJob"
    check(rehearsed(tmp_path, job, "kill worker node=1 at=step:20"), ("line-master-0", "line-worker-0"))
