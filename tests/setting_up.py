"""What scripts of tests/setup make, once: environments, builds and images that tests need."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import require

SETUP = Path(__file__).with_name("setup")
_CANNOT_BE_MADE = 3


def made(script: str, *words: str, within_s: float) -> str:
    """What the script says that it has made; skips the test where that cannot be made, in CI it fails."""
    ended = _ended(script, *words, within_s=within_s)
    require(ended.returncode != _CANNOT_BE_MADE, ended.stderr.strip().rpartition("\n")[2])
    assert ended.returncode == 0, f"{script} {' '.join(words)} failed:\n{ended.stderr}"
    return ended.stdout.strip()


@functools.cache
def _ended(script: str, *words: str, within_s: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable}
    argv = [str(SETUP / script), *words]
    return subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s, check=False
    )
