"""The manifests of docker/examples for MPI by another way than a TrainJob, run as they stand, and with a fault."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, start
from tests.conftest import require
from tests.examples.test_manifests import ENV, EXAMPLES, pod_of, run
from tests.frameworks import building

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/mpi/test_hosts.py"),
]


@pytest.fixture
def horovod(tmp_path: Path) -> dict[str, str]:
    """Variables by which Horovod is found."""
    path = building.command(tmp_path / "bin").parent
    site = os.pathsep.join([building.site(), str(EXAMPLES.parents[1])])
    return {**ENV, "PYTHONPATH": site, "PATH": f"{path}:{os.environ['PATH']}"}


@pytest.mark.timeout(building.BUILD_S)
def test_the_elastic_mpijob_trains_on_all_its_workers_loses_one_and_the_others_go_on(
    horovod: dict[str, str], tmp_path: Path
) -> None:
    """A failed pod is not made again by mpi-operator, whose list of hosts then no longer has it."""
    require(shutil.which("sshd", path="/usr/sbin:/usr/bin"), "sshd is not installed")
    folder = tmp_path / "copy"  # Horovod takes no working folder with a blank in its name
    folder.mkdir()
    for name in ("mpijob-horovod-elastic.yaml", "train_horovod.py"):
        shutil.copy(EXAMPLES / name, folder)
    with start("rehearse", "-f", "mpijob-horovod-elastic.yaml", env=horovod, cwd=folder) as rehearsal:
        rehearsal.read_until(r"step 50/200 .* workers 3")
        os.kill(pod_of(rehearsal, "horovod-elastic-worker-1").pid, signal.SIGKILL)
        output = rehearsal.ends_with(0, timeout_s=400)
    assert "priorityClassName" in rehearsal.lines[0]
    assert "3 PriorityClass objects" in rehearsal.lines[0]
    begun = re.findall(r"rank (\d) of (\d) on horovod-elastic-worker-(\d) begins at step (\d+)", output)
    assert sorted((size, host) for _, size, host, step in begun if step == "0") == [("3", n) for n in "012"]
    later = [(size, host) for _, size, host, step in begun if step != "0"]
    assert sorted(later) == [("2", "0"), ("2", "2")], "from the last commit on, without the lost one"
    assert len({step for *_, step in begun}) == 2, "the same step for both"
    losses = [float(loss) for loss in re.findall(r"step \d+/200  loss ([\d.]+)", output)]
    assert losses[0] > losses[-1]
    assert re.search(r"^horovod-elastic-launcher +Succeeded +1 +0 ", output, re.MULTILINE), "and no new start"
    assert re.search(r"^horovod-elastic-worker-1 +Failed +1 +0 +137", output, re.MULTILINE)


@pytest.mark.timeout(building.BUILD_S)
def test_the_horovod_script_resumes_from_its_checkpoint(horovod: dict[str, str], tmp_path: Path) -> None:
    def ended(steps: str) -> str:
        argv = (building.python(), "train_horovod.py", "--checkpoint", str(tmp_path / "m.pt"), "--steps", steps)
        env = clean_env(horovod)
        return subprocess.run(argv, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=True).stdout

    assert "begins at step 0\n" in ended("20")
    resumed = ended("30")
    assert "begins at step 20\n" in resumed
    (tmp_path / "m.pt").unlink()
    assert ended("30").splitlines()[-2] == resumed.splitlines()[-2], "as if it had never been interrupted"


MPICH = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: bigrams-mpich}
spec:
  slotsPerWorker: 2
  mpiImplementation: MPICH
  sshAuthMountPath: /home/mpiuser/.ssh
  runPolicy: {cleanPodPolicy: Running}
  mpiReplicaSpecs:
    Launcher:
      template: {spec: {containers: [{name: mpi, image: i, command: [mpirun.mpich, -n, '4', sh, -c, '%s']}]}}
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: mpi, image: i, command: [/usr/sbin/sshd, -De]}]}}
"""


def test_mpich_reaches_the_workers_of_mpi_operator(tmp_path: Path) -> None:
    """Its host file has `host:slots`, and its launcher's variables are Hydra's."""
    require(shutil.which("mpirun.mpich"), "MPICH is not installed")
    require(shutil.which("sshd", path="/usr/sbin:/usr/bin"), "sshd is not installed")
    path = tmp_path / "job.yaml"
    path.write_text(MPICH % "echo rank $PMI_RANK of $PMI_SIZE on $HOSTNAME")
    code, output, errors = run(str(path))
    assert code == 0, errors
    assert sorted(re.findall(r"rank (\d) of 4 on bigrams-mpich-worker-(\d)", output)) == [
        (str(rank), str(rank // 2)) for rank in range(4)
    ]
