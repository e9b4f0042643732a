"""The scripts that find the ranks of one job on a host, with real processes."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest

from trainer_launch.host.runtime_directory import MPI_RUN
from trainer_launch.mpi.host_access import sweeping, telling

pytestmark = pytest.mark.process

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")
SHELLS = [shell for shell in ("sh", "bash", "busybox sh") if shutil.which(shell.split()[0])]
Start = Callable[[Mapping[str, str]], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with this environment, to be ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(("sleep", "600"), env=dict(env)))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGUSR1], ids=["a sweep", "a tell"])
def test_only_ranks_of_this_job_are_reached(start: Start, shell: str, ends_by: signal.Signals) -> None:
    mark = secrets.token_hex(8)
    ours = [start({"A": "1", name: "3", MPI_RUN: mark, "B": "2"}) for name in RANK_VARIABLES]
    numbers = {"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "3"}
    others = {
        "another job's rank, with two numbers": start({MPI_RUN: secrets.token_hex(8), **numbers}),
        "a rank without a mark, with two numbers": start(numbers),
        "a rank whose mark begins as ours": start({MPI_RUN: f"{mark}0", **numbers}),
        "our mpirun": start({MPI_RUN: mark, "NO_PMI_RANK": "0"}),
    }
    name = f"{MPI_RUN}={mark}"
    script = sweeping(name) if ends_by is signal.SIGKILL else telling(name, "USR1")
    subprocess.run((*shell.split(), "-c", script), check=True, timeout=60)
    assert [process.wait(10) for process in ours] == [-ends_by] * 3
    assert [who for who, process in others.items() if process.poll() is not None] == []
