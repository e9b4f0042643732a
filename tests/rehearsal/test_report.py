"""--report: what is refused before the job starts, what is written, and what is said when it cannot be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.conftest import quick_first, require
from tests.rehearsal import scenes
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.report import html_page, reporting
from trainer_launch.rehearsal.report.history import History

PNG = b"\x89PNG\r\n\x1a\n"
SCENES = ("small", "bad", "crowd", "nasty", "without_steps")


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG, as its first chunk says."""
    data = picture.read_bytes()
    assert data.startswith(PNG)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize("name", ["out.pdf", "out", "out.html.gz", ""])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"expected a file that ends with .html or .png"):
        reporting.check([name])


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="cannot be written: No such file or directory; name a file in a writable directory"
    ):
        reporting.check([str(tmp_path / "no" / "out.html")])
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UsageError, match="is a directory; name a file in it"):
        reporting.check([str(tmp_path / "folder.html")])
    reporting.check([str(tmp_path / "out.html"), str(tmp_path / "OUT.PNG")])
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"], "looking leaves nothing behind"


def test_a_page_replaces_the_old_one_whole_and_others_may_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "out.html"
    place.write_text("old")
    assert reporting.conclude(scenes.small(), 0, [str(place)], 100) == 0
    assert "Survived 3 faults" in place.read_text(encoding="utf-8")
    assert os.stat(place).st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in told] == ["Fault 1", "Fault 2", "Fault 3"]
    assert told[0] == (
        "Fault 1 (kill worker node=1 at=step:40, worker-0, at 11.6 s) cost 3.9 s without a new step, "
        "10 repeated steps; reached step 40, resumed from step 30"
    )


def test_a_failed_check_is_said_at_the_end_and_fails_the_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    assert reporting.conclude(scenes.bad(), 0, [], 100) == 1
    assert (
        "FAILED: the script did not resume from its checkpoint, demo-0, demo-1 at 17.1 s" in capsys.readouterr().err
    )


def test_a_page_that_cannot_be_written_any_more_changes_no_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert reporting.conclude(scenes.small(), 0, [str(tmp_path / "gone" / "out.html")], 100) == 0
    assert "out.html was not written: No such file or directory" in caplog.text


@pytest.mark.process
@pytest.mark.parametrize("name", quick_first(SCENES, 2, pytest.mark.long("tests/rehearsal/test_report.py")))
def test_a_picture_is_as_wide_as_a_screen_and_as_high_as_it_has_to_be(tmp_path: Path, name: str) -> None:
    require(html_page.browser(), "needs chromium")
    place = tmp_path / "out.png"
    history: History = getattr(scenes, name)()
    reporting.conclude(history, 0, [str(place)], 100)
    width, height = size_of(place)
    assert 1300 <= width <= 1600, "nothing sticks out"
    assert 500 <= height <= 1200 + 60 * (len(history.pods) + history.entries.__len__() // 100)
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


def test_a_picture_that_nothing_here_can_draw_is_refused_before_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"a picture needs a browser: install chromium, or name an \.html file"):
        reporting.check([str(tmp_path / "out.png")])
    reporting.check([str(tmp_path / "out.html")])


@pytest.mark.parametrize("program", ["exit 1", "echo '<title>700</title>'"])
def test_a_browser_that_draws_nothing_changes_no_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    caplog.set_level(logging.WARNING)
    browser = tmp_path / "chromium"
    browser.write_text(f"#!/bin/sh\n{program}\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reporting.conclude(scenes.small(), 0, [str(tmp_path / "out.png")], 100) == 0
    assert f"out.png was not written: {browser} drew no picture; name an .html file" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["chromium"]
