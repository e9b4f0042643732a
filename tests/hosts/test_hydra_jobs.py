"""MPI jobs with real MPICH, whose mpirun is a Hydra, on hosts with their own networks and names."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.hosts.mpi import Job, Run, job, no_strays

pytestmark = [pytest.mark.process, pytest.mark.timeout(300), pytest.mark.long("tests/hosts/test_mpi_jobs.py")]

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")


class MpichJob:
    """A job whose launcher has mpi-operator's variables for MPICH."""

    def __init__(self, it: Job) -> None:
        self.it = it
        names = [host.name for host in it.workers]
        it.hostfile.write_text("".join(f"{name}:1\n" for name in names))
        (it.folder / "lib").mkdir()
        (it.folder / "lib" / "libmpi.so.12").symlink_to(LIBRARY)  # by the name that mpi4py looks for

    def launch(self, *command: str, options: tuple[str, ...] = ()) -> Run:
        env = {
            "K_MPI_JOB_ROLE": "launcher",
            "HYDRA_HOST_FILE": str(self.it.hostfile),
            "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
            "LD_LIBRARY_PATH": str(self.it.folder / "lib"),
            "MPI4PY_MPIABI": "mpich",
            "UCX_TLS": "tcp,self",  # or it takes the hosts for one, as they share a kernel
        }
        return self.it.launch("mpirun.mpich", *command, options=options, env=env, platform=False)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[MpichJob]:
    require(shutil.which("mpirun.mpich") and LIBRARY.exists(), "needs mpich")
    with job(tmp_path, 3) as made:
        yield MpichJob(made)


def test_ranks_run_on_every_host_of_the_list(three: MpichJob) -> None:
    three.it.start_workers()
    run = three.launch(*three.it.train(5))
    assert run.end() == 0, run.output
    assert "step 4 of 3 ranks" in run.output
    no_strays(three.it)


def test_a_killed_rank_ends_the_job_with_its_signal_when_the_budget_is_spent(three: MpichJob) -> None:
    three.it.start_workers()
    # All have left MPI_Init before: one that still looks for rank 1 would abort first, and Hydra tells only that.
    script = "import os, time; from mpi4py import MPI; world = MPI.COMM_WORLD; world.Barrier()"
    killed = "world.rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    run = three.launch(sys.executable, "-c", f"{script}; {killed}", options=("--max-restarts", "0"))
    assert run.end() == 137, run.output
    assert "signal=SIGKILL" in run.last_words
    no_strays(three.it)


def test_a_killed_host_is_gone_on_without(three: MpichJob) -> None:
    three.it.start_workers()
    run = three.launch(*three.it.train(400), options=("--min-nodes", "2", "--shrink-after", "0"))
    run.read_until("step 5 of 3 ranks")
    three.it.kill("job-node-0-1.job")
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    no_strays(three.it)


def test_a_host_that_falls_silent_is_noticed_though_hydra_does_not_care(three: MpichJob) -> None:
    three.it.start_workers()
    run = three.launch(*three.it.train(1000), options=("--min-nodes", "2", "--shrink-after", "0"))
    run.read_until("step 5 of 3 ranks")
    three.it.workers[1].unplug()
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    three.it.workers[1].plug()
    no_strays(three.it)
