"""The command line and the variables with which mpirun starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from trainer_launch.model import Member
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.mpirun_command import INTEL, MPICH, OPEN_MPI, Dialect
from trainer_launch.planning import mpi_options
from trainer_launch.planning.mpi import KUBEXEC, Spec

OPEN_MPI_4 = Dialect(OPEN_MPI, 4)
HOSTS = (Member("a.job", 2), Member("b.job", 2), Member("c.job", 2))


def made(
    line: str,
    dialect: Dialect = OPEN_MPI_4,
    env: Mapping[str, str] | None = None,
    hosts: tuple[Member, ...] = HOSTS,
    **spec: object,
) -> mpirun_command.Command:
    job_hosts = mpirun_command.JobHosts(
        hosts=hosts, everyone=HOSTS if hosts else (), hostfile="/run/hosts", ssh_config="/run/ssh", is_root=False
    )
    whole = Spec(contract="c", hostname="l", scratch="/run", **spec)  # type: ignore[arg-type]
    return mpirun_command.command(whole, mpi_options.parse(shlex.split(line)), dialect, env or {}, job_hosts)


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
    env = made("mpirun x", env=given, agent=KUBEXEC).env
    assert env["OMPI_MCA_plm_rsh_agent"] == "/etc/mpi/kubexec.sh"
    assert "OMPI_MCA_plm_rsh_args" not in env


@pytest.mark.parametrize("name", [MPICH, INTEL])
def test_hydra_gets_its_own_file_and_launcher(name: str) -> None:
    command = made("mpirun -np 6 ./a.out", Dialect(name, 4), {"PATH": "/bin"})
    assert command.argv == (
        *("mpirun", "-f", "/run/hosts", "-launcher", "ssh", "-n", "6", "-genvlist", "PATH", "./a.out"),
    )
    assert command.hostfile == "a.job:2\nb.job:2\nc.job:2\n"
    args = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if name == INTEL else "HYDRA_LAUNCHER_EXTRA_ARGS"
    assert command.env[args] == "-F /run/ssh"


def test_a_users_own_launcher_and_environment_stay_hydras() -> None:
    command = made("mpirun -launcher fork -genvall ./a.out", Dialect(MPICH, 4), {"PATH": "/bin"})
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


def test_a_typed_list_of_hosts_chooses_among_those_of_the_platform() -> None:
    assert mpirun_command.filtered(HOSTS, "b.job,c.job:1,d,d") == "b.job:2,c.job:1,d:2"


# -- which variables ranks get ----------------------------------------------------------------

ENV = {
    "PATH": "/opt/bin:/bin",
    "NCCL_DEBUG": "INFO",
    "UCX_TLS": "tcp",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/models",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
    "WANDB_API_KEY": "0123456789",
    "CUDA_VISIBLE_DEVICES": "",
    "HOSTNAME": "launcher",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PYTHON_NOTE": "two\nlines",
    "MY_OWN": "1",
}


def test_libraries_settings_go_along_and_a_pods_own_things_do_not() -> None:
    assert mpirun_command.allowed(ENV) == ("HF_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "UCX_TLS")


def test_secrets_go_along_only_when_they_are_named() -> None:
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & set(mpirun_command.allowed(ENV))
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & set(mpirun_command.but_secrets(ENV))
    assert {"HF_TOKEN", "MY_OWN"} <= set(mpirun_command.allowed(ENV, ("HF_TOKEN", "MY_OWN")))
    assert "HF_TOKEN" in mpirun_command.but_secrets(ENV, ("HF_TOKEN",))


def test_what_is_held_back_is_told_by_name() -> None:
    assert mpirun_command.withheld(ENV) == ("HF_TOKEN", "WANDB_API_KEY")
    assert mpirun_command.withheld(ENV, ("HF_TOKEN",)) == ("WANDB_API_KEY",)


def test_hydra_hands_on_what_it_always_did_but_secrets_and_a_pods_own_things() -> None:
    handed_on = mpirun_command.but_secrets(ENV | {"NVIDIA_VISIBLE_DEVICES": "", "TRAINER_LAUNCH_RUN_DIR": "/tmp/x"})
    assert "MY_OWN" in handed_on
    pods_own = {"HOSTNAME", "KUBERNETES_SERVICE_HOST", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    assert not {*pods_own, "TRAINER_LAUNCH_RUN_DIR"} & set(handed_on)
