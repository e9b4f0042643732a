"""The pods of a rehearsal: what a Trainer v2 pod gets, and nothing of the shell's own platform."""

from __future__ import annotations

import pytest

from trainer_launch.contracts import read_job
from trainer_launch.contracts.source import Pod
from trainer_launch.errors import UsageError
from trainer_launch.model import Member
from trainer_launch.rehearsal.flags import MAX_NODES, MpiFiles, mpi_hostfile, mpi_pods, pods
from trainer_launch.snapshot import SnapshotFiles


def test_pods_differ_in_rank_name_and_address_only() -> None:
    zero, one = pods(2, "4", 29501, {"PATH": "/bin"})
    assert (zero.address, one.address) == ("127.0.0.2", "127.0.0.3")
    assert {name for name in zero.env if zero.env[name] != one.env[name]} == {
        "PET_NODE_RANK",
        "JOB_COMPLETION_INDEX",
        "HOSTNAME",
    }
    assert one.env["PET_NODE_RANK"] == "1"
    assert one.env["PET_MASTER_ADDR"] == zero.address
    assert one.env["PET_MASTER_PORT"] == "29501"
    assert one.env["PATH"] == "/bin"


@pytest.mark.parametrize(
    "name",
    [
        "PET_RDZV_ENDPOINT",
        "TF_CONFIG",
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "TORCHELASTIC_RUN_ID",
        "TRAINER_LAUNCH_NODES",
    ],
)
def test_what_another_platform_left_in_the_shell_does_not_reach_a_pod(name: str) -> None:
    (pod,) = pods(1, "1", 29500, {name: "left over"})
    assert pod.env.get(name) != "left over"


def test_gloo_uses_the_loopback_unless_told_otherwise() -> None:
    assert pods(1, "1", 1, {})[0].env["GLOO_SOCKET_IFNAME"] == "lo"
    assert pods(1, "1", 1, {"GLOO_SOCKET_IFNAME": "eth0"})[0].env["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("nodes", [0, -1, MAX_NODES + 1])
def test_more_pods_than_a_laptop_has_room_for_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        pods(nodes, "1", 29500, {})


# -- MPI --------------------------------------------------------------------------------------

FILES = MpiFiles(hostfile="/s/hostfile", ssh_dir="/s/keys", tmp="/s")


def test_an_mpi_job_has_a_pod_with_sshd_for_each_node_and_a_launcher() -> None:
    zero, one, launcher = mpi_pods(2, 4, 4022, FILES, {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "7"})
    assert [pod.name for pod in (zero, one, launcher)] == ["local-node-0-0", "local-node-0-1", "local-launcher-0-0"]
    assert one.command == ("sshd", "--listen-address", "127.0.0.3")
    assert launcher.command == ("run", "--")
    assert {pod.env["TRAINER_LAUNCH_SSH_PORT"] for pod in (zero, one, launcher)} == {"4022"}
    assert {pod.env["TRAINER_LAUNCH_SSH_DIR"] for pod in (zero, one, launcher)} == {"/s/keys"}
    assert len({pod.env["TMPDIR"] for pod in (zero, one, launcher)}) == 3
    assert "OMPI_COMM_WORLD_RANK" not in launcher.env


def test_they_are_read_as_what_trainer_v2_makes() -> None:
    zero, launcher = mpi_pods(1, 4, 4022, FILES, {"PATH": "/bin"})
    mounted = SnapshotFiles(
        {"/s/hostfile": mpi_hostfile(1, 4), "/s/keys/id_rsa": "k", "/s/keys/authorized_keys": "a"}
    )
    node, leader = (
        read_job(Pod(env=pod.env, files=mounted, hostname=pod.env["HOSTNAME"])) for pod in (zero, launcher)
    )
    assert (node.contract, node.role, node.engine) == ("trainer-v2-mpi", "node", "sshd")
    assert (leader.contract, leader.role, leader.engine) == ("trainer-v2-mpi", "launcher", "mpirun")
    assert leader.members == (Member("127.0.0.2", 4),)
    assert leader.details["ssh_dir"] == node.details["ssh_dir"] == "/s/keys"
