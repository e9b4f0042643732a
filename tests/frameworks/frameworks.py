"""Real frameworks for tests, each in a virtual environment of its own, made once by tests/setup/frameworks.sh.

Tests of them are marked `frameworks`, and left out unless that is asked for: `make test-frameworks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.cli.launching import clean_env
from tests.setting_up import made

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docker" / "examples"
MAKING_S = 900  # on a slow machine or line; a test that asks for one needs such a timeout


def python(name: str) -> str:
    """The Python that has this framework; skips the test where it can neither be found nor installed."""
    return made("frameworks.sh", name, within_s=MAKING_S)


def launcher(name: str) -> tuple[str, ...]:
    """`trainer-launch` of this tree by that Python, which is then the pods' `python` as well."""
    return (python(name), "-m", "trainer_launch")


def env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for `launcher`: this tree's package, no GPU, and whole lines at once."""
    ours = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return clean_env({**ours, **(extra or {})})
