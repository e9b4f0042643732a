"""How hosts are reached where the user has set that up."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.conftest import require
from trainer_launch.mpi.host_access import own_ssh
from trainer_launch.mpi.ssh_client import configured_port
from trainer_launch.planning import mpi_options


@pytest.mark.parametrize(
    ("line", "env", "ssh"),
    [
        ("mpirun x", {}, "ssh"),
        ("mpirun -mca plm_rsh_agent ssh x", {}, "ssh"),
        ("mpirun --mca plm_rsh_agent 'ssh -p 2022 : rsh' x", {}, "ssh -p 2022"),
        ("mpirun x", {"PRTE_MCA_plm_ssh_agent": "/opt/bin/ssh -F f"}, "/opt/bin/ssh -F f"),
        ("mpirun -mca plm_rsh_args '-p 2022' x", {"OMPI_MCA_plm": "rsh"}, "ssh -p 2022"),
        ("mpirun x", {"OMPI_MCA_plm": "^slurm"}, "ssh"),
        ("mpirun -bootstrap ssh x", {}, "ssh"),
        ("mpirun -launcher-exec=/usr/bin/ssh x", {"HYDRA_LAUNCHER": "rsh"}, "/usr/bin/ssh"),
        ("mpirun x", {"I_MPI_HYDRA_BOOTSTRAP": "ssh"}, "ssh"),
    ],
)
def test_an_ssh_of_the_users_own_is_recognised_with_its_options(line: str, env: dict[str, str], ssh: str) -> None:
    assert own_ssh(mpi_options.parse(shlex.split(line)), env) == tuple(ssh.split())


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("mpirun --mca plm_rsh_agent rsh x", {}),
        ("mpirun --mca plm slurm x", {}),
        ("mpirun x", {"OMPI_MCA_plm_rsh_agent": "/etc/own/agent.sh"}),
        ("mpirun -launcher slurm x", {}),
        ("mpirun x", {"I_MPI_HYDRA_BOOTSTRAP": "rsh"}),
        ("mpirun x", {"HYDRA_LAUNCHER_EXEC": "/etc/own/agent.sh"}),
    ],
)
def test_what_is_no_ssh_is_not_taken_for_one(line: str, env: dict[str, str]) -> None:
    assert own_ssh(mpi_options.parse(shlex.split(line)), env) is None


def test_the_port_is_where_that_ssh_would_go(tmp_path: Path) -> None:
    require(shutil.which("ssh"), "needs openssh-client")
    (tmp_path / "config").write_text("Host w-*\n  Port 2022\nHost *\n  Port 2222\n")
    ssh = ("ssh", "-F", str(tmp_path / "config"))
    assert [configured_port(ssh, host) for host in ("w-0", "other")] == [2022, 2222]
    assert configured_port((*ssh, "-p", "2200"), "w-0") == 2200
    assert configured_port((str(tmp_path / "no-ssh"),), "w-0") is None
