"""Preflights of whole jobs whose GPUs are played: real processes, and every node names the node and the card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import clean_env
from tests.pods import Host, hosts
from tests.preflight.gpu import machine, node
from tests.preflight.gpu.machine import Change
from tests.schemas.validator import violations

pytestmark = pytest.mark.process

LATEST_S = 110.0
GPUS = 2


def preflight(host: Host, rank: int, nodes: int, home: str, folder: Path, change: Change) -> subprocess.Popen[str]:
    folder.mkdir()
    env = machine.environment(folder, change, GPUS)
    told = {
        "FAKE_NVML": env["FAKE_NVML"],
        "FAKE_GPUS": str(GPUS),
        "PYTHONPATH": env["PYTHONPATH"],
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(GPUS),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": home,
        "PET_MASTER_PORT": "29400",
    }
    policy = "cpu=off,shm=off,memory=off,pairs=off"
    words = ("--wait-timeout", "60", "--report", str(folder / "report.json"), "--policy", policy)
    return host.start((sys.executable, str(Path(node.__file__)), "preflight", *words), told)


def alone(folder: Path, change: Change, *words: str) -> tuple[int, dict[str, Any]]:
    """A job of one node with four cards: exit code and report."""
    env = machine.environment(folder, change)
    told = {name: env[name] for name in ("FAKE_NVML", "PYTHONPATH")} | {"FAKE_GPUS": str(machine.GPUS)}
    policy = ("--policy", "cpu=off,shm=off,memory=off")
    argv = (sys.executable, str(Path(node.__file__)), "preflight", "--json", *policy, *words)
    job = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(machine.GPUS), "PET_NODE_RANK": "0"}
    ended = subprocess.run(
        argv,
        env=clean_env({**told, **job}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LATEST_S,
        check=False,
    )
    report: dict[str, Any] = json.loads(ended.stdout)
    assert violations("preflight", report) == []
    return ended.returncode, report


def test_a_single_node_is_judged_by_itself(tmp_path: Path) -> None:
    def bad(told: dict[str, Any]) -> None:
        told["gpus"][1]["bench"].update(gemm=400.0)

    code, report = alone(tmp_path, bad)
    told = {one["check"]: one["text"] for one in report["findings"] if one["status"] == "fail"}
    assert code == 20
    assert set(told) == {"gemm"}
    assert "GPU 1 delivers 400 TFLOP/s" in told["gemm"]


def test_a_card_that_is_slow_only_when_it_is_hot_is_found_by_a_sustained_load(tmp_path: Path) -> None:
    code, report = alone(tmp_path, lambda told: told["gpus"][1]["bench"].update(burn=400.0), "--gpu-burn", "2s")
    (bad,) = [one for one in report["findings"] if one["status"] in ("warn", "fail")]
    assert (code, bad["check"], bad["remedy"]) == (20, "gemm", "DRAIN")
    assert "GPU 1 delivers 400 TFLOP/s (gemm-burn, NVIDIA H200)" in bad["text"]


def test_without_the_load_nothing_is_loaded(tmp_path: Path) -> None:
    _, report = alone(
        tmp_path, lambda told: told["bench"].update(fails=["device", "never run"]), "--level", "quick"
    )
    found = {one["check"] for one in report["findings"]}
    assert "gpu-ecc" in found
    assert not found & {"gpu-load", "gemm", "gpu-xid"}


def loud(folder: Path) -> list[tuple[str, str, str]]:
    findings: list[Mapping[str, Any]] = json.loads((folder / "report.json").read_text())["findings"]
    told = [(one["check"], one["status"], one["subject"]) for one in findings]
    return sorted(one for one in told if one[1] in ("warn", "fail"))


def test_every_node_names_the_nodes_and_the_cards_that_are_bad(tmp_path: Path) -> None:
    changes: list[Change] = [
        lambda told: told["bench"].update(nccl="2.27.7"),
        lambda told: told["gpus"][1]["bench"].update(gemm=400.0),
        lambda told: told["gpus"][1].update(xids=[79]),
        lambda told: None,
    ]
    names = [f"job-node-0-{number}" for number in range(4)]
    with hosts(*names) as made:
        started = [
            preflight(host, rank, 4, names[0], tmp_path / str(rank), changes[rank])
            for rank, host in enumerate(made)
        ]
        said = [one.communicate(timeout=LATEST_S)[0] for one in started]
    first, slow, wrong = (f"node {number} (job-node-0-{number})" for number in range(3))
    of_all = [
        ("facts", "fail", first),
        ("gemm", "fail", f"{slow}, GPU 1"),
    ]
    for rank in range(4):
        assert loud(tmp_path / str(rank)) == [*of_all, ("gpu-xid", "fail", wrong)], said
    assert [one.returncode for one in started] == [30] * 4  # another NCCL is the job's own fault
    report = (tmp_path / "3" / "report.json").read_text()
    assert "on node 2 (job-node-0-2): GPU 1 had XID 79 (it has fallen off its bus) during our tests" in report
    assert "the NCCL that is really loaded differs: 2.28.9 on 3 nodes, 2.27.7 on node 0" in report
    failing = (tmp_path / "0" / "failing_nodes.txt").read_text().splitlines()
    assert [line.partition("\t")[0] for line in failing] == ["job-node-0-2", "job-node-0-1"]


def test_what_one_job_measured_is_the_reference_of_the_next(tmp_path: Path) -> None:
    own = tmp_path / "own.json"

    def slower(told: dict[str, Any]) -> None:
        told["bench"]["gemm"] *= 0.6

    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    code, healthy = alone(tmp_path / "first", lambda told: None, "--report", str(own))
    statuses = {one["check"]: one["status"] for one in healthy["findings"]}
    assert (code, {"warn", "fail"} & set(statuses.values())) == (0, set())
    assert {"gemm", "hbm", "pcie", "gpu-load"} <= set(statuses)
    rows = {row["measure"]: row for row in json.loads(own.read_text())["measured"]}
    assert rows["gemm"]["source"].startswith(f"median of {machine.GPUS} by trainer-launch preflight, 20")
    code, report = alone(tmp_path / "second", slower, "--reference", str(own))
    (told,) = [one for one in report["findings"] if one["check"] == "gemm"]
    assert (code, told["status"], told["scope"], told["basis"]) == (0, "warn", "job", "absolute")
    assert "60% of the reference" in told["text"]
