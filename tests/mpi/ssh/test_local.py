"""`local --engine mpi`: a launcher and its workers on one machine, each with an address of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env, launched
from tests.conftest import require

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("openssh"),
    pytest.mark.timeout(300),
    pytest.mark.long("tests/mpi/test_hosts.py"),
]


def test_the_launchers_end_is_the_jobs_end(tmp_path) -> None:
    """Its workers run until nobody needs them; nothing of them is left."""
    private = {"TMPDIR": str(tmp_path)}
    ended = launched(
        "local", "--engine", "mpi", "--nodes", "2", "--", "sh", "-c", "echo $HOSTNAME; exit 7", env=private, code=7
    )
    assert ended.stdout == "local-launcher-0-0\n"
    rows = dict(re.findall(r"^(local-\S+) +\w+ +1 +0 +(\d+) ", ended.stderr, re.MULTILINE))
    assert rows == {"local-node-0-0": "143", "local-node-0-1": "143", "local-launcher-0-0": "7"}
    assert os.listdir(tmp_path) == ["trainer-launch-incidents"], "what was collected about the failure stays"


# One write each, so that no two lines mix.
HELLO = """
from mpi4py import MPI
import os
ranks = MPI.COMM_WORLD
text = f"{ranks.Get_rank()} {ranks.Get_size()} {ranks.allreduce(ranks.Get_rank() + 1)}\\n"
os.write(1, text.encode())
"""


def rehearse(*words: str, env: Mapping[str, str], wrap: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*wrap, *LAUNCHER, "local", *words),
        env=clean_env(env),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=150,
    )


def require_mpi4py() -> None:
    require(shutil.which("mpirun"), "needs openmpi-bin")
    require(importlib.util.find_spec("mpi4py"), "needs mpi4py")


def test_mpirun_as_typed_runs_its_ranks_on_all_pods(tmp_path) -> None:
    require_mpi4py()
    words = ("--nodes", "2", "--nproc-per-node", "2", "--", "mpirun", sys.executable, "-c", HELLO)
    ended = rehearse(*words, env={"TMPDIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", *(f"{rank} 4 10" for rank in range(4))]
    assert os.listdir(tmp_path) == []


OWN_HOME = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: own}
spec:
  mpiImplementation: %s
  sshAuthMountPath: /home/of-no-machine/.ssh
  runLauncherAsWorker: true
  runPolicy: {cleanPodPolicy: Running}
  mpiReplicaSpecs:
    Launcher:
      template: {spec: {containers: [{name: c, image: i, command: [%s, -n, "2", sh, -c, "%s"]}]}}
    Worker: {replicas: 1, template: {spec: {containers: [{name: c, image: i}]}}}
"""
# sh refuses to write to a file that is there (set -C): to the one of the other rank.
WRITES = "set -C; echo $HOSTNAME >/home/of-no-machine/file; cat /home/of-no-machine/file"


@pytest.mark.parametrize(("implementation", "mpirun"), [("OpenMPI", "mpirun"), ("MPICH", "mpiexec.mpich")])
def test_each_pod_has_a_home_of_its_own_under_mpirun(implementation: str, mpirun: str, tmp_path: Path) -> None:
    """As Kubeflow's SDK needs it, which lets each rank write its program there and run it."""
    require(shutil.which(mpirun), f"needs {mpirun}")
    (tmp_path / "job.yaml").write_text(OWN_HOME % (implementation, mpirun, WRITES))
    ended = rehearse("-f", str(tmp_path / "job.yaml"), env={"TMPDIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(line.partition("] ")[2] for line in ended.stdout.splitlines()) == ["own-launcher", "own-worker-0"]
    assert "restarting" not in ended.stderr, "the sshd beside the launcher, when the launcher had ended"


def test_a_program_without_mpirun_gets_one(tmp_path) -> None:
    require_mpi4py()
    (tmp_path / "hello.py").write_text(HELLO)
    ended = rehearse("--engine", "mpi", "--nodes", "2", "--", str(tmp_path / "hello.py"), env={})
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", "0 2 3", "1 2 3"]


def test_slots_are_numbers(tmp_path) -> None:
    ended = launched("local", "--engine", "mpi", "--nproc-per-node", "auto", "--", "true", code=2)
    assert "for --nproc-per-node: expected a number for an MPI job" in ended.stderr
