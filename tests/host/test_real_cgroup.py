"""A cgroup of this machine with a limit: what the kernel enforces is what we plan with, and what we blame."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require
from tests.waiting import eventually

pytestmark = pytest.mark.process

ROOT = Path("/sys/fs/cgroup")


IS_V2 = (ROOT / "cgroup.controllers").exists()
MEMORY = ("memory", {"memory.max": str(64 << 20)} if IS_V2 else {"memory.limit_in_bytes": str(64 << 20)})


@contextlib.contextmanager
def limited(controller: str, limits: dict[str, str]) -> Iterator[str]:
    """A new group below our own with these limits; the words that run a command inside."""
    group = (ROOT if IS_V2 else ROOT / controller) / f"trainer-launch-test-{os.getpid()}-{threading.get_ident()}"
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as problem:
        with contextlib.suppress(OSError):
            group.rmdir()
        require(False, f"no cgroup with a limit of {controller} can be made here: {problem}")
    try:
        yield f'echo $$ > "{group}/cgroup.procs" && exec "$0" "$@"'
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), f"{group} is empty", within_s=20.0)
        group.rmdir()


def test_a_worker_that_the_kernel_kills_for_memory_is_named_with_limit_and_peak(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.touch()
    greedy = ("-c", "held = [bytearray(1 << 20) for _ in range(1 << 10)]")
    # Only the program may be chosen: the launcher itself would be a choice too in so small a group.
    program = ("sh", "-c", 'echo 1000 > /proc/self/oom_score_adj && exec "$0" "$@"', sys.executable, *greedy)
    with limited(*MEMORY) as enter:
        ended = subprocess.run(
            ("sh", "-c", enter, *LAUNCHER, "run", "--termination-log", str(words), "--", *program),
            env=clean_env(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 137, ended.stderr
    first, *rest = words.read_text().splitlines()
    assert first.startswith("reason=OutOfMemory")
    assert "because the container's memory was used up" in first
    assert any("the kernel killed 1 process of this container for memory, limit 64 MiB" in line for line in rest)
