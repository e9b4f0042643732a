"""The grammars of NCCL and gloo, on the interfaces of a pod."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.planning import interfaces


def interface(name: str, *addresses: str, is_up: bool = True) -> Interface:
    return Interface(name=name, addresses=addresses, is_up=is_up)


POD = (
    interface("lo", "127.0.0.1", "::1"),
    interface("eth0", "10.0.0.7"),
    interface("eth1", "fd00::7"),
    interface("eth10", "10.1.0.7"),
    interface("docker0", "172.17.0.1"),
    interface("eth9", "10.9.0.7", is_up=False),
)
PORTS = (
    AdapterPort("mlx5_0", 1, True),
    AdapterPort("mlx5_1", 1, True),
    AdapterPort("mlx5_1", 2, True),
    AdapterPort("mlx5_10", 1, True),
    AdapterPort("mlx5_2", 1, False),
)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("eth", "eth0 eth1 eth10"),
        ("eth1", "eth1 eth10"),
        ("=eth1", "eth1"),
        ("=eth1,eth0", "eth0 eth1"),
        ("^eth,docker", "lo"),
        ("^=eth1", "lo eth0 eth10 docker0"),
        ("^", "eth0 eth1 eth10"),  # a single letter says nothing to NCCL
        ("eth0,", "eth0"),
        ("ib", ""),
        (None, "eth0 eth1 eth10"),
        ("", "eth0 eth1 eth10"),
    ],
)
def test_nccls_list_of_interfaces(spec: str | None, names: str) -> None:
    assert " ".join(found.name for found in interfaces.nccl_interfaces(spec, POD)) == names


def test_without_a_list_nccl_prefers_infiniband_and_takes_docker_and_loopback_last() -> None:
    assert [found.name for found in interfaces.nccl_interfaces(None, (*POD, interface("ib0", "10.2.0.7")))] == [
        "ib0"
    ]
    assert [found.name for found in interfaces.nccl_interfaces(None, (POD[0], POD[4]))] == ["docker0"]
    assert [found.name for found in interfaces.nccl_interfaces(None, POD[:1])] == ["lo"]


def test_nccl_can_be_told_one_family() -> None:
    assert [found.name for found in interfaces.nccl_interfaces("eth", POD, "AF_INET6")] == ["eth1"]
    assert [found.name for found in interfaces.nccl_interfaces("eth", POD, "AF_INET")] == ["eth0", "eth10"]


@pytest.mark.parametrize(
    ("spec", "ports"),
    [
        ("mlx5", "mlx5_0:1 mlx5_1:1 mlx5_1:2 mlx5_10:1"),
        ("mlx5_1", "mlx5_1:1 mlx5_1:2 mlx5_10:1"),
        ("=mlx5_1", "mlx5_1:1 mlx5_1:2"),
        ("mlx5_1:2", "mlx5_1:2"),
        ("=mlx5_0:1,mlx5_1:1", "mlx5_0:1 mlx5_1:1"),
        ("^mlx5_1", "mlx5_0:1"),
        ("^=mlx5_1:1", "mlx5_0:1 mlx5_1:2 mlx5_10:1"),
        ("mlx5_2", ""),  # its port is down
        ("ibp", ""),
        ("", "mlx5_0:1 mlx5_1:1 mlx5_1:2 mlx5_10:1"),
    ],
)
def test_nccls_list_of_adapters(spec: str, ports: str) -> None:
    taken = [port for port in PORTS if port.is_active and interfaces.takes(spec, port.device, port.port)]
    assert " ".join(f"{port.device}:{port.port}" for port in taken) == ports


def test_gloo_takes_exact_names_and_misses_each_that_is_not_there() -> None:
    found, missing = interfaces.gloo_interfaces("eth0,eth,^lo", POD)
    assert [one.name for one in found] == ["eth0"]
    assert missing == ("eth", "^lo")


@given(st.text(alphabet="^=,:eth01lom5x_", max_size=20))
def test_whatever_is_written_a_list_and_its_opposite_share_nothing(spec: str) -> None:
    plain = spec.lstrip("^")
    if len(plain) > 1:
        taken = set(interfaces.nccl_interfaces(plain, POD))
        left = set(interfaces.nccl_interfaces("^" + plain, POD))
        assert taken | left == {found for found in POD if found.is_up}
        assert not taken & left
