"""A rehearsal that is killed, or whose pods are, leaves no process behind, nor a folder."""

from __future__ import annotations

import contextlib
import fcntl
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
import os, signal, subprocess, sys, time
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
daemon = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(daemon, env={}, start_new_session=True)
open(f"{sys.argv[1]}/{os.environ['HOSTNAME']}", "w").write(os.environ["TRAINER_LAUNCH_TERMINATION_LOG"])
while sum(name.startswith("local-node-") for name in os.listdir(sys.argv[1])) < 2:
    time.sleep(0.05)
print("both have begun", flush=True)
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


def started(tmp_path: Path, *flags: str, is_deaf: bool = False) -> tuple[subprocess.Popen[bytes], Path]:
    """A rehearsal of two pods that are at work, and its folder; TMPDIR is `tmp` in the test's folder.

    Deaf pods do not end at SIGTERM.
    """
    (tmp_path / "pod.py").write_text(POD)
    (tmp_path / "tmp").mkdir()
    words = ("rehearse", "--nodes", "2", "--engine", "plain", *flags, "--")
    argv = (*LAUNCHER, *words, sys.executable, "pod.py", str(tmp_path), *(["deaf"] if is_deaf else []))
    env = clean_env({"TMPDIR": str(tmp_path / "tmp")})
    rehearsal = subprocess.Popen(argv, cwd=tmp_path, env=env, start_new_session=True)
    notes = [tmp_path / f"local-node-0-{index}" for index in (0, 1)]
    eventually(lambda: all(note.exists() and note.read_text() for note in notes), "the pods begin")
    return rehearsal, Path(os.path.commonpath([note.read_text() for note in notes]))


def left_in(tmp_path: Path) -> list[str]:
    """What is left of launchers and pods in TMPDIR, without what was collected of incidents."""
    return sorted(name for name in os.listdir(tmp_path / "tmp") if name != "trainer-launch-incidents")


def test_a_pod_that_was_killed_leaves_no_folder_in_tmpdir(tmp_path: Path) -> None:
    rehearsal, _ = started(tmp_path, "--fault", "kill pod back=never at=line:begun")
    eventually(lambda: len(unlocked(tmp_path)) == 1, "the launcher of one pod is killed, and its folder is there")
    os.kill(rehearsal.pid, signal.SIGINT)
    assert rehearsal.wait(60) == 130
    assert left_in(tmp_path) == []


def test_the_second_ctrl_c_ends_pods_that_do_not_hear_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    rehearsal, folder = started(tmp_path, "--grace", "600", is_deaf=True)
    os.kill(rehearsal.pid, signal.SIGINT)
    eventually(lambda: not is_pending(rehearsal.pid), "the first one is taken: two at once would be one signal")
    os.kill(rehearsal.pid, signal.SIGINT)
    assert rehearsal.wait(60) == 130
    assert (processes_that_name(str(folder)), left_in(tmp_path)) == ([], [])


def is_pending(pid: int) -> bool:
    """Whether the process has still to take a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def unlocked(tmp_path: Path) -> list[Path]:
    """The locks of launchers that were killed."""
    locks = []
    for path in (tmp_path / "tmp").glob("trainer-launch-*/lock"):
        with path.open("rb") as file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locks.append(path)
    return locks


def test_sigkill_to_a_rehearsal_ends_its_pods(tmp_path: Path) -> None:
    rehearsal, folder = started(tmp_path)
    os.killpg(rehearsal.pid, signal.SIGKILL)
    rehearsal.wait(30)
    eventually(lambda: not processes_that_name(str(folder)), lambda: f"left: {processes_that_name(str(folder))}")
    eventually(lambda: not processes_that_name(str(tmp_path)), "no daemon without the environment is left")
