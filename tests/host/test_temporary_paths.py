"""Paths of the folder for temporary files that are too long for sockets."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path

import pytest

from trainer_launch.host import socket_folders


@pytest.mark.parametrize("more", [0, 1])
def test_the_longest_path_that_is_allowed_has_room_for_torchs_socket(more: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, socket.socket(socket.AF_UNIX) as listener:
        folder = f"{place}/{'x' * (socket_folders.MOST_BYTES + more - len(place) - 1)}"
        path = f"{folder}/torch-shm-dir-123456/manager.sock"
        Path(path).parent.mkdir(parents=True)
        with pytest.raises(OSError, match="path too long") if more else contextlib.nullcontext():
            listener.bind(path)
    assert (socket_folders.too_long({"TMPDIR": folder}) is None) is not bool(more)


@pytest.mark.parametrize("env", [{}, {"TMPDIR": ""}, {"TMPDIR": "/tmp", "TEMP": "x" * 200}], ids=str)
def test_a_short_path_is_nothing_to_speak_of(env: dict[str, str]) -> None:
    assert socket_folders.too_long(env) is None


@pytest.mark.parametrize("name", socket_folders.VARIABLES)
def test_the_variable_is_named(name: str) -> None:
    assert str(socket_folders.too_long({name: "x" * 80})).startswith(f"{name} is a path of 80 bytes")
