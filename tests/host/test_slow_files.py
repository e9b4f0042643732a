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
    yield event.wait
    event.set()
    for thread in list(slow_files._waiting):
        thread.join()


def test_a_call_that_answers_is_an_ordinary_call():
    assert within("/tmp/x", 0, len, "four") == 4
    with pytest.raises(FileNotFoundError):
        within("/nowhere/x", None, open, "/nowhere/x")


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


def test_a_local_file_system_needs_no_thread(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    assert within("/proc/self/status", 0, len, "four") == 4
