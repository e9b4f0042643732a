"""--report: what is refused before the job starts, what is written, and what is said when it cannot be."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.rehearsal import scenes
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.report import reporting
from trainer_launch.rehearsal.report.history import History, What

SCENES = ("small", "bad", "crowd", "nasty", "without_steps")


@pytest.mark.parametrize("name", ["out.pdf", "out", "out.html.gz", ""])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"ends with \.html \(a page for people\) or \.json \(data\)"):
        reporting.check([name])


def test_a_plot_names_the_page_that_replaces_it() -> None:
    with pytest.raises(UsageError, match=r"^--report out\.PNG was removed in 0\.3; use --report FILE\.html$"):
        reporting.check(["out.PNG"])


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="cannot be written: No such file or directory; name a file in a writable directory"
    ):
        reporting.check([str(tmp_path / "no" / "out.html")])
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UsageError, match="is a directory; name a file in it"):
        reporting.check([str(tmp_path / "folder.html")])
    reporting.check([str(tmp_path / "out.html"), str(tmp_path / "OUT.JSON")])
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


@pytest.mark.parametrize("name", SCENES)
def test_data_has_the_facts_of_the_page(tmp_path: Path, name: str) -> None:
    place = tmp_path / "out.json"
    history: History = getattr(scenes, name)()
    code = reporting.conclude(history, 0, [str(place)], 100)
    told = json.loads(place.read_text(encoding="utf-8"))
    assert told["job"] == {"kind": history.kind, "name": history.name}
    assert (told["exit_code"], told["succeeded"]) == (code, history.succeeded)
    assert {pod["name"] for pod in told["pods"]} >= set(history.pods)
    came = [entry.text for entry in history.entries if entry.what in (What.FAULT, What.FAULT_MISSED)]
    assert [fault["fault"] for fault in told["faults"]] == came
    assert bool(told["failed_checks"]) == (code == 1)


def test_data_tells_what_a_fault_cost(tmp_path: Path) -> None:
    reporting.conclude(scenes.small(), 0, [str(tmp_path / "out.json")], 100)
    first = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["faults"][0]
    assert (first["fault"], first["pod"], first["at_s"]) == ("kill worker node=1 at=step:40", "demo-worker-0", 11.6)
    assert (first["reached_step"], first["resumed_step"], first["repeated_steps"]) == (40, 30, 10)
    assert (first["happened"], first["recovered"]) == (True, True)
