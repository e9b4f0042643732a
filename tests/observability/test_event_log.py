"""The event log: in order, whole, and felt by nobody."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from trainer_launch.host import runtime_directory
from trainer_launch.observability.event_log import EventLog, File


def names(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_what_was_left_in_the_folder_comes_before_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    file = File(str(path))
    events = EventLog(file.write, 0, str(tmp_path))
    runtime_directory.tell(str(tmp_path), "worker_failed")
    for name in ("started", "spawned", "exited"):
        events.add((name, {}))
    events.close(10.0, ("finished", {}))
    file.close()
    assert names(path) == ["started", "spawned", "exited", "worker_failed", "finished"]


def test_a_run_adds_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for name in ("started", "finished"):
        file = File(str(path))
        file.write(json.dumps({"event": name}).encode() + b"\n")
        file.close()
    assert names(path) == ["started", "finished"]


def test_a_fifo_whose_reader_hangs_or_goes_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = File(str(path))
    for _ in range(50):
        file.write(b"x" * 4095 + b"\n")
    os.close(reader)
    file.write(b"x\n")
    file.close()


def test_a_writer_that_hangs_is_left_behind(tmp_path: Path) -> None:
    hang = threading.Event()

    def write(line: bytes) -> None:
        hang.wait(30)

    events = EventLog(write, 0, str(tmp_path))
    started_s = time.monotonic()
    for _ in range(1000):
        events.add(("started", {}))
    events.close(0.2, ("finished", {}))
    assert time.monotonic() - started_s < 10
    hang.set()
    events.close(10.0)
