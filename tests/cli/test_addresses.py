"""Jobs of two nodes that are told addresses of IPv6, on one machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.launching import Started, script
from tests.conftest import require
from tests.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.torch]
WORKER = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("rank", os.environ["RANK"], "of", dist.get_world_size(), flush=True)
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "2", "--node-rank", "RANK", "--master-addr", "::1", "--master-port", "PORT", "--"),
        ("--", "torchrun", "--nnodes=2", "--node-rank=RANK", "--rdzv-endpoint=[::1]:PORT"),
        ("--", "torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:PORT"),
    ],
    ids=["a bare address", "an endpoint in brackets", "ranked by arrival"],
)
def test_nodes_meet_at_an_address_of_ipv6(words: tuple[str, ...], tmp_path: Path) -> None:
    require(has_ipv6(), "needs IPv6 on loopback")
    train, port = script(tmp_path, WORKER), str(free_port())
    places = [[word.replace("RANK", rank).replace("PORT", port) for word in words] for rank in "10"]
    nodes = [Started(("run", "--no-prefix", *place, train), env={}, cwd=tmp_path) for place in places]
    try:
        ends = [node.end(timeout_s=60) for node in nodes]
    finally:
        for node in nodes:
            node.close()
    assert [code for code, _ in ends] == [0, 0], ends
    outputs = [output for _, output in ends]
    assert all(f"coordinator=[::1]:{port}" in output for output in outputs)
    if "--rdzv-backend=c10d" in words:
        assert all("node=ranked-by-arrival/2" in output for output in outputs)
    assert {rank for rank in "01" if any(f"rank {rank} of 2" in output for output in outputs)} == {"0", "1"}
