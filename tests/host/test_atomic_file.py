"""A file replaced: all of it or the old one, with the permissions asked for, and nothing beside it."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from trainer_launch.host.files import replace


def test_what_was_there_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    place.write_text("old, and longer than what comes")
    replace(str(place), b"new")
    assert place.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_the_permissions_are_those_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        replace(str(tmp_path / "file"), b"", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_when_it_cannot_be_put_there_the_old_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "taken"
    (place / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"directory|not empty"):
        replace(str(place), b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (place / "inside").is_dir()


def test_the_longest_name_can_be_replaced(tmp_path: Path) -> None:
    replace(str(tmp_path / ("n" * 255)), b"new")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_of_many_at_once_one_wins_whole(tmp_path: Path) -> None:
    texts = [bytes([65 + n]) * 10_000 for n in range(8)]
    threads = [threading.Thread(target=replace, args=(str(tmp_path / "file"), text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in texts
    assert os.listdir(tmp_path) == ["file"]
