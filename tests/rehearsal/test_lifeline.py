"""A rehearsal that is killed by SIGKILL leaves no pod behind, nor its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.waiting import eventually

pytestmark = pytest.mark.process
POD = """
import os, subprocess, sys, time
daemon = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(daemon, env={}, start_new_session=True)
open(f"{sys.argv[1]}/{os.environ['HOSTNAME']}", "w").write(os.environ["TRAINER_LAUNCH_TERMINATION_LOG"])
time.sleep(600)
"""


def processes_that_name(text: str) -> list[str]:
    """The command lines and environments in which the text stands, ours left out."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and int(entry.name) != os.getpid() and text.encode() in told:
            found.append(told.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A rehearsal of two pods that are at work, and its folder."""
    (tmp_path / "pod.py").write_text(POD)
    words = ("rehearse", "--nodes", "2", "--engine", "plain", "--", sys.executable, "pod.py", str(tmp_path))
    rehearsal = subprocess.Popen((*LAUNCHER, *words), cwd=tmp_path, env=clean_env(), start_new_session=True)
    notes = [tmp_path / f"local-node-0-{index}" for index in (0, 1)]
    eventually(lambda: all(note.exists() and note.read_text() for note in notes), "the pods begin")
    return rehearsal, Path(os.path.commonpath([note.read_text() for note in notes]))


def test_sigkill_to_a_rehearsal_ends_its_pods_and_removes_its_folder(tmp_path: Path) -> None:
    rehearsal, folder = started(tmp_path)
    os.killpg(rehearsal.pid, signal.SIGKILL)
    rehearsal.wait(30)
    eventually(lambda: not processes_that_name(str(folder)), lambda: f"left: {processes_that_name(str(folder))}")
    eventually(lambda: not folder.exists(), f"{folder} is gone")
    eventually(lambda: not processes_that_name(str(tmp_path)), "no daemon without the environment is left")


def test_a_rehearsal_that_ends_by_itself_leaves_nobody_who_waits(tmp_path: Path) -> None:
    rehearsal, folder = started(tmp_path)
    os.kill(rehearsal.pid, signal.SIGTERM)
    assert rehearsal.wait(60) == 143
    eventually(lambda: not processes_that_name(str(folder)), lambda: f"left: {processes_that_name(str(folder))}")
