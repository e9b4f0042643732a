"""Manifests for production run on a laptop as they stand, with a small script where one trains."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched, start
from tests.conftest import require
from tests.kubernetes import published
from tests.schemas.validator import violations

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

# Says who it is by the variables that its framework would read, and leaves something in the folder of checkpoints.
SCRIPT = """
import json, os, pathlib, sys
env = os.environ
tf = json.loads(env.get("TF_CONFIG", "{}")).get("task", {}).get("index")
ranks = (tf, env.get("RANK"), env.get("OMPI_COMM_WORLD_RANK"), env.get("JOB_COMPLETION_INDEX"))
rank = next(str(one) for one in ranks if one is not None)
path = next(pathlib.Path(word) for word in sys.argv if word.endswith((".pt", ".npz", ".json")))
(path.parent / f"rank-{rank}").write_text("saved")
sys.stdout.write(f"rank {rank} saved beside {path.name}\\n")
"""
INIT = ("preflight", "init-pytorch")  # to which the v1 operator says nothing of the job
SCRIPTS = ("train_charlm.py", "train_tf.py", "train_mpi.py", "train_ngrams.py")
# An MPIJob of the v1 operator is not rehearsed.
PATHS = [path for path in published.JOBS if (path.parent.name, path.stem) != ("training-operator", "mpijob")]
JOBS = pytest.mark.parametrize("path", PATHS, ids=published.name)
# What each job runs, by the name of its manifest.
RANKS = {
    "trainjob-torch": 3, "trainjob-preflight": 2, "trainjob-mpi": 8, "trainjob-plain": 4,
    "pytorchjob": 3, "pytorchjob-elastic": 3, "tfjob": 2, "mpijob": 4,
}  # fmt: skip

# An elastic job may be done before a slow pod comes; a TFJob is when its first worker is, and the others are ended.
LEAST = {"pytorchjob-elastic": 2, "tfjob": 1}


# One of each engine is quick enough; imports of torch take their time.
QUICK = ("trainjob-plain", "trainjob-mpi", "trainjob-torch")


def _is_torchs(path: Path) -> bool:
    return "pytorchjob" in path.name or path.stem in ("trainjob-torch", "trainjob-preflight")


def _marked(path: Path) -> object:
    marks = [] if path.stem in QUICK else [pytest.mark.long("tests/kubernetes/test_rehearsals.py")]
    if _is_torchs(path):
        marks.append(pytest.mark.torch)
    return pytest.param(path, id=published.name(path), marks=marks)


def needed(path: Path) -> list[str]:
    """The options that name a job's manifest, and its runtime's."""
    (job,) = published.documents(path)
    if job["kind"] != "TrainJob":
        return ["-f", str(path)]
    runtime = published.KUBERNETES / "runtimes" / f"{job['spec']['runtimeRef']['name']}.yaml"
    return ["-f", str(path), "-f", str(runtime)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in SCRIPTS:
        (tmp_path / name).write_text(SCRIPT)
    return tmp_path


@JOBS
def test_it_becomes_pods_that_the_launcher_understands(path: Path, folder: Path) -> None:
    launched("rehearse", *needed(path), "--render", str(folder / "pods"))
    alike = {re.sub(r"\d+", "N", path.name): path for path in (folder / "pods").iterdir()}
    assert alike
    for snapshot in alike.values():
        assert violations("pod", json.loads(snapshot.read_text())) == []
        told = launch("explain", "--json", "--pod", str(snapshot), "--", "train.py")
        assert told.returncode == 0, f"{snapshot.name}: {told.stderr}"
        without = any(one in snapshot.name for one in INIT) and path.parent.name == "training-operator"
        assert (json.loads(told.stdout)["contract"] == "unknown") == without, snapshot.name


@pytest.mark.parametrize("path", [_marked(path) for path in PATHS])
def test_it_runs_to_its_end(path: Path, folder: Path) -> None:
    if "mpi" in path.name:
        require(shutil.which("mpirun.openmpi") or shutil.which("orterun"), "Open MPI is not installed")
        require(shutil.which("sshd", path="/usr/sbin:/usr/bin"), "sshd is not installed")
    env = {"PYTHONPATH": str(published.DOCKER.parent), "CUDA_VISIBLE_DEVICES": ""}
    with start("rehearse", *needed(path), env=env, cwd=folder) as rehearsal:
        output = rehearsal.ends_with(0, timeout_s=280)
    found = sorted({int(rank) for rank in re.findall(r"rank (\d+) saved beside", output)})
    assert found in [
        list(range(number)) for number in range(LEAST.get(path.stem, RANKS[path.stem]), RANKS[path.stem] + 1)
    ]
    assert re.search(r": Succeeded after [\d.]+ s", output)
