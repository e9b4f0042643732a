"""Open MPI where containerd's default seccomp profile refuses process_vm_readv: a real filter and real mpirun."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import DEADLINE_S, clean_env, launched
from tests.conftest import require
from tests.mpi.ssh import seccomp
from tests.mpi.ssh.secrets import agent_of, client_of, require_openssh, worker
from trainer_launch.host import runtime_directory

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
FILTER = (sys.executable, str(Path(seccomp.__file__)))
REFUSED = "Read -1, expected"
PARAMETER = "btl_vader_single_copy_mechanism"
# 16 messages of 1 MiB from each rank with an even number to the next.
TRAIN = r"""
from mpi4py import MPI
world, data = MPI.COMM_WORLD, bytearray(1 << 20)
for _ in range(16):
    world.Recv(data, world.rank - 1) if world.rank % 2 else world.Send(data, world.rank + 1)
print(f"{world.rank} is done\n", end="", flush=True)
"""
ENV = {
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture
def train(tmp_path: Path) -> str:
    require(platform.machine() in seccomp.CALLS, "needs a processor whose system calls are known")
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    version = (
        subprocess.run(("mpirun", "--version"), capture_output=True, text=True) if shutil.which("mpirun") else None
    )
    require(version is not None and "(Open MPI) 4" in version.stdout, "needs Open MPI 4")
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_mpirun_on_this_host_does_not_try_what_is_refused(train) -> None:
    ended = launched("run", "--", "mpirun", "-np", "2", sys.executable, train, env=ENV, within=FILTER)
    assert "1 is done" in ended.stdout
    assert REFUSED not in ended.stderr


def test_each_worker_finds_out_for_its_own_ranks(train, tmp_path, mount) -> None:
    """The launcher's own pod may read: only the workers, where the ranks run, may not."""
    require_openssh()
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 slots=2\n")
    with worker(tmp_path, mount, env={runtime_directory.LISTEN_AT: "127.0.0.2,127.0.0.1"}, wrap=FILTER) as it:
        it.await_port("127.0.0.2")
        reach = client_of(tmp_path, mount, it.port)
        own = (
            "-mca",
            "plm_rsh_agent",
            agent_of(reach),
            "-mca",
            "oob_tcp_if_include",
            "lo",
            "--hostfile",
            str(hosts),
        )
        for chosen, lines in (({}, 0), ({f"OMPI_MCA_{PARAMETER}": "cma"}, 16)):
            done = subprocess.run(
                ("mpirun", *own, sys.executable, train),
                env=clean_env(ENV | chosen),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=3 * DEADLINE_S,
            )
            assert done.returncode == 0, done.stderr
            assert done.stderr.count(REFUSED) == lines
