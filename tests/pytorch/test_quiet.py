"""Beside workers that run, nothing of the launcher's wakes up, and there are only three processes."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.torch]
SCRIPT = """
import os, pathlib, signal
pathlib.Path("began.new").write_text(str(os.getpid()))
os.rename("began.new", "began")
signal.pause()
"""


def test_beside_a_worker_three_processes_wait_without_a_wake_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = Started(("run", "--nproc-per-node", "1", "--", "train.py"), None, tmp_path)
    try:
        eventually((tmp_path / "began").exists, "the worker's start", 60)
        top = psutil.Process(launcher.pid)
        worker = int((tmp_path / "began").read_text())
        beside = [one for one in (top, *top.children()) if one.pid != worker]
        assert len(beside) == 3
        eventually(lambda: is_quiet_for(beside, 1.5), "one and a half seconds without a wake-up", 30)
    finally:
        launcher.close()


def is_quiet_for(processes: list[psutil.Process], seconds: float) -> bool:
    before, until_s = switches(processes), time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= until_s, "the window", seconds + 5)
    return switches(processes) == before


def switches(processes: list[psutil.Process]) -> list[str]:
    texts = [path.read_text() for one in processes for path in Path(f"/proc/{one.pid}/task").glob("*/status")]
    return [line for text in texts for line in text.splitlines() if line.startswith("voluntary")]
