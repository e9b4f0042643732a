"""The diffs of examples/, which CONTRIBUTING.md links to, on a copy of this tree: all rules hold."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.architecture.package import ROOT
from tests.conftest import require

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build")
# This file, and what takes seconds and has nothing to do with plug-ins.
NOT_AGAIN = ("test_examples.py", "test_pid1.py", "test_tests.py")
EXAMPLES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests" / "architecture" / "examples").glob("*.diff"))
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree with all examples applied."""
    require(shutil.which("git"), "it needs git, which applies the diffs")
    copy = tmp_path_factory.mktemp("examples") / "a tree"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    for name, diff in EXAMPLES.items():
        argv = ("git", "apply", "-p1", "-")
        applied = subprocess.run(argv, input=diff, cwd=copy, env=env, text=True, capture_output=True, timeout=30)
        assert applied.returncode == 0, f"the example of {name}: {applied.stderr}"
    return copy


def run(copy: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Start Python in the copy, with only the copy's modules to be found."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRAINER_LAUNCH_"))
    }
    return subprocess.run(
        (sys.executable, *words),
        cwd=copy,
        env={**clean, "PYTHONPATH": str(copy), **env},
        text=True,
        capture_output=True,
        timeout=500,
    )


@pytest.mark.process
def test_the_new_contract_is_detected(extended: Path) -> None:
    pod = {"ACME_NODES": "4", "ACME_NODE": "3", "ACME_FIRST": "pod-0.acme:29500"}
    explained = json.loads(run(extended, "-m", "trainer_launch", "explain", "--json", "--", "a.sh", **pod).stdout)
    assert (explained["contract"], explained["plan"]["node_rank"]) == ("acme", 3)


@pytest.mark.process
def test_the_new_check_compares_all_nodes(extended: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pod = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    words = ("-m", "trainer_launch", "preflight", "--json", "--only", "own-host", "--", "true")
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda rank: run(extended, *words, **pod, PET_NODE_RANK=str(rank)), range(2)))
    for one in ended:
        found = json.loads(one.stdout)["findings"]
        told = [finding["text"] for finding in found if finding["check"] == "own-host"]
        assert [text.partition(" have ")[2] for text in told] == ["the same host name"], one.stdout + one.stderr


@pytest.mark.process
def test_the_new_engine_plans(extended: Path) -> None:
    words = ("explain", "--json", "--nproc-per-node", "2", "--", "julia", "train.jl")
    plan = json.loads(run(extended, "-m", "trainer_launch", *words).stdout)["plan"]
    assert plan["engine"] == "julia"
    assert plan["processes"][0]["argv"] == ["julia", "-p", "2", "train.jl"]
    assert json.loads(run(extended, "-m", "trainer_launch", *words[:2], "--engine", "julia", *words[2:]).stdout)


@pytest.mark.long(only="that a new contract, check or engine keeps all rules of the architecture")
@pytest.mark.process
@pytest.mark.timeout(600)
def test_all_rules_hold_and_the_examples_own_tests_pass(extended: Path) -> None:
    """All architecture tests on the copy, and those to which the examples add a row."""
    rows = (
        "tests/contracts/test_cases.py",
        "tests/preflight/cluster/test_own_host.py",
        "tests/planning/test_plain.py",
    )
    ignored = [f"--ignore=tests/architecture/{name}" for name in NOT_AGAIN]
    words = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *ignored, "tests/architecture", *rows)
    tested = run(extended, *words)
    assert tested.returncode == 0, tested.stdout[-4000:]
    style = run(extended, "-m", "ruff", "check", "--no-cache", "trainer_launch", "tests")
    assert style.returncode == 0, style.stdout
    form = run(extended, "-m", "ruff", "format", "--no-cache", "--check", "trainer_launch", "tests")
    assert form.returncode == 0, form.stdout
