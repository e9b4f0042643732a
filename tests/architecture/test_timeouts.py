"""A test that hangs fails alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE = """
import contextlib, os, subprocess, threading, time
import pytest
from trainer_launch.supervisor.system import System

@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()
        open("killed", "w").write(str(process.pid))

def test_it_sleeps(child):
    time.sleep(600)

def test_it_waits_for_a_process(child):
    child.wait()

def test_it_waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_it_reads():
    os.read(os.pipe()[0], 1)

def test_it_computes():
    while True:
        pass

def test_it_supervises():
    with contextlib.closing(System(color=False)) as system:
        while True:
            system.wait(None)

def test_the_next_one_passes():
    pass
"""


def test_a_test_that_hangs_fails_alone_and_its_fixtures_end(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("from tests.timeouts import pytest_timeout_set_timer\n")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "--timeout",
        "0.5",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"6 failed, 1 passed", ended.stdout), ended.stdout
    assert ended.stdout.count("the test hung") >= 6
    assert "test_it_reads" in ended.stdout
    assert (tmp_path / "killed").exists()
