"""Real frameworks for tests, each in a virtual environment of its own, made once by tests/setup/frameworks.sh.

Tests of them are marked `frameworks`, and left out unless that is asked for: `make test-frameworks`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.launching import clean_env
from tests.conftest import require

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docker" / "examples"
SCRIPT = ROOT / "tests" / "setup" / "frameworks.sh"
MAKING_S = 900  # on a slow machine or line; a test that asks for one needs such a timeout
_CANNOT_BE_MADE = 3


@functools.cache
def python(name: str) -> str:
    """The Python that has this framework; skips the test where it can neither be found nor installed."""
    made = subprocess.run(
        [SCRIPT, name], env=dict(os.environ, PYTHON=sys.executable), capture_output=True, text=True
    )
    if made.returncode != 0:
        if made.returncode != _CANNOT_BE_MADE:
            pytest.fail(f"{name} could not be installed:\n{made.stderr}")
        require(False, made.stderr.strip().splitlines()[-1])
    return made.stdout.strip()


def launcher(name: str) -> tuple[str, ...]:
    """`trainer-launch` of this tree by that Python, which is then the pods' `python` as well."""
    return (python(name), "-m", "trainer_launch")


def env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for `launcher`: this tree's package, no GPU, and whole lines at once."""
    ours = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return clean_env({**ours, **(extra or {})})
