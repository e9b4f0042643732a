"""Real preflights on hosts whose network is slow or damages data, over plain sockets and gloo: who is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.hosts import middleman
from tests.pods import hosts
from tests.preflight.cluster.test_hosts import Pods, loud

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/preflight/cluster/test_hosts.py"),
]

NODES = 4
SLOW = 2_000_000  # bytes per second; hosts on one machine have a hundred times as much
WORDS = ("--threshold", "pair-mbps=5")
FLIP_AT = 300_000  # of a connection's bytes: no control message is as long


def preflights(
    folder: Path,
    at: int,
    peers: Sequence[int],
    *words: str,
    rate: int = 0,
    flip_at: int = 0,
) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """A job in which the way from host `at` to its `peers` is as told: exit codes, and what each node reports."""
    require(middleman.missing() is None, str(middleman.missing()))
    with hosts(*(f"job-node-0-{node}" for node in range(NODES))) as pods:
        addresses = [pods[peer].address for peer in peers]
        with middleman.between(pods[at].enter("net"), addresses, rate=rate, flip_at=flip_at):
            job = Pods(pods, folder, 60, (*WORDS, *words))
            for node in range(NODES):
                job.start(node)
            ended = [job.end(node) for node in range(NODES)]
    return [code for code, _ in ended], [found for _, found in ended]


def named(findings: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(check, subject) for check, subject, _ in loud(findings)]


def measured(findings: Sequence[dict[str, Any]]) -> float:
    """MB/s of who was named."""
    (rate,) = [rate for _, _, rate in loud(findings)]
    assert isinstance(rate, float)
    return rate


def test_a_node_with_a_slow_network_is_named(tmp_path: Path) -> None:
    codes, found = preflights(tmp_path, 2, (0, 1, 3), rate=SLOW)
    assert named(found[0]) == [("pairs", "node 2 (job-node-0-2)")]
    assert measured(found[0]) == pytest.approx(SLOW / 1e6, rel=0.5), "seconds are seconds, and not 20 of them"
    assert codes == [20] * NODES
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("way", ["socket", "gloo"])
def test_a_way_that_flips_a_bit_is_named_and_what_it_does(tmp_path: Path, way: str) -> None:
    codes, found = preflights(tmp_path, 2, (3,), "--pair-test", way, flip_at=FLIP_AT)
    assert named(found[0]) == [("pairs", "node 2 (job-node-0-2) - node 3 (job-node-0-3)")]
    assert codes == [20] * NODES
    (failed,) = [one for one in found[0] if one["status"] == "fail"]
    assert "the data arrives damaged" in failed["evidence"][0]
