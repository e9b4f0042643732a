"""The documents of docker/examples, each with a fault that its framework survives: from its last checkpoint on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.launching import Started, clean_env, start
from tests.conftest import require
from tests.examples.test_manifests import ENV, EXAMPLES, pod_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/examples/test_train_charlm.py"),
]
HERE = {**ENV, "PYTHONPATH": str(EXAMPLES.parents[1])}


def lose(rehearsal: Started, pod: str) -> str:
    """The pod's first process is killed; the rehearsal's output when it has succeeded all the same."""
    pod_of(rehearsal, pod).send_signal(signal.SIGKILL)
    output = rehearsal.ends_with(0, timeout_s=280)
    assert re.search(rf"^{pod} +(Succeeded|Completed) +1 +1 ", output, re.MULTILINE), output
    return output


def resumed_at(output: str) -> int:
    """The step from which the only process that said so went on."""
    (step,) = re.findall(r"resumed at step (\d+)", output)
    return int(step)


def lose_an_mpi_node(manifest: str) -> None:
    pytest.importorskip("mpi4py")
    require(shutil.which("sshd", path="/usr/sbin:/usr/bin"), "sshd is not installed")
    with start("rehearse", "-f", manifest, env=HERE, cwd=EXAMPLES) as rehearsal:
        rehearsal.read_until(r"step 20/")
        output = lose(rehearsal, "bigrams-node-0-0")
    assert 20 <= resumed_at(output) < 60
    assert re.search(r"^bigrams-launcher-0-0 +Succeeded +1 +0 ", output, re.MULTILINE), "the launcher stays"


def test_mpi_with_the_launcher_as_node_loses_a_node_starts_again_and_resumes() -> None:
    require(shutil.which("mpirun.openmpi") or shutil.which("orterun"), "Open MPI is not installed")
    lose_an_mpi_node("trainjob-mpi.yaml")


def test_a_trainjob_of_a_published_runtime_loses_a_node_starts_again_and_resumes(tmp_path: Path) -> None:
    require(shutil.which("mpirun.openmpi") or shutil.which("orterun"), "Open MPI is not installed")
    words = f"[mpirun, python3, train_mpi.py, --checkpoint, {tmp_path}/model.npz]"
    trainer = f"{{numNodes: 2, numProcPerNode: 2, command: [trainer-launch, run, --], args: {words}}}"
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {name: bigrams}\n"
        f"spec: {{runtimeRef: {{name: deepspeed-distributed}}, trainer: {trainer}}}\n",
        encoding="utf-8",
    )
    lose_an_mpi_node(str(manifest))


def test_the_checked_torch_job_loses_a_pod_and_resumes() -> None:
    with start("rehearse", "-f", "trainjob-preflight.yaml", env=HERE, cwd=EXAMPLES) as rehearsal:
        rehearsal.read_until(r"step 10/100")
        output = lose(rehearsal, "checked-node-0-1")
    assert 10 <= resumed_at(output) < 100
    assert output.count("(exit code 0)") == 2, "init containers run once in the life of a pod"


def test_one_of_ten_plain_nodes_is_lost_and_goes_on_where_it_was(tmp_path: Path) -> None:
    text = (EXAMPLES / "trainjob-plainml.yaml").read_text(encoding="utf-8")
    manifest = tmp_path / "job.yaml"  # each node reads more than its share: it is not done before it is lost
    manifest.write_text(text.replace('--nodes, "10"', '--nodes, "1", --modules, "80"'), encoding="utf-8")
    with start("rehearse", "-f", str(manifest), env=HERE, cwd=EXAMPLES) as rehearsal:
        rehearsal.read_until(r"^\[ngrams-node-0-7\] step 5/7")
        output = lose(rehearsal, "ngrams-node-0-7")
    assert re.search(r"^\[ngrams-node-0-7\] resumed at module \d*[05] of 7", output, re.MULTILINE)
    assert len(re.findall(r"resumed at", output)) == 1
    assert len(re.findall(r"done: node \d", output)) == 10


def test_flytes_elastic_on_several_nodes_loses_one_and_resumes() -> None:
    with start("rehearse", "-f", "flyte-elastic.yaml", env=HERE, cwd=EXAMPLES) as rehearsal:
        rehearsal.read_until(r"step 10/100")
        pod_of(rehearsal, "flyte-elastic-worker-1").send_signal(signal.SIGKILL)
        output = rehearsal.ends_with(0, timeout_s=280)
    assert 10 <= resumed_at(output) < 100
    assert re.search(r"several nodes: loss [\d.]+", output)


@contextmanager
def program(name: str, checkpoints: Path) -> Iterator[subprocess.Popen[str]]:
    env = clean_env({**HERE, "CHECKPOINTS": str(checkpoints)})
    started = subprocess.Popen(
        [sys.executable, name], cwd=EXAMPLES, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watch = threading.Timer(240, started.kill)
    watch.start()
    try:
        yield started
    finally:
        watch.cancel()
        started.kill()
        started.communicate()


def test_a_function_as_a_job_loses_a_worker_and_resumes(tmp_path: Path) -> None:
    with program("launch_function.py", tmp_path) as job:
        assert job.stdout is not None
        lines: list[str] = []
        worker = None
        for line in job.stdout:
            lines.append(line)
            found = re.search(r"rank 1 of 2, pid (\d+)", line)
            worker = worker or (int(found[1]) if found else None)
            if "step 10/100" in line and not any("resumed" in one for one in lines):
                assert worker is not None
                os.kill(worker, signal.SIGKILL)
        assert job.wait() == 0, "".join(lines)
    output = "".join(lines)
    assert 10 <= resumed_at(output) < 100
    assert "step 100/100" in output


@pytest.mark.parametrize(
    ("workers", "typed"),
    [
        ("1", "train_fsdp2.py --steps 80 --checkpoints"),
        (
            "2",
            "train_megatron.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 80 "
            "--save",
        ),
    ],
    ids=["fsdp2", "megatron"],
)
def test_a_sharded_model_goes_on_after_a_killed_worker_and_a_lost_pod(
    workers: str, typed: str, tmp_path: Path
) -> None:
    faults = ("--fault", "kill worker node=1 at=step:30", "--fault", "kill pod node=1 at=step:60")
    words = (
        "rehearse",
        "--nodes",
        "2",
        "--nproc-per-node",
        workers,
        *faults,
        "--",
        *typed.split(),
        str(tmp_path / "c"),
    )
    with start(*words, env=HERE, cwd=EXAMPLES) as rehearsal:
        output = rehearsal.ends_with(0, timeout_s=280)
    first, second = map(int, re.findall(r"resumed at step (\d+)", output))
    assert 20 <= first < second < 80
    losses = [float(loss) for loss in re.findall(r"loss:? ([\d.E+-]+)", output)]
    assert losses[0] > 3 > losses[-1], "a model that knows nothing has 5.55"
    pods = re.findall(r"^local-node-0-(\d) +Succeeded +(\d) +0 ", output, re.MULTILINE)
    assert pods == [("0", "1"), ("1", "2")], "only the lost pod was created anew"
