"""The pods of a rehearsal: what a Trainer v2 pod gets, and nothing of the shell's own platform."""

from __future__ import annotations

import pytest

from trainer_launch.errors import UsageError
from trainer_launch.rehearsal import MAX_NODES, pods


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
