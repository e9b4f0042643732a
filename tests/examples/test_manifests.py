"""The manifests of docker/examples run as they stand and train; those of torch survive a lost pod."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import LAUNCHER, Started, clean_env, start

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/examples/test_train_charlm.py"),
]

EXAMPLES = Path(__file__).parents[2] / "docker" / "examples"
ENV = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def run(name: str, *words: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [*LAUNCHER, "rehearse", "-f", name, *words],
        cwd=EXAMPLES,
        env=clean_env({**ENV, "PYTHONPATH": str(EXAMPLES.parents[1])}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    """A rehearsal that runs."""
    env = {**ENV, "PYTHONPATH": str(EXAMPLES.parents[1])}
    with start("rehearse", "-f", request.param, env=env, cwd=EXAMPLES) as rehearsal:
        yield rehearsal


def pod_of(rehearsal: Started, name: str) -> psutil.Process:
    """The first process of a pod."""
    for child in psutil.Process(rehearsal.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another one that has just ended
            if child.environ().get("HOSTNAME") == name:
                return child
    raise AssertionError(f"{name} has no process")


@pytest.mark.parametrize(
    ("started", "pod", "kind"),
    [
        ("pytorch-simple.yaml", "pytorch-simple-worker-1", "PyTorchJob pytorch-simple"),
        ("pytorch-elastic.yaml", "elastic-example-worker-1", "PyTorchJob elastic-example"),
        ("trainjob-torch.yaml", "charlm-node-0-1", "TrainJob charlm"),
        ("jobset-torch.yaml", "charlm-set-workers-0-1", "JobSet charlm-set"),
    ],
    indirect=["started"],
)
def test_a_torch_job_trains_loses_a_pod_resumes_and_succeeds(started: Started, pod: str, kind: str) -> None:
    started.read_until(r"step 10/")
    pod_of(started, pod).send_signal(signal.SIGKILL)
    output = started.ends_with(0, timeout_s=280)
    assert "resumed at step" in output
    assert re.search(rf"^{pod} +(Succeeded|Completed) +1 +1 ", output, re.MULTILINE), "started again in its place"
    assert f"{kind}: Succeeded" in output
    losses = [float(loss) for loss in re.findall(r"step \d+/\d+  loss ([\d.]+)", output)]
    assert losses[0] > losses[-1], "it has learnt"


def test_the_ngram_model_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    def ended(*words: str) -> str:
        argv = [sys.executable, str(EXAMPLES / "train_ngrams.py"), "--model", str(tmp_path / "m.json"), *words]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ)
        ).stdout

    ended("--modules", "11")
    resumed = ended("--modules", "21")
    assert "resumed at module 10 of 20" in resumed
    (tmp_path / "m.json").unlink()
    assert ended("--modules", "21").splitlines()[-1] == resumed.splitlines()[-1]
