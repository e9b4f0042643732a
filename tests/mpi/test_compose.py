"""The command line and the variables with which mpirun starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from trainer_launch.model import Member
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.mpirun_command import INTEL, MPICH, OPEN_MPI, Dialect
from trainer_launch.planning import mpi_options

OPEN_MPI_4 = Dialect(OPEN_MPI, 4)
HOSTS = (Member("a.job", 2), Member("b.job", 2), Member("c.job", 2))


def made(
    line: str,
    dialect: Dialect = OPEN_MPI_4,
    env: Mapping[str, str] | None = None,
    hosts: tuple[Member, ...] = HOSTS,
    ssh_config: str | None = "/run/ssh",
) -> mpirun_command.MpirunCommand:
    job_hosts = mpirun_command.JobHosts(
        hosts=hosts, everyone=HOSTS, hostfile="/run/hosts", ssh_config=ssh_config, is_root=False
    )
    return mpirun_command.command(mpi_options.parse(shlex.split(line)), dialect, env or {}, (), job_hosts)


def test_open_mpi_gets_the_hosts_in_their_order_with_full_names() -> None:
    command = made("mpirun python train.py")
    assert command.argv == ("mpirun", "--hostfile", "/run/hosts", "python", "train.py")
    assert command.hostfile == "a.job slots=2\nb.job slots=2\nc.job slots=2\n"
    assert command.env["OMPI_MCA_orte_keep_fqdn_hostnames"] == "true"


def test_ssh_has_our_configuration_beside_the_platforms_arguments() -> None:
    env = made("mpirun x", env={"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}).env
    assert env["OMPI_MCA_plm_rsh_args"] == "-F /run/ssh -o ConnectionAttempts=10"
    assert env["OMPI_MCA_plm_rsh_no_tree_spawn"] == "1"


def test_open_mpi_5_is_told_by_its_own_names_what_the_platform_said_by_the_old_ones() -> None:
    env = made("mpirun x", Dialect(OPEN_MPI, 5), {"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}).env
    assert env["PRTE_MCA_plm_ssh_args"] == "-F /run/ssh -o ConnectionAttempts=10"
    assert env["PRTE_MCA_prte_keep_fqdn_hostnames"] == "true"
    assert env["PRTE_MCA_oob_tcp_keepalive_time"] == "1"
    assert env["PRTE_MCA_odls_base_max_threads"] == "0"


def test_what_the_user_has_set_stands() -> None:
    env = made("mpirun x", env={"OMPI_MCA_oob_tcp_keepalive_time": "30"}).env
    assert env["OMPI_MCA_oob_tcp_keepalive_time"] == "30"


def test_with_kubexec_the_platforms_agent_is_left_alone() -> None:
    given = {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}
    env = made("mpirun x", env=given, ssh_config=None).env
    assert env["OMPI_MCA_plm_rsh_agent"] == "/etc/mpi/kubexec.sh"
    assert "OMPI_MCA_plm_rsh_args" not in env


@pytest.mark.parametrize("name", [MPICH, INTEL])
def test_hydra_gets_its_own_file_and_launcher(name: str) -> None:
    command = made("mpirun -np 6 ./a.out", Dialect(name), {"PATH": "/bin"})
    assert command.argv == (
        *("mpirun", "-f", "/run/hosts", "-launcher", "ssh", "-n", "6", "-genvlist", "PATH", "./a.out"),
    )
    assert command.hostfile == "a.job:2\nb.job:2\nc.job:2\n"
    args = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if name == INTEL else "HYDRA_LAUNCHER_EXTRA_ARGS"
    assert command.env[args] == "-F /run/ssh"


def test_a_users_own_launcher_and_environment_stay_hydras() -> None:
    command = made("mpirun -launcher fork -genvall ./a.out", Dialect(MPICH), {"PATH": "/bin"})
    assert command.argv == ("mpirun", "-f", "/run/hosts", "-launcher", "fork", "-genvall", "./a.out")


@pytest.mark.parametrize(
    ("asked", "hosts", "ranks"),
    [
        (None, HOSTS, None),
        (6, HOSTS, 6),
        (6, HOSTS[:2], 4),
        (3, HOSTS[:2], 3),
        (9, HOSTS[:2], 9),  # oversubscribed on purpose
        (6, (), 6),
    ],
)
def test_fewer_hosts_take_fewer_ranks(asked: int | None, hosts: tuple[Member, ...], ranks: int | None) -> None:
    assert mpirun_command.ranks(asked, hosts, HOSTS) == ranks


def test_an_mpirun_without_hosts_runs_as_it_was_typed() -> None:
    assert made("mpirun -np 2 ./a.out", hosts=()).argv == ("mpirun", "-np", "2", "./a.out")


def test_the_users_own_variables_are_not_named_twice() -> None:
    argv = made("mpirun -x NCCL_DEBUG=INFO x", env={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2"}).argv
    assert shlex.join(argv) == "mpirun --hostfile /run/hosts -x OMP_NUM_THREADS -x NCCL_DEBUG=INFO x"
