"""--report: what is refused before the job starts, what is printed and written, and what cannot be."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.rehearsal import scenes
from tests.rehearsal.told import restarted
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal import reporting
from trainer_launch.rehearsal.rehearsal_report import as_json
from trainer_launch.rehearsal.reporting import text


@pytest.mark.parametrize("name", ["out.pdf", "out", "out.html.gz", ""])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"ends with \.html \(a page for people\) or \.json \(data\)"):
        reporting.check(name)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "no" / "out.html", tmp_path / "folder.html"):
        with pytest.raises(UsageError, match="cannot be written; name a file in a writable directory"):
            reporting.check(str(path))
    reporting.check(str(tmp_path / "OUT.JSON"))


def test_reports_replace_old_files_whole_and_others_may_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    page.write_text("old")
    assert reporting.conclude(restarted(before=140, resumed=1).history(), [str(page), str(data)]) == 1
    assert "<h1>FAILED: the script did not resume" in page.read_text(encoding="utf-8")
    assert os.stat(page).st_mode & 0o777 == 0o644
    assert json.loads(data.read_text(encoding="utf-8"))["exit_code"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    assert "FAILED: the script did not resume from its checkpoint, demo-0, demo-1" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_any_more_changes_no_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert reporting.conclude(restarted().history(), [str(tmp_path / "gone" / "out.html")]) == 0
    assert "out.html was not written: No such file or directory" in caplog.text


def test_the_terminal_has_a_row_for_each_pod_a_line_for_each_fault_and_the_condition() -> None:
    lines = text(scenes.small()).splitlines()
    assert lines[:5] == [
        "POD            STATUS     CREATED  RESTARTS  EXIT  MESSAGE",
        "demo-master-0  Succeeded  1        0         0     reason=Succeeded exit=0",
        "demo-worker-0  Succeeded  2        0         0     reason=Succeeded exit=0",
        "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last.",
        "PyTorchJob demo: Succeeded after 53.0 s (JobSucceeded): done",
    ]
    assert lines[5:] == [
        "Fault 1 (kill worker node=1 at=step:40, worker-0, at 11.6 s) cost 3.9 s without a new step, "
        "10 repeated steps; reached step 40, resumed from step 30",
        "Fault 2 (term pod node=1 grace=10 at=step:80, worker-0, at 23.7 s) cost 4.5 s without a new step, "
        "1 repeated step; reached step 80, resumed from step 79",
        "Fault 3 (partition node=1 for=4s at=37s, worker-0, at 37.0 s) cost 5.0 s without a new step, "
        "0 repeated steps; continued after step 120",
    ]
    assert text(scenes.without_steps()).splitlines()[-4:-2] == [
        "fault did not happen: kill pod node=7: there is no node 7",
        "Fault 1 (kill pod node=1, plain-1, at 3.0 s) cost an unknown time: steps unknown",
    ]


def test_data_is_the_report_in_json(tmp_path: Path) -> None:
    told = as_json(scenes.small())
    assert json.loads(json.dumps(told)) == told
    assert isinstance(told, dict)
    assert (told["job"], told["summary"]) == ({"kind": "PyTorchJob", "name": "demo"}, "Survived 3 faults")
    assert (told["exit_code"], told["succeeded"], told["attempts"], told["highest_step"]) == (0, True, 3, 170)
    first, pod = told["faults"][0], told["pods"][1]
    assert (first["fault"], first["pod"], first["at_s"]) == ("kill worker node=1 at=step:40", "demo-worker-0", 11.6)
    assert (first["reached_step"], first["resumed_step"], first["repeated_steps"]) == (40, 30, 10)
    assert first["downtime_s"] == 3.9
    assert (first["happened"], first["recovered"]) == (True, True)
    assert (pod["name"], pod["created"], pod["attempts"], pod["exit_code"]) == ("demo-worker-0", 2, 3, 0)
    assert pod["timeline"][0] == {"state": "Pending", "begin_s": 0.0, "end_s": 0.2, "attempt": 0}


def test_a_report_of_what_is_only_rendered_is_refused() -> None:
    with pytest.raises(UsageError, match="--report and --render exclude each other"):
        reporting.paths_of({"reports": ["out.html"], "render": "pods"})
