"""Without root the pods are plain processes on loopback: what makes sense there is still tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import require
from tests.survival.jobs import LONG, MARKS

pytestmark = [*MARKS, LONG]
FAULTS = (
    "worker-of-node-1-killed",
    "store-killed",
    "pod-1-killed",
    "pod-0-killed",
    "pod-1-asked-to-stop",
)


def test_the_survival_tests_run_without_root() -> None:
    """In a user namespace we are nobody, and yet may read what this process may."""
    can = (
        shutil.which("unshare")
        and subprocess.run(("unshare", "--user", "true"), capture_output=True).returncode == 0
    )
    require(can, "needs user namespaces")
    chosen = " or ".join(f"fixed-{fault}" for fault in FAULTS)
    tests = Path(__file__).with_name("test_survival.py")
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", chosen)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(("unshare", "--user", *words), env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(FAULTS)} passed" in done.stdout, done.stdout
