"""An MPIJob on a real cluster: the kubelet mounts its Secret as mpi-operator asks, and probes sshd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.images import MAKING_S
from tests.kubelet.cluster import Cluster
from tests.kubelet.jobs import Json, submit
from tests.kubernetes import published

pytestmark = [pytest.mark.kubelet, pytest.mark.process, pytest.mark.timeout(MAKING_S)]
WORKERS = ("bigrams-worker-0", "bigrams-worker-1")


def test_mpirun_starts_ranks_over_ssh_with_the_secret_that_mpi_operator_mounts(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    (document,) = published.documents(published.KUBERNETES / "examples" / "mpi-operator" / "mpijob.yaml")
    document["spec"]["slotsPerWorker"] = 1

    def change(host: str, spec: Json) -> None:
        if host not in WORKERS:
            spec["containers"][0]["args"] += ["--steps", "20"]

    job = submit(cluster, namespace, tmp_path, [document], change)
    ended = job.ended("bigrams-launcher")
    assert ended["exitCode"] == 0, job.told()
    assert ended["message"].startswith("reason=Succeeded")
    assert "step 20" in job.logs("bigrams-launcher")
    for worker in WORKERS:
        key = job.execute(worker, "stat", "-Lc", "%a %u %g", "/home/mpiuser/.ssh/id_rsa")
        assert key.stdout.split()[1:] == ["0", "1000"], "root's, for the group of the pod"
        assert job.container(worker)["ready"], job.told()
        assert job.container(worker)["restartCount"] == 0
