"""Real Open MPI and MPICH over real workers: what their daemons and ranks do when something ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.cli.launching import clean_env
from tests.conftest import require
from tests.mpi.ssh.secrets import Worker, agent_of, client_of, require_openssh, secret
from tests.ports import free_port
from tests.process.world import survivors
from tests.waiting import eventually
from trainer_launch.host import runtime_directory
from trainer_launch.mpi import ssh_client

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
# A rank that takes its time to save; orted would leave it one second.
RANK = """trap 'sleep 3; echo saved >"{notes}/saved-$RANK"; exit 0' TERM
RANK=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}
echo "$CONTAINER $SSH_CONNECTION" >"{notes}/started-$RANK"
while :; do sleep 0.1; done
"""


class Job:
    """Two workers at 127.0.0.2 and 127.0.0.3, and an mpirun with a rank on each."""

    def __init__(self, folder: Path, mpirun: str) -> None:
        self.notes, mount, port = folder, secret(folder / "mount"), free_port()
        self.workers = [
            Worker(
                folder,
                mount,
                env={runtime_directory.LISTEN_AT: address, "CONTAINER": address, "TMPDIR": tmp(folder, address)},
                port=port,
            )
            for address in ("127.0.0.2", "127.0.0.3")
        ]
        self.reach, self._command = client_of(folder, mount, port), mpirun
        self.log = folder / "mpirun.log"
        self.mpirun: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.notes
        for it, address in zip(self.workers, ("127.0.0.2", "127.0.0.3"), strict=True):
            it.await_port(address)
        (folder / "rank.sh").write_text(RANK.format(notes=folder))
        with self.log.open("wb") as log:
            self.mpirun = subprocess.Popen(
                command(self._command, self.reach, folder),
                env=clean_env({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for rank in (0, 1):
            eventually(partial(self.has_started, rank), f"rank {rank} starts: {self.log.read_text()}")

    def has_started(self, rank: int) -> bool:
        note = self.notes / f"started-{rank}"
        return note.exists() and note.read_text().endswith("\n")

    def saved(self) -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in self.notes.glob("saved-*"))

    def strays(self) -> list[int]:
        return [pid for it in self.workers for pid in survivors(it.token) if "rank.sh" in words_of(pid)]

    def close(self) -> None:
        if self.mpirun is not None:
            self.mpirun.kill()
            self.mpirun.wait()
        for it in self.workers:
            it.close()


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def tmp(folder: Path, address: str) -> str:
    made = folder / f"tmp-{address}"
    made.mkdir()
    return str(made)


def command(mpirun: str, reach: ssh_client.Client, folder: Path) -> Sequence[str]:
    words = ["sh", str(folder / "rank.sh")]
    hosts = folder / "hosts"
    if "mpich" in mpirun:
        hosts.write_text("127.0.0.2:1\n127.0.0.3:1\n")
        return [mpirun, "-launcher", "ssh", "-launcher-exec", agent_of(reach), "-f", str(hosts), *words]
    hosts.write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    own = ["-mca", "plm_rsh_agent", agent_of(reach), "-mca", "oob_tcp_if_include", "lo", "--bind-to", "none"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, *own, "--hostfile", str(hosts), *words]


@pytest.fixture(params=["mpirun.openmpi", "mpiexec.mpich"])
def job(request, tmp_path) -> Iterator[Job]:
    require_openssh()
    require(shutil.which(request.param), f"needs {request.param}")
    made = Job(tmp_path, request.param)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_ranks_have_their_own_containers_environment(job) -> None:
    for rank, address in ((0, "127.0.0.2"), (1, "127.0.0.3")):
        told = (job.notes / f"started-{rank}").read_text()
        assert re.match(rf"{re.escape(address)} \S+ \d+ {re.escape(address)} \d+", told), told


def test_a_worker_that_is_asked_to_stop_lets_its_rank_save(job) -> None:
    lost = job.workers[1]
    lost.process.terminate()
    assert lost.wait() == 143
    assert job.saved()[-1:] == [1], (lost.log(), job.log.read_text())
    assert survivors(lost.token) == []


def test_a_launcher_that_is_killed_leaves_no_rank(job) -> None:
    job.mpirun.kill()
    job.mpirun.wait()
    eventually(lambda: not job.strays(), "all ranks have ended")
