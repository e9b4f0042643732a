"""The environments with real frameworks: they can be made, and run the package of this tree."""

from __future__ import annotations

import subprocess
import sys

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
