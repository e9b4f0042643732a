"""MPIJob v1, whose launcher reaches its workers by `kubectl exec` alone: no sshd, no names in DNS.

Workers are process namespaces; the script is the v1 operator's own, but for where kubectl is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started, clean_env, start
from tests.conftest import require
from tests.process.world import PID1, end_all, require_namespaces, survivors
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(300), pytest.mark.long("tests/mpi/test_hosts.py")]
KUBECTL = Path(__file__).with_name("kubectl.py")
# kubeflow/trainer release-1.9, pkg/controller.v1/mpi/mpijob_controller.go, with the job's mainContainer
KUBEXEC = '''#!/bin/sh
set -x
POD_NAME=$1
shift
/opt/kube/kubectl exec ${POD_NAME} --container mpi -- /bin/sh -c "$*"'''
RANK = 'echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname) with $OF_THE_CONTAINER"'


class Job:
    """A launcher's files, and its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, f"kubexec-{os.getpid()}-{folder.name}"
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "pods").mkdir()
        kubectl = f"'{sys.executable}' -S -E '{KUBECTL}' '{folder}/pods'"
        text = KUBEXEC.replace("/opt/kube/kubectl", kubectl)
        self.agent = folder / "kubexec.sh"
        self.agent.write_text(text)
        self.agent.chmod(0o555)
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("job-worker-0 slots=2\njob-worker-1 slots=2\n")

    def begin(self, name: str) -> None:
        """The pod's container runs."""
        env = clean_env({"TOKEN": self.token, "OF_THE_CONTAINER": f"{name}s-own", "HOSTNAME": name})
        inside = ("sh", "-c", f"hostname {name} && exec sleep 1000")
        pod = subprocess.Popen((*PID1[:1], "--uts", *PID1[1:], *inside), env=env, stdin=subprocess.DEVNULL)
        self.pods[name] = pod
        first = eventually(lambda: psutil.Process(pod.pid).children(), "process 1")[0]
        eventually(lambda: first.name() == "sleep", "the container runs")
        (self.folder / "pods" / name).write_text(str(first.pid))

    def pending(self, name: str) -> None:
        (self.folder / "pods" / name).touch()

    def kill(self, name: str) -> None:
        """The pod is gone: its process 1, and with it all others."""
        psutil.Process(int((self.folder / "pods" / name).read_text())).kill()
        self.pods.pop(name).wait()

    def run(self, *command: str, flags: tuple[str, ...] = ()) -> contextlib.AbstractContextManager[Started]:
        env = {
            "OMPI_MCA_plm_rsh_agent": str(self.agent),
            "OMPI_MCA_orte_default_hostfile": str(self.hostfile),
            "OMPI_MCA_oob_tcp_if_include": "lo",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "HOSTNAME": "job-launcher",
            "TOKEN": self.token,
        }
        own = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        return start("run", *flags, "--", "mpirun.openmpi", *own, *command, env=env)

    def strays(self) -> list[str]:
        """What still runs in the pods besides their process 1."""
        found = []
        for pid in survivors(self.token):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(psutil.Process(pid).cmdline())
                found += [words] if "sleep 1000" not in words and "hostname" not in words else []
        return found

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.wait()
        end_all(self.token)


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    require_namespaces()
    require(shutil.which("mpirun.openmpi"), "needs openmpi-bin")
    require(shutil.which("nsenter"), "needs util-linux")
    made = Job(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_ranks_start_in_their_own_containers(job) -> None:
    for name in ("job-worker-0", "job-worker-1"):
        job.begin(name)
    with job.run("sh", "-c", RANK) as launcher:
        told = launcher.ends_with(0)
    found = sorted(re.findall(r"rank (\d) of 4 on (\S+) with (\S+)", told))
    worker = [("job-worker-0", "job-worker-0s-own"), ("job-worker-1", "job-worker-1s-own")]
    assert found == [(str(rank), *worker[rank // 2]) for rank in range(4)], told
    assert "contract=mpijob-v1" in told


def test_a_worker_that_is_pending_is_waited_for(job) -> None:
    """The operator starts the launcher together with its workers."""
    job.begin("job-worker-0")
    job.pending("job-worker-1")
    with job.run("sh", "-c", RANK) as launcher:
        launcher.read_until("job-worker-1")
        job.begin("job-worker-1")
        told = launcher.ends_with(0)
    assert len(re.findall(r"rank \d of 4", told)) == 4, told


def test_a_request_to_stop_leaves_nothing_in_the_pods(job) -> None:
    """What `kubectl exec` has started outlives it: the ranks have to be asked by the same way."""
    for name in ("job-worker-0", "job-worker-1"):
        job.begin(name)
    with job.run("sh", "-c", "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done") as launcher:
        launcher.read_until("^ready", times=4)
        launcher.signal(signal.SIGTERM)
        told = launcher.ends_with(143)
    assert told.count("saved") == 4, told
    eventually(lambda: not job.strays(), "nothing is left in the pods")


def test_a_worker_that_is_lost_is_waited_for_and_all_start_again(job) -> None:
    for name in ("job-worker-0", "job-worker-1"):
        job.begin(name)
    rank = f"echo ready; while [ ! -e '{job.folder}/go' ]; do sleep 0.1; done; {RANK}"
    with job.run("sh", "-c", rank) as launcher:
        launcher.read_until("^ready", times=4)
        job.kill("job-worker-1")
        (job.folder / "pods" / "job-worker-1").unlink()
        launcher.read_until("job-worker-1")
        job.begin("job-worker-1")
        launcher.read_until("^ready", times=4)
        (job.folder / "go").touch()
        told = launcher.ends_with(0)
    assert len(re.findall(r"rank \d of 4", told)) == 4, told
    assert not job.strays()
