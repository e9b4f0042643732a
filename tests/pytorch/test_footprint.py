"""What a launcher takes beside its workers: three processes, no wake-ups, descriptors of which it may lack."""

from __future__ import annotations

import os
import resource
import time
from itertools import count
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import script, start
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
    with start("run", "--nproc-per-node", "1", "--", "train.py", cwd=tmp_path) as launcher:
        eventually((tmp_path / "began").exists, "the worker's start")
        top = psutil.Process(launcher.pid)
        worker = int((tmp_path / "began").read_text())
        beside = [one for one in (top, *top.children()) if one.pid != worker]
        assert len(beside) == 3
        eventually(lambda: is_quiet_for(beside, 1.5), "one and a half seconds without a wake-up")


def is_quiet_for(processes: list[psutil.Process], seconds: float) -> bool:
    before, until_s = switches(processes), time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= until_s, "the window", seconds + 5)
    return switches(processes) == before


def switches(processes: list[psutil.Process]) -> list[str]:
    texts = [path.read_text() for one in processes for path in Path(f"/proc/{one.pid}/task").glob("*/status")]
    return [line for text in texts for line in text.splitlines() if line.startswith("voluntary")]


def test_without_a_free_descriptor_a_failed_worker_ends_the_node_and_no_worker_is_left(tmp_path: Path) -> None:
    words = ("run", "--nproc-per-node", "2", "--max-restarts", "3", "--incident-dir", "none", "--")
    waits = script(tmp_path, "import time\ntime.sleep(600)\n")
    with start(*words, waits, cwd=tmp_path) as launcher:
        (pids,) = launcher.read_until(r"started 2 workers \(pids (\d+, \d+)\)")
        workers = [psutil.Process(int(pid)) for pid in pids.split(", ")]
        used = {int(fd) for fd in os.listdir(f"/proc/{launcher.pid}/fd")}
        first_free = next(fd for fd in count() if fd not in used)
        hard = resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (first_free, hard))
        workers[0].kill()
        output = launcher.ends_with(138)
    assert "Traceback" not in output
    assert "Too many open files" in output.splitlines()[-2]
    assert not any(worker.is_running() for worker in workers)
