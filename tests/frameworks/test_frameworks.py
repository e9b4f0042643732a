"""The environments with real frameworks: they can be made, and run the package of this tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.setting_up import SETUP

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S)]

NAMES = sorted(path.stem for path in (SETUP / "frameworks").glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_a_frameworks_python_runs_the_launcher_of_this_tree(name: str) -> None:
    where = "import sys, trainer_launch, yaml; print(trainer_launch.__file__, sys.prefix)"
    told = subprocess.run(
        [frameworks.python(name), "-c", where], env=frameworks.env(), capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith(str(frameworks.ROOT / "trainer_launch"))
    assert sys.prefix not in told, "an environment of its own"
    version = subprocess.run([*frameworks.launcher(name), "--version"], env=frameworks.env(), capture_output=True)
    assert version.returncode == 0, version.stderr


def test_what_cannot_be_installed_ends_with_3_and_a_sentence(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "a cache"), "PIP_ARGS": "--no-index --find-links /nowhere"}
    env = {**os.environ, **cache, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    ended = subprocess.run([SETUP / "frameworks.sh", NAMES[0]], env=env, capture_output=True, text=True)
    assert ended.returncode == 3
    assert f"pip cannot install {NAMES[0]}" in ended.stderr.splitlines()[-1]
    assert ended.stdout == ""


def test_a_framework_that_nobody_described_is_refused() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run([SETUP / "frameworks.sh", "no-such"], env=env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there is no" in ended.stderr
