"""Real preflights on hosts with their own networks: absent, stopped, unnamed, differing, slow, cut off nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER
from tests.pods import Host, hosts

pytestmark = pytest.mark.process

LATEST_S = 120.0


class Pods:
    """The nodes of one job, each with a report of its own."""

    def __init__(self, pods: Sequence[Host], folder: Path, deadline_s: int, words: Sequence[str] = ()) -> None:
        self.pods, self.folder, self.deadline_s, self.words = pods, folder, deadline_s, words
        self.started: dict[int, subprocess.Popen[str]] = {}
        self.said: dict[int, str] = {}

    def start(
        self,
        node: int,
        *command: str,
        env: Mapping[str, str] | None = None,
        level: str = "standard",
        inside: Sequence[str] = (),
        launcher: Sequence[str] = LAUNCHER,
    ) -> None:
        """`inside`: a program that prepares the container and becomes what follows it."""
        told = {
            "PET_NNODES": str(len(self.pods)),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": self.pods[0].name,
            "PET_MASTER_PORT": "29400",
        }
        report = self.folder / str(node) / "report.json"
        report.parent.mkdir()
        words = ("--wait-timeout", str(self.deadline_s), "--level", level, "--report", str(report))
        argv = (
            *inside,
            *launcher,
            "preflight",
            "--policy",
            "cpu=off",
            *words,
            *self.words,
            *(("--", *command) if command else ()),
        )
        self.started[node] = self.pods[node].start(argv, {**told, **(env or {})})

    def until(self, node: int, words: str) -> None:
        """Read what a node says until it has said that."""
        stream = self.started[node].stdout
        assert stream is not None
        for line in stream:
            if words in line:
                return
        raise AssertionError(f"node {node} ended without saying {words!r}")

    def end(self, node: int) -> tuple[int, list[dict[str, Any]]]:
        """Exit code, and what was found about all nodes together."""
        self.said[node], _ = self.started[node].communicate(timeout=LATEST_S)
        path = self.folder / str(node) / "report.json"
        assert path.exists(), self.said[node]
        findings = json.loads(path.read_text())["findings"]
        checks = ("roll-call", "facts", "clock", "pairs")
        return self.started[node].returncode, [one for one in findings if one["check"] in checks]


def loud(findings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, object]]:
    return [
        (one["check"], one["subject"], one["measured"]) for one in findings if one["status"] in ("warn", "fail")
    ]


@pytest.mark.long("tests/preflight/cluster/test_hosts.py")
def test_every_survivor_prints_the_same_list_of_who_is_missing_and_why(tmp_path: Path) -> None:
    names = [f"job-node-0-{node}" for node in range(5)]
    with hosts(*names) as pods:
        for pod in pods:
            pod.knows({other.name: other.address for other in pods[:4]})
        job = Pods(pods, tmp_path, deadline_s=12)
        for node in (0, 1, 3):
            job.start(node)
        job.until(3, "nodes present")
        pods[3].process_1(job.started[3]).suspend()
        ended = [job.end(node) for node in (0, 1)]
        pods[3].kill(job.started[3])
        job.started[3].communicate(timeout=LATEST_S)
    assert [code for code, _ in ended] == [20, 20]
    assert ended[0][1] == ended[1][1]
    assert (
        "Preflight FAILED: a node or its environment is faulty; retry on other nodes (exit code 20)" in job.said[1]
    )
    assert loud(ended[0][1]) == [
        ("roll-call", "node 2 (job-node-0-2), node 3 (job-node-0-3), node 4 (job-node-0-4)", 2),
    ]
    listed = (tmp_path / "0" / "failing_nodes.txt").read_text()
    machines = dict(line.split("\t") for line in listed.splitlines())
    assert list(machines) == ["job-node-0-2", "job-node-0-3", "job-node-0-4"]
    assert set(machines.values()) == {"unknown"}, "no machine is quarantined for a pod that is missing"


def test_the_node_that_differs_is_named_and_a_secret_is_not_told(tmp_path: Path) -> None:
    for name, text in (("same", "print(1)"), ("other", "print(2)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    with hosts(*(f"job-node-0-{node}" for node in range(4))) as pods:
        job = Pods(pods, tmp_path, deadline_s=30)
        for node in range(4):
            env = {"NCCL_NET_TOKEN": "hush-1" if node == 1 else "hush-0"}
            env |= {"UCX_TLS": "tcp"} if node == 2 else {}
            job.start(node, str(tmp_path / ("other" if node == 3 else "same") / "train.py"), env=env)
        ended = [job.end(node) for node in range(4)]
    assert [code for code, _ in ended] == [30] * 4
    assert all(found == ended[0][1] for _, found in ended)
    named = [(one["text"].split(" differs")[0], one["status"], one["subject"]) for one in ended[0][1]]
    assert [whom for whom in named if whom[1] in ("warn", "fail")] == [
        ("UCX_TLS", "fail", "node 2 (job-node-0-2)"),
        ("the program's code", "warn", "node 3 (job-node-0-3)"),
        ("the command line", "warn", "node 3 (job-node-0-3)"),
        ("NCCL_NET_TOKEN", "warn", "node 1 (job-node-0-1)"),
    ]
    assert "hush" not in json.dumps(ended) + "".join(job.said.values())
    told = [[line for line in job.said[node].splitlines() if line[:1] != "["] for node in range(4)]
    assert told[0][0] == "Preflight FAILED: fix the job; a retry will not help (exit code 30)"
    assert told[0][2].startswith("  faulty: ")
    assert any(one["check"] == "pairs" and one["status"] == "pass" for one in ended[0][1])


def test_a_way_that_is_blocked_in_one_direction_is_named_as_a_link(tmp_path: Path) -> None:
    with hosts(*(f"job-node-0-{node}" for node in range(4))) as pods:
        route = ("route", "add", "blackhole", f"{pods[1].address}/32")
        subprocess.run((*pods[2].enter("net"), "ip", *route), check=True)
        job = Pods(pods, tmp_path, deadline_s=30)
        for node in range(4):
            job.start(node)
        ended = [job.end(node) for node in range(4)]
    assert [code for code, _ in ended] == [20] * 4
    assert [(check, subject) for check, subject, _ in loud(ended[3][1])] == [
        ("pairs", "node 1 (job-node-0-1) - node 2 (job-node-0-2)")
    ]
