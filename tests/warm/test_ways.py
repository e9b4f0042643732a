"""Which way workers start when the first one fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import require

pytestmark = pytest.mark.torch


def test_workers_start_the_ordinary_way_when_there_is_no_room_for_what_forking_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /dev/shm cannot be written, no semaphore can be made."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    from trainer_launch.child import warm
    from trainer_launch.child.server import Server

    started = []

    def launch(_config: object, command: object) -> object:
        if command != "train.py":
            raise OSError(30, "Read-only file system")
        return lambda *words: started.append(words)

    monkeypatch.setenv("TRAINER_LAUNCH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "elastic_launch", launch)
    config = SimpleNamespace(logs_specs=None, start_method=None)
    settings: dict[str, Any] = {"script": None, "preload": [], "required": False}
    warm.Forked(config, "train.py", ["x"], Server(settings, str(tmp_path))).launch()
    assert started == [("x",)]
