"""The manifests of docker/examples for MPI by another way than a TrainJob, run as they stand, and with a fault."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import AbstractContextManager

import pytest

from tests.cli.launching import Started, start
from tests.conftest import require
from tests.examples.test_manifests import ENV, EXAMPLES, pod_of, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def rehearsed(name: str) -> AbstractContextManager[Started]:
    env = {**ENV, "PYTHONPATH": str(EXAMPLES.parents[1])}
    return start("local", "-f", name, env=env, cwd=EXAMPLES)


@pytest.fixture
def open_mpi() -> None:
    pytest.importorskip("mpi4py")
    require(shutil.which("mpirun.openmpi") or shutil.which("orterun"), "Open MPI is not installed")


def test_mpijob_v1_trains_over_kubectl_exec(open_mpi: None) -> None:
    code, output, errors = run("mpijob-v1.yaml")
    assert code == 0, errors
    assert sorted(re.findall(r"rank (\d) of 4 on bigrams-v1-worker-(\d)", output)) == [
        (str(rank), str(rank // 2)) for rank in range(4)
    ]
    losses = [float(loss) for loss in re.findall(r"step \d+/60  loss ([\d.]+)", output)]
    assert losses[0] > losses[-1]
    assert "MPIJob v1 bigrams-v1: Succeeded" in errors


def test_mpijob_v1_loses_a_worker_starts_again_and_resumes(open_mpi: None) -> None:
    with rehearsed("mpijob-v1.yaml") as rehearsal:
        rehearsal.read_until(r"step 20/60")
        os.kill(pod_of(rehearsal, "bigrams-v1-worker-1").pid, signal.SIGKILL)
        code, output = rehearsal.end(timeout_s=280)
    assert code == 0, output
    assert re.search(r"resumed at step (20|40)", output)
    assert re.search(r"^bigrams-v1-launcher +Succeeded +1 +[1-3] +0 ", output, re.MULTILINE)
