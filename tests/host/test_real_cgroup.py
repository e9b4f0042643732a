"""A cgroup of this machine with a quota: what the kernel enforces is what explain plans with."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require

pytestmark = pytest.mark.process

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """A new group below our own, allowed half a CPU."""
    is_v2 = (ROOT / "cgroup.controllers").exists()
    group = (ROOT if is_v2 else ROOT / "cpu") / f"trainer-launch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("cpu.max" if is_v2 else "cpu.cfs_quota_us")).write_text("50000 100000" if is_v2 else "50000")
    except OSError as problem:
        with contextlib.suppress(OSError):
            group.rmdir()
        require(False, f"no cgroup with a CPU quota can be made here: {problem}")
    try:
        yield group
    finally:
        group.rmdir()


def test_auto_starts_no_more_workers_than_the_quota_allows() -> None:
    with limited() as group:
        enter = f'echo $$ > "{group}/cgroup.procs" && exec "$0" "$@"'
        told = subprocess.run(
            ("sh", "-c", enter, *LAUNCHER, "explain", "--json", "--nproc-per-node", "auto"),
            env=clean_env({"CUDA_VISIBLE_DEVICES": ""}),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    explained = json.loads(told)
    assert explained["facts"]["machine"]["cpus"]["quota"] == 0.5
    assert explained["plan"]["nproc_per_node"] == 1
    assert "cgroup quota 0.5" in explained["plan"]["because"]["nproc_per_node"]
