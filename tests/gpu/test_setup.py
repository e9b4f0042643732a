"""Where nothing can be tested, one sentence says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.gpu.conftest import ROOT

SCRIPT = ROOT / "tests" / "setup" / "gpu.sh"
FAKE = """#!/bin/sh
case "$*" in
"-") {state} ;;
"- "*) {missing} ;;
*) echo "started: $*"; exit 0 ;;
esac
"""


def run(folder: Path, state: str, missing: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a Python that gives these answers."""
    python = folder / "python"
    python.write_text(FAKE.format(state=state, missing=missing))
    python.chmod(0o755)
    given = {**os.environ, "PYTHON": str(python), "GPU_RESULT": str(folder / "out" / "result.xml"), **env}
    return subprocess.run((SCRIPT, "test", "-k", "pair"), env=given, capture_output=True, text=True, timeout=60)


def test_without_a_gpu_the_run_fails_in_one_sentence(tmp_path: Path) -> None:
    ended = run(tmp_path, "echo has torch 2.11.0, which sees no NVIDIA GPU", "exit 1")
    assert ended.returncode == 3
    assert (
        ended.stderr == f"gpu: nothing was tested: {tmp_path}/python has torch 2.11.0, which sees no NVIDIA GPU\n"
    )
    assert ended.stdout == ""


def test_a_missing_module_is_named_with_how_to_bring_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "true", "echo a_module_that_no_wheel_has")
    assert ended.returncode != 0
    assert ended.stderr.startswith("gpu: nothing was tested: ")
    assert "has no a_module_that_no_wheel_has; run 'make gpu-wheels' with network" in ended.stderr


def test_chosen_scenarios_are_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "true", "true")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("started: -m pytest ")
    assert ended.stdout.endswith(" tests/gpu -k pair\n")
