"""A launcher that cannot open a file any more still ends its workers, and says what it lacks."""

from __future__ import annotations

import os
import resource
from itertools import count
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started, script

pytestmark = [pytest.mark.torch, pytest.mark.process]


def test_without_a_free_descriptor_a_failed_worker_ends_the_node_and_no_worker_is_left(tmp_path: Path) -> None:
    words = ("run", "--nproc-per-node", "2", "--max-restarts", "3", "--incident-dir", "none", "--")
    waits = script(tmp_path, "import time\ntime.sleep(600)\n")
    launcher = Started((*words, waits), None, tmp_path)
    try:
        (pids,) = launcher.read_until(r"started 2 workers \(pids (\d+, \d+)\)")
        workers = [psutil.Process(int(pid)) for pid in pids.split(", ")]
        used = {int(fd) for fd in os.listdir(f"/proc/{launcher.pid}/fd")}
        first_free = next(fd for fd in count() if fd not in used)
        hard = resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (first_free, hard))
        workers[0].kill()
        code, output = launcher.end()
    finally:
        launcher.close()
    assert (code, "Traceback" in output) == (138, False), output
    assert "Too many open files" in output.splitlines()[-2]
    assert not any(worker.is_running() for worker in workers)
