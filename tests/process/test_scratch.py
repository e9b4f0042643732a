"""A pod's /tmp may outlive its containers: what a killed PID 1 has left there goes, and nothing else."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch
from tests.process.world import PID1, require_namespaces
from tests.waiting import eventually
from trainer_launch.host import runtime_directory

pytestmark = pytest.mark.process


def runs(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if path.name.startswith("trainer-launch-")}


def started(place: Path, *wrap: str) -> subprocess.Popen[bytes]:
    argv = (*wrap, *LAUNCHER, "run", "--", "sleep", "600")
    return subprocess.Popen(argv, env=clean_env({"TMPDIR": str(place)}), stderr=subprocess.DEVNULL)


def test_a_killed_runs_folder_is_removed_by_the_next_pid_1_and_a_neighbours_stays(tmp_path: Path) -> None:
    require_namespaces()
    (tmp_path / "trainer-launch-by-somebody").mkdir()
    neighbour = started(tmp_path)
    try:
        eventually(lambda: len(runs(tmp_path)) == 2, "the neighbour's folder")
        before = runs(tmp_path)
        killed = started(tmp_path, *PID1)
        eventually(lambda: len(runs(tmp_path)) == 3, "its own folder")
        (pid_1,) = psutil.Process(killed.pid).children()
        pid_1.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(runs(tmp_path)) == 3, "it had no time to tidy up"
        launch("run", "--", "true", env={"TMPDIR": str(tmp_path)})
        assert len(runs(tmp_path)) == 3, "who is not PID 1 cannot know that all of the killed one is dead"
        launch("run", "--", "true", env={"TMPDIR": str(tmp_path)}, within=PID1)
        assert runs(tmp_path) == before
    finally:
        neighbour.terminate()
        neighbour.wait()
    assert runs(tmp_path) == {"trainer-launch-by-somebody"}


def test_only_folders_of_runs_are_looked_into(tmp_path: Path) -> None:
    for name in ("trainer-launch-ours", "data", "trainer-launch-no-lock"):
        (tmp_path / name).mkdir()
    for name in ("trainer-launch-ours", "data"):
        (tmp_path / name / "lock").touch()
    (tmp_path / "trainer-launch-link").symlink_to(tmp_path / "data")
    (tmp_path / "trainer-launch-lock-is-a-link").mkdir()
    (tmp_path / "trainer-launch-lock-is-a-link" / "lock").symlink_to(tmp_path / "data" / "lock")
    runtime_directory.forget_killed(str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["data", "trainer-launch-link", "trainer-launch-lock-is-a-link", "trainer-launch-no-lock"]
    assert (tmp_path / "data" / "lock").exists()
