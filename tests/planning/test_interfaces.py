"""Interfaces of torch workers: what `run` chooses for them, refuses and warns of, by the rules of preflight."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
from msgspec.structs import replace

from tests.planning.requests import MACHINE, request
from trainer_launch.host import network
from trainer_launch.host.network import Interface
from trainer_launch.model import Cpus, Endpoint, Job, NodeRange, Topology
from trainer_launch.model.errors import ContractError
from trainer_launch.planning import engines, interfaces, reading
from trainer_launch.planning.interfaces import NodeNetwork

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETH0 = Interface(name="eth0", addresses=("10.0.0.7", "fd00::7"))
NET1 = Interface(name="net1", addresses=("10.1.0.7",))
CPU_HOST = replace(MACHINE, hostname="nodeb", cpus=Cpus(affinity=2, quota=None))


def settled(*addresses: str, **more: Any) -> tuple[dict[str, str], str]:
    """The variables, and the warnings as one text, of a node without GPUs whose own name has these addresses."""
    given = {"interfaces": (LO, ETH0), "env": {}, "has_remote_peers": True, "needs_gloo": True, **more}
    env, warnings = interfaces.settled(NodeNetwork(hostname="nodeb", addresses=addresses, **given))
    return dict(env), "\n".join(warnings)


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (("127.0.1.1",), "nodeb resolves to 127.0.1.1, which other nodes cannot reach"),
        (("127.0.1.1", "10.0.0.7"), "first to 127.0.1.1, which other nodes cannot reach"),
        (("::1",), "resolves to ::1, which"),
        (("10.0.0.99",), "resolves to 10.0.0.99, but this host has eth0 (10.0.0.7)"),
        ((), "does not resolve"),
    ],
)
def test_gloo_gets_the_interface_that_leads_out_where_the_own_name_does_not(
    addresses: tuple[str, ...], said: str
) -> None:
    env, warning = settled(*addresses)
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert said in warning
    assert "workers get GLOO_SOCKET_IFNAME=eth0" in warning


def test_a_node_that_cannot_tell_which_interface_leads_out_is_misconfigured() -> None:
    with pytest.raises(ContractError, match=r"which other nodes cannot reach; here are lo .*net1 .*; set GLOO"):
        settled("127.0.1.1", interfaces=(LO, ETH0, NET1))


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ("10.0.0.7", "127.0.1.1")},
        {"addresses": ("fd00::7",)},
        {"addresses": ("127.0.0.1",), "has_remote_peers": False},
        {"addresses": ("127.0.1.1",), "env": {"GLOO_SOCKET_IFNAME": "eth0"}},
        {"addresses": ("127.0.1.1",), "interfaces": ()},
        {"addresses": ("10.0.0.7",), "env": {"GLOO_SOCKET_IFNAME": "lo"}, "has_remote_peers": False},
        {"addresses": ("10.0.0.7",), "env": {"GLOO_SOCKET_IFNAME": "x"}},
        {"addresses": ("10.0.0.7",), "env": {"GLOO_SOCKET_IFNAME": "eth0:1,eth0"}},
        {"addresses": ("10.0.0.7",), "env": {"NCCL_SOCKET_IFNAME": "=eth0"}, "needs_nccl": True},
        {"addresses": ("10.0.0.7",), "env": {"NCCL_SOCKET_IFNAME": "^lo,docker"}, "needs_nccl": True},
    ],
    ids=str,
)
def test_a_healthy_node_is_left_as_it_is(changes: dict[str, Any]) -> None:
    alias = Interface(name="eth0:1", addresses=("10.0.0.8",))
    addresses = changes.pop("addresses")
    assert settled(*addresses, **{"interfaces": (LO, ETH0, alias), "route": "eth0", **changes}) == ({}, "")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("^lo", "names ^lo, which is not here; gloo knows no patterns"),
        ("=eth0", "names =eth0, which is not here; gloo knows no patterns"),
        ("eth", "names eth, which is not here"),
        ("eth0, net1", "names ' net1', which is not here"),
        (" eth0", "names ' eth0', which is not here"),
        ("lo", "takes loopback, which other nodes cannot reach"),
    ],
)
def test_a_value_that_gloo_cannot_use_is_refused_before_the_start_or_told_where_gloo_may_not_be_used(
    value: str, said: str
) -> None:
    wrong: dict[str, Any] = {"env": {"GLOO_SOCKET_IFNAME": value}}
    with pytest.raises(ContractError, match="GLOO_SOCKET_IFNAME") as refused:
        settled("10.0.0.7", **wrong)
    assert said in str(refused.value)
    assert str(refused.value).endswith("set GLOO_SOCKET_IFNAME=eth0")
    assert said in settled("10.0.0.7", needs_gloo=False, **wrong)[1]


def test_loopback_is_no_error_on_the_machine_of_node_0_where_all_nodes_may_be() -> None:
    _, warning = settled("10.0.0.7", env={"GLOO_SOCKET_IFNAME": "lo"}, is_home=True)
    assert "takes loopback" in warning


@pytest.mark.parametrize("value", ["eth9", "^eth,lo", " eth0", "lo"])
def test_a_value_that_leaves_nccl_nothing_is_refused_on_gpus(value: str) -> None:
    wrong: dict[str, Any] = {"env": {"NCCL_SOCKET_IFNAME": value}, "needs_gloo": False}
    with pytest.raises(ContractError, match=re.escape(f"NCCL_SOCKET_IFNAME={value} leaves")):
        settled("10.0.0.7", needs_nccl=True, **wrong)
    assert f"NCCL_SOCKET_IFNAME={value} leaves" in settled("10.0.0.7", **wrong)[1]
    env = {**wrong["env"], "NCCL_COMM_ID": "10.0.0.6:5000"}
    assert settled("10.0.0.7", needs_gloo=False, needs_nccl=True, env=env)[1], "NCCL looks for it in another way"


def looked_at(coordinator: str, names: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> NodeNetwork:
    """What node 1 of 2 finds on a machine with two networks; net1 leads to 10.1.0.0/16, eth0 everywhere else."""

    def lookup(name: str) -> tuple[str, ...]:
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return names[name]

    monkeypatch.setattr(network, "lookup", lookup)
    monkeypatch.setattr(network, "interfaces", lambda: (LO, ETH0, NET1))
    monkeypatch.setattr(network, "is_here", lambda host: "127.0.0.1" in names.get(host, ()))
    monkeypatch.setattr(network, "source_to", lambda to: "10.1.0.7" if to.startswith("10.1.") else "10.0.0.7")
    topology = Topology(
        node_rank=1,
        nodes=NodeRange(2, 2),
        local_world_size=1,
        coordinator=Endpoint(coordinator, 29500),
        is_coordinator=False,
        rendezvous=None,
        max_restarts=None,
    )
    return reading.look_at_network(topology, CPU_HOST, {})


@pytest.mark.parametrize(
    ("coordinator", "way"),
    [("10.1.0.6", "net1"), ("nodea", "net1"), ("10.0.0.6", "eth0"), ("not-yet", "eth0"), ("home", "eth0")],
)
def test_the_way_out_is_the_route_to_node_0_or_the_default_route(
    coordinator: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, tuple[str, ...]] = {"nodeb": ("127.0.1.1",), "nodea": ("10.1.0.6",), "home": ("127.0.0.1",)}
    names |= {address: (address,) for address in ("10.1.0.6", "10.0.0.6")}
    assert looked_at(coordinator, names, monkeypatch).way_out == way


@pytest.mark.parametrize("coordinator", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_nodes_that_meet_on_loopback_ask_no_resolver(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = looked_at(coordinator, {}, monkeypatch)
    assert interfaces.settled(node) == ({}, ())


def test_workers_get_the_variable_and_the_user_is_told() -> None:
    job = Job(contract="by-hand", nodes=NodeRange(2, 2), node_rank=1, coordinator=Endpoint("10.0.0.6", 29500))
    own: dict[str, Any] = {"addresses": ("127.0.1.1",), "interfaces": (LO, ETH0), "has_remote_peers": True}
    for engine in ("torch", "torchrun"):
        node = NodeNetwork(hostname="nodeb", env={}, **own)
        made = engines.plan(request("train.py", job, engine=engine, network=node))
        env = made.workers.env if made.workers is not None else made.processes[0].env
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert any("workers get GLOO_SOCKET_IFNAME=eth0" in warning for warning in made.warnings)
