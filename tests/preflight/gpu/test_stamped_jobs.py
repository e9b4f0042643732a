"""Whole preflights on machines with a stamp: what is spared, and that the nodes of a job need not agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import clean_env
from tests.pods import hosts
from tests.preflight.gpu import machine, node
from tests.preflight.gpu.machine import Change
from tests.schemas.validator import violations

pytestmark = pytest.mark.process

LATEST_S = 110.0
GPUS = 2
POLICY = "cpu=off,shm=off,memory=off"
WORDS = ("--skip-if-passed-within", "6h", "--policy", POLICY)
PROGRAM = (sys.executable, str(Path(node.__file__)), "preflight")


def healthy(told: dict[str, Any]) -> None:
    """Change nothing."""


def cannot_bear_load(told: dict[str, Any]) -> None:
    told["bench"].update(fails=["device", "RuntimeError: CUDA error"])


def seen_from(folder: Path, change: Change) -> dict[str, str]:
    """The variables of a pod on this machine; what lies in `folder`/stamps survives the pod."""
    (folder / "stamps").mkdir(exist_ok=True, parents=True, mode=0o755)
    env = machine.environment(folder, change, GPUS)
    own = {name: env[name] for name in ("FAKE_NVML", "PYTHONPATH")}
    return own | {"FAKE_GPUS": str(GPUS), "FAKE_HOST_PATH": str(folder / "stamps")}


def alone(folder: Path, change: Change, *words: str) -> tuple[int, dict[str, str]]:
    """A job of one node: exit code, and the statuses of its checks."""
    env = seen_from(folder, change) | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(GPUS), "PET_NODE_RANK": "0"}
    argv = (*PROGRAM, "--json", *(words or WORDS))
    ended = subprocess.run(argv, env=clean_env(env), capture_output=True, timeout=LATEST_S, check=False)
    report = json.loads(ended.stdout)
    assert violations("preflight", report) == []
    return ended.returncode, {one["check"]: one["status"] for one in report["findings"]}


def test_a_machine_that_passed_is_spared_the_load_and_nothing_else(tmp_path: Path) -> None:
    code, first = alone(tmp_path, healthy)
    assert (code, first["gpu-load"], first["gpu-ecc"]) == (0, "pass", "pass")
    code, again = alone(tmp_path, cannot_bear_load)
    assert (code, again["gpu-load"], again["gpu-clocks"]) == (0, "skipped", "skipped")
    assert (again["gpu-ecc"], again["pids"]) == ("pass", "pass"), "what takes no load runs each time"


def test_the_nodes_of_a_job_need_not_agree_on_it(tmp_path: Path) -> None:
    """Node 0's machine has passed before, node 1's has not: its cards are measured, and both meet as ever."""
    names = [f"job-node-0-{number}" for number in range(2)]
    job = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(GPUS),
        "PET_MASTER_ADDR": names[0],
        "PET_MASTER_PORT": "29400",
    }
    words = (*WORDS[:2], "--policy", f"{POLICY},pairs=off", "--wait-timeout", "60")
    assert alone(tmp_path / "0", healthy, *words)[0] == 0
    with hosts(*names) as made:
        started = []
        for rank, host in enumerate(made):
            env = seen_from(tmp_path / str(rank), cannot_bear_load if rank == 0 else healthy)
            report = ("--report", str(tmp_path / f"{rank}.json"))
            started.append(host.start((*PROGRAM, *words, *report), {**job, **env, "PET_NODE_RANK": str(rank)}))
        said = [one.communicate(timeout=LATEST_S)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    reports = [json.loads((tmp_path / f"{rank}.json").read_text())["findings"] for rank in range(2)]
    loads = [[one["status"] for one in report if one["check"] == "gpu-load"] for report in reports]
    assert loads == [["skipped"], ["pass"]]
    for report in reports:
        told = {one["check"]: one["status"] for one in report}
        assert (told["roll-call"], told["facts"], told["clock"], told["gemm"]) == ("pass",) * 4, said
