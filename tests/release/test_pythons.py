"""The other Pythons that are supported: `make test-pythons` has them, and says which this machine has not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "setup" / "pythons.sh"
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


def asked(tmp_path: Path, *versions: str, **env: str) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the sentences."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a cache"), "TORCH": "", **env}
    ended = subprocess.run([SCRIPT, *versions], env=given, capture_output=True, text=True, timeout=400)
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_oldest_and_the_newest_that_are_supported_are_among_them() -> None:
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    [tested] = re.findall(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {supported[0], supported[-1]} <= set(tested.split()) <= set(supported)


@pytest.mark.process
def test_one_that_is_not_here_is_named_and_left_out(tmp_path: Path) -> None:
    code, printed, said = asked(tmp_path, "3.0")
    assert (code, printed) == (3, "")
    assert said == ["pythons: 3.0 is left out: there is no python3.0 with venv and ensurepip here"]


@pytest.mark.process
@pytest.mark.timeout(450)
def test_one_that_pyenv_has_is_found_behind_its_shim_and_pips_reason_is_told(tmp_path: Path) -> None:
    shims, prefix = tmp_path / "the shims", tmp_path / "versions"
    shims.mkdir()
    (prefix / "bin").mkdir(parents=True)
    program(shims / f"python{OURS}", "echo 'pyenv: command not found' >&2; exit 127")
    program(shims / "pyenv", f'case $1 in latest) echo {OURS}.99;; prefix) echo "{prefix}";; esac')
    program(prefix / "bin" / f"python{OURS}", f'exec "{sys.executable}" "$@"')
    pip = {"PIP_ARGS": "--no-index", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    code, printed, said = asked(tmp_path, OURS, PATH=f"{shims}:{os.environ['PATH']}", **pip)
    assert (code, printed) == (3, "")
    assert said[0].startswith(f"pythons: installing into {tmp_path}/a cache/trainer-launch-pythons/{OURS}-"), said
    assert said[-1].startswith(f"pythons: {OURS} is left out: pip cannot install what tests need"), said
