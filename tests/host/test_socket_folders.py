"""Folders for temporary files: those that killed workers leave, and paths that are too long for sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_launch.host import shm


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def folder_in(place: Path, name: str = "pymp-x7k2p_9q", *, listens: bool = False) -> tuple[Path, socket.socket]:
    """A folder with a socket."""
    folder = place / name
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "listener-abc"))
    listener.listen()
    if not listens:
        listener.close()
    return folder, listener


@pytest.mark.parametrize("name", ["pymp-x7k2p_9q", "torch-shm-dir-aB3_xY"])
def test_what_a_killed_process_has_left_goes(name: str, tmp_path: Path) -> None:
    folder, _ = folder_in(tmp_path, name)
    assert shm.sweep_sockets(str(tmp_path)) == 1
    assert not folder.exists()


def test_the_folder_of_a_process_that_listens_stays(tmp_path: Path) -> None:
    folder, listener = folder_in(tmp_path, listens=True)
    with listener:
        assert shm.sweep_sockets(str(tmp_path)) == 0
        assert folder.exists()
        listener.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            listener.accept()  # nor is it disturbed


def test_a_folder_that_proves_nothing_stays(tmp_path: Path) -> None:
    """Without a socket, with a file beside it, of another name, or a link."""
    (tmp_path / "pymp-00000000").mkdir()
    beside, _ = folder_in(tmp_path, "pymp-11111111")
    (beside / "data").write_text("kept")
    folder_in(tmp_path, "my-sockets")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder_in(elsewhere)
    os.symlink(elsewhere / "pymp-x7k2p_9q", tmp_path / "pymp-22222222")
    assert shm.sweep_sockets(str(tmp_path)) == 0
    assert (beside / "data").read_text() == "kept"
    assert len(list(elsewhere.iterdir())) == 1


@pytest.mark.parametrize("more", [0, 1])
def test_the_longest_path_that_is_allowed_has_room_for_torchs_socket(more: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, socket.socket(socket.AF_UNIX) as listener:
        folder = f"{place}/{'x' * (shm.MOST_TMP_BYTES + more - len(place) - 1)}"
        path = f"{folder}/torch-shm-dir-123456/manager.sock"
        Path(path).parent.mkdir(parents=True)
        with pytest.raises(OSError, match="path too long") if more else contextlib.nullcontext():
            listener.bind(path)
    assert (shm.too_long_for_sockets({"TMPDIR": folder}) is None) is not bool(more)


@pytest.mark.parametrize("name", shm.TMP_VARIABLES)
def test_the_variable_is_named(name: str) -> None:
    assert str(shm.too_long_for_sockets({name: "x" * 80})).startswith(f"{name} is a path of 80 bytes")
