"""The keeper of a node's goodput ledger takes in reports, printed lines, collectives and a preflight."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from tests.observability.test_metrics import VIEW
from trainer_launch.commands import status
from trainer_launch.host import runtime_directory
from trainer_launch.observability import goodput, node_view, progress
from trainer_launch.observability.goodput_keeper import GoodputKeeper
from trainer_launch.observability.observer import Observer
from trainer_launch.observability.progress import PrintedSteps
from trainer_launch.supervisor.run_observer import StateKept, TimeKind


def reports(folder: Path, local_rank: int, at_s: float, first_s: float, step: int | None, **more: object) -> None:
    values: dict[str, object] = {
        "rank": local_rank,
        "local_rank": local_rank,
        "pid": 1,
        "at_s": at_s,
        "time_s": time.time(),
    }
    values |= {"step": step, "progress": None, "eta_s": None, "metrics": {}, "first_at_s": first_s, "first_step": 1}
    Path(runtime_directory.progress_file(str(folder), local_rank)).write_text(json.dumps({**values, **more}))


def trains_since(keeper: GoodputKeeper, ago_s: float) -> float:
    """Workers run since then, and the ledger begins with them."""
    now_s = time.monotonic()
    keeper.enter(TimeKind.TRAINING, now_s - ago_s)
    keeper._ledger = keeper.ledger.__class__(at_s=now_s - ago_s, kind=TimeKind.TRAINING, since_s=now_s - ago_s)
    return now_s


def test_reports_tell_when_training_began_and_how_long_checkpoints_took(tmp_path: Path) -> None:
    keeper = GoodputKeeper(str(tmp_path), PrintedSteps(str(tmp_path)))
    now_s = trains_since(keeper, 100.0)
    reports(tmp_path, 0, now_s, now_s - 90.0, 40)
    reports(tmp_path, 1, now_s - 0.5, now_s - 88.0, 40, checkpoint_s=30.0)
    spent = keeper.totals()
    assert spent[TimeKind.STARTING] == pytest.approx(10.0, abs=0.5)
    assert spent[TimeKind.TRAINING] == pytest.approx(60.0, abs=0.5)
    assert spent[TimeKind.CHECKPOINTING] == pytest.approx(30.0)


def test_reports_of_former_workers_are_no_signs_of_the_present_ones(tmp_path: Path) -> None:
    keeper = GoodputKeeper(str(tmp_path), PrintedSteps(str(tmp_path)))
    now_s = trains_since(keeper, 100.0)
    reports(tmp_path, 0, now_s - 101.0, now_s - 190.0, 40)
    assert set(keeper.totals()) == {TimeKind.STARTING}


def test_printed_steps_count_where_nothing_is_reported(tmp_path: Path) -> None:
    printed = PrintedSteps(str(tmp_path))
    keeper = GoodputKeeper(str(tmp_path), printed)
    trains_since(keeper, 50.0)
    printed.heard("rank 0", 1, b"step 1 of 9\nno step here: stepped 4\nstep 2 of 9\n")
    spent = keeper.totals()
    assert spent[TimeKind.STARTING] == pytest.approx(50.0, abs=0.5)
    assert keeper.ledger.signs is not None
    assert (keeper.ledger.signs.first_step, keeper.ledger.signs.step) == (2, 2), "one block is one moment"
    keeper.enter(TimeKind.STOPPING, time.monotonic())
    keeper.enter(TimeKind.TRAINING, time.monotonic())
    assert printed.signs() is None, "new workers have printed nothing"
    assert keeper.ledger.top == 2


def test_the_printed_step_is_kept_for_status_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, none = PrintedSteps(str(tmp_path)), progress.printed(str(tmp_path))
    steps.heard("rank 0", 1, b"step 1 of 9\nstep 2 of 9\n")
    steps.heard("rank 0", 1, b"step 3 of 9\n")
    kept = progress.printed(str(tmp_path))
    assert (none, kept and kept.step) == (None, 2), "in the same second once"
    assert progress.read(str(tmp_path)) == (), "no report"
    later_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    steps.signs()
    kept = progress.printed(str(tmp_path))
    assert kept is not None
    assert (kept.step, later_s - kept.at_s > 59.0) == (3, True), "the last one before a silence, and when it came"
    (tmp_path / runtime_directory.PRINTED).write_text('{"step": -1, "at_s": 0}')
    assert progress.printed(str(tmp_path)) is None
    PrintedSteps("/nonexistent").heard("rank 0", 1, b"step 1 of 9\n")


def test_a_hang_that_is_suspected_counts_as_detecting_in_status_too(tmp_path: Path) -> None:
    keeper = GoodputKeeper(str(tmp_path), PrintedSteps(str(tmp_path)))
    observer = Observer(replace(VIEW, run_dir=str(tmp_path)), keeper)
    now_s = trains_since(keeper, 100.0)
    reports(tmp_path, 0, now_s - 20.0, now_s - 90.0, 40)
    observer.suspect()
    written = node_view.written_in(str(tmp_path))
    assert written is not None
    assert written.ledger is not None
    assert goodput.totals(written.ledger, now_s)[TimeKind.DETECTING] == pytest.approx(20.0, abs=0.5)


def test_status_and_metrics_tell_of_ranks_that_kept_their_state(tmp_path: Path) -> None:
    observer = Observer(replace(VIEW, run_dir=str(tmp_path)))
    for generation in (2, 3):
        kept = StateKept(generation=generation, ranks=7, replaced=1, step=41, took_s=0.2)
        observer.tell("state_kept", **asdict(kept))
    assert "trainer_launch_state_kept_total 2.0\n" in observer.metrics()
    (view,) = [node_view.written_in(str(tmp_path))]
    assert (view and view.kept, view and view.times_kept) == (kept, 2)
    shown = [*status.launcher_lines([status._launcher_values(observer.view)], 100.0)]
    assert f"  recovered {kept}" in shown
    assert str(kept) == "1 rank replaced in 0.20 s; 7 ranks kept their state at step 41, no step is repeated"


def test_metrics_count_up_to_the_last_progress_and_never_back(tmp_path: Path) -> None:
    keeper = GoodputKeeper(str(tmp_path), PrintedSteps(str(tmp_path)))
    now_s = trains_since(keeper, 100.0)
    reports(tmp_path, 0, now_s - 20.0, now_s - 90.0, 40)
    spent = keeper.certain()
    assert spent[TimeKind.TRAINING] == pytest.approx(70.0)
    assert spent.get(TimeKind.DETECTING, 0.0) == 0.0
    keeper.enter(TimeKind.STOPPING, time.monotonic(), since_s=now_s - 20.0)  # a hang: no counter had these
    assert keeper.certain()[TimeKind.TRAINING] == pytest.approx(70.0)
