"""Torch jobs on hosts whose names, variables and addresses are wrong in the ways that users report."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, ended, script
from tests.hosts.test_torch_jobs import REDUCE
from tests.pods import Host, hosts

pytestmark = [pytest.mark.torch, pytest.mark.process]
DEADLINE_S = 120


@pytest.fixture
def two() -> Iterator[tuple[Host, Host]]:
    with hosts("nodea", "nodeb") as (first, second):
        first._own_network.write_names()
        yield first, second


def by_hand(node: int, master: str) -> dict[str, str]:
    rank = {"PET_NODE_RANK": str(node), "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    return {**rank, "PET_MASTER_ADDR": master, "PET_MASTER_PORT": "29500"}


def start(host: Host, node: int, master: str, train: str, **env: str) -> subprocess.Popen[str]:
    return host.start((*LAUNCHER, "run", "--no-prefix", "--", train), {**by_hand(node, master), **env})


@pytest.mark.parametrize("own", ["127.0.1.1", None], ids=["on loopback", "without an address"])
def test_a_host_whose_own_name_leads_nowhere_is_reached_all_the_same(
    own: str | None, two: tuple[Host, Host], tmp_path: Path
) -> None:
    train = script(tmp_path, REDUCE)
    for host in two:
        host.knows({} if own is None else {host.name: own})
    started = [start(host, node, two[0].address, train) for node, host in enumerate(two)]
    done = [ended(process, DEADLINE_S) for process in started]
    assert [code for code, _ in done] == [0, 0], done
    assert all("so workers get GLOO_SOCKET_IFNAME=eth0" in output for _, output in done), done
    assert "sum 2 rank 1" in done[1][1]


def refused(host: Host, env: Mapping[str, str], train: str, **more: str) -> str:
    """What a launcher says that ends with the exit code of a wrong configuration, and its termination message."""
    message = host.tmp / "message"
    own = {**env, **more, "TRAINER_LAUNCH_TERMINATION_LOG": str(message)}
    code, output = ended(host.start((*LAUNCHER, "run", "--no-prefix", "--", train), own), DEADLINE_S)
    assert code == 2, output
    assert "started" not in output
    words = message.read_text()
    assert words.startswith("reason=Misconfigured"), words
    assert "retryable=false" in words
    return words


def test_an_interface_that_gloo_cannot_use_is_one_error_before_the_start(
    two: tuple[Host, Host], tmp_path: Path
) -> None:
    train = script(tmp_path, REDUCE)
    words = refused(two[1], by_hand(1, two[0].address), train, GLOO_SOCKET_IFNAME="^lo")
    assert "GLOO_SOCKET_IFNAME=^lo names ^lo, which is not here; gloo knows no patterns" in words
    assert "set GLOO_SOCKET_IFNAME=eth0" in words


@pytest.mark.parametrize("master", ["localhost", "127.0.1.1", "::1", "own"])
def test_an_address_of_node_0_that_leads_to_another_node_ends_that_one(
    master: str, two: tuple[Host, Host], tmp_path: Path
) -> None:
    address = two[1].address if master == "own" else master
    words = refused(two[1], by_hand(1, address), script(tmp_path, REDUCE))
    assert f"node 0's address {address} leads to this node, whose rank is 1" in words
