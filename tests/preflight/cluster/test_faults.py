"""One fault each, on hosts with their own networks and real processes: the exact finding, on every node."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.host.test_real_cgroup import IS_V2, limited
from tests.pods import Host, hosts
from tests.preflight.cluster.test_hosts import LATEST_S, Pods, loud

pytestmark = [pytest.mark.process, pytest.mark.long("tests/preflight/cluster/test_hosts.py")]

HALF = str(Path(__file__).with_name("half_node.py"))
BOUND = 260 << 20  # below what two workers take, above what the preflight itself does
MEMORY = ("memory", {"memory.max": str(BOUND)} if IS_V2 else {"memory.limit_in_bytes": str(BOUND)})
NAMES = tuple(f"job-node-0-{node}" for node in range(8))
AHEAD = (  # a clock that is 45 s ahead, in this process only
    "import sys, time; real = time.time; time.time = lambda: real() + 45; "
    "from trainer_launch.cli import main; sys.argv[0] = 'trainer-launch'; main()"
)


def name(node: int) -> str:
    return f"node {node} (job-node-0-{node})"


def found_by(job: Pods, node: int) -> list[dict[str, Any]]:
    """All findings that speak, of a node that has ended."""
    report = json.loads((job.folder / str(node) / "report.json").read_text())
    return [one for one in report["findings"] if one["status"] in ("warn", "fail")]


def other_torch(folder: Path) -> Sequence[str]:
    """A container in which torch is of another version, as far as its metadata tell."""
    require("torch" in {one.metadata["Name"] for one in importlib.metadata.distributions()}, "needs torch")
    metadata = next(path for path in importlib.metadata.files("torch") or () if path.name == "METADATA").locate()
    other = folder / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*", "Version: 1.13.1", Path(str(metadata)).read_text(), count=1))
    return ("unshare", "-m", "sh", "-c", f"mount --bind '{other}' '{metadata}' && exec \"$0\" \"$@\"")


def test_each_of_seven_nodes_with_a_fault_of_its_own_is_named_with_it_and_the_eighth_with_nothing(
    tmp_path: Path,
) -> None:
    env = {"PET_NPROC_PER_NODE": "2"}
    tiny = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"')
    with limited(*MEMORY) as enter, hosts(*NAMES, shm_bytes=1 << 30) as pods:
        job = Pods(pods, tmp_path, deadline_s=60, words=("--policy", "cpu=off,pairs=off"))
        job.start(0, env=env)
        job.start(1, env=env, inside=tiny)
        job.start(2, env=env, inside=("prlimit", "--nofile=64:64"))
        job.start(3, env=env, inside=("sh", "-c", enter))
        job.start(4, env=env, inside=("prlimit", "--nofile=200:200"))
        job.start(5, env={**env, "GLOO_SOCKET_IFNAME": "eth9"})
        job.start(6, env=env, inside=other_torch(tmp_path))
        job.start(7, env=env, launcher=(sys.executable, "-c", AHEAD))
        ended = [job.end(node) for node in range(8)]
    assert [code for code, _ in ended] == [30] * 8
    assert {(one["check"], one["status"], one["subject"]) for one in found_by(job, 0)} == {
        ("shm", "fail", name(1)),
        ("nofile", "fail", name(2)),
        ("memory", "warn", name(3)),
        ("nofile", "warn", name(4)),
        ("gloo-socket-ifname", "fail", name(5)),
        ("facts", "warn", name(5)),  # its variable differs
        ("facts", "fail", name(6)),
        ("clock", "fail", name(7)),
    }
    told = {one["check"]: one for one in found_by(job, 0) if one["status"] == "fail"}
    assert told["facts"]["text"].startswith("torch differs: ")
    assert "1.13.1 on node 6 (job-node-0-6)" in told["facts"]["text"]
    assert told["clock"]["measured"] == pytest.approx(45, abs=1)
    assert all("\n  faulty: " in job.said[node] for node in range(8))


def block(host: Host, rule: str) -> None:
    table = f"table ip t {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}"
    made = subprocess.run((*host.enter("net"), "nft", "-f", "-"), input=table, text=True, capture_output=True)
    require(made.returncode == 0, f"needs nftables: {made.stderr}")


def test_a_late_node_is_waited_for_and_half_unreachable_and_cut_off_ones_are_named(tmp_path: Path) -> None:
    """Node 1 is late, 2 ends in the middle of its first words, 3 knows node 0 by IPv6 only, 4 hears nothing."""
    with hosts(*(f"job-node-0-{node}" for node in range(5))) as pods:
        pods[3].knows({**{pod.name: pod.address for pod in pods[1:]}, pods[0].name: "fd77::2"})
        block(pods[4], f"ip saddr {pods[0].address} drop")
        job = Pods(pods, tmp_path, deadline_s=14)
        job.start(0)
        job.start(3)
        job.start(4)
        words = (sys.executable, HALF, pods[0].address, "29400", f"{pods[0].name}-29400", "2", "handshake")
        half = pods[2].start(words, {})
        job.until(0, "1 of 5 nodes present")
        job.start(1, inside=("prlimit", "--nofile=32:32"))
        ended = [job.end(node) for node in (0, 1, 3, 4)]
        pods[2].kill(half)
        half.communicate(timeout=LATEST_S)
    assert [code for code, _ in ended] == [30, 30, 20, 20]
    for node in (0, 1):
        assert ("nofile", name(1)) in [(one["check"], one["subject"]) for one in found_by(job, node)]
    assert loud(ended[0][1]) == [
        ("roll-call", f"{name(2)}, {name(3)}, {name(4)}", 2),
    ]
    assert ended[1][1] == ended[0][1]
    assert loud(ended[2][1]) == [("roll-call", name(0), None)]
    assert "Network is unreachable" in json.dumps(found_by(job, 3))
    assert loud(ended[3][1]) == [("roll-call", name(0), None)]


@pytest.mark.parametrize("stage", ["record", "test"])
def test_when_node_0_is_killed_in_the_middle_each_survivor_names_it_in_time(tmp_path: Path, stage: str) -> None:
    with hosts(*(f"job-node-0-{node}" for node in range(4))) as pods:
        job = Pods(pods, tmp_path, deadline_s=8)
        for node in range(3):
            job.start(node)
        words = (sys.executable, HALF, pods[0].name, "29400", f"{pods[0].name}-29400", "3", stage)
        half = pods[3].start(words, {})
        assert half.stdout is not None
        assert half.stdout.readline() == "reached\n"
        pods[0].kill(job.started[0])
        ended = [job.end(node) for node in (1, 2)]
        pods[3].kill(half)
        half.communicate(timeout=LATEST_S)
        job.started[0].communicate(timeout=LATEST_S)
    assert [code for code, _ in ended] == [20, 20]
    for _, findings in ended:
        assert loud(findings) == [("roll-call", name(0), None)]
