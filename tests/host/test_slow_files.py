"""Files whose server is gone, as the loop of PID 1 meets them."""

from __future__ import annotations

import threading
import time

import pytest

from trainer_launch.host import slow_files
from trainer_launch.host.slow_files import mount_of, within


@pytest.fixture
def gone(monkeypatch):
    """A call that hangs until the test is over; nothing under /gone answers."""
    event = threading.Event()
    monkeypatch.setattr(slow_files, "mount_of", lambda path: ("/gone" if path.startswith("/gone") else "/", "nfs4"))
    monkeypatch.setattr(slow_files, "_mounts", {})
    yield event.wait
    event.set()
    for thread in list(slow_files._waiting):
        thread.join()


def test_a_call_that_hangs_ends_with_the_default(gone):
    assert within("/gone/x", "default", gone, wait_s=0.05) == "default"


def test_while_a_call_hangs_its_mount_is_left_alone_and_no_other_one(gone):
    within("/gone/x", None, gone, wait_s=0.05)
    begun_s = time.monotonic()
    assert [within("/gone/y", -1, len, "four", wait_s=9.0) for _ in range(100)] == [-1] * 100
    assert time.monotonic() - begun_s < 5.0
    assert within("/tmp/x", 0, len, "four") == 4
    assert threading.active_count() < 20


def test_a_mount_that_answers_again_is_used_again(monkeypatch):
    event = threading.Event()
    monkeypatch.setattr(slow_files, "mount_of", lambda path: ("/back", "fuse.gcsfuse"))
    within("/back/x", None, event.wait, wait_s=0.05)
    event.set()
    for thread in list(slow_files._waiting):
        thread.join()
    assert within("/back/x", 0, len, "four") == 4


def test_the_mount_is_read_from_the_path_alone():
    assert mount_of("/proc/1/status") == ("/proc", "proc")
    assert mount_of("/procrastinated") == mount_of("/")


def test_a_symbolic_link_is_on_the_mount_that_it_leads_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "far").symlink_to("/proc/self")
    (tmp_path / "folder" / "near").symlink_to("../far/status")
    (tmp_path / "loop").symlink_to("loop")
    assert mount_of(f"{tmp_path}/folder/near") == ("/proc", "proc")
    assert mount_of(f"{tmp_path}/far/../../not/there") == ("/", mount_of("/")[1])
    assert mount_of(f"{tmp_path}/loop/x") == mount_of(f"{tmp_path}/x")


def test_a_relative_path_in_a_removed_folder_is_an_ordinary_failure(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        within("relative", None, open, "relative")
