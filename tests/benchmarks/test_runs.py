"""One real run of what is measured: each row has its reading, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import (
    contestants,
    coordinator,
    idle,
    output,
    peers,
    preflight,
    recovery,
    schedule,
    startup,
    stragglers,
    survival,
    trees,
)
from benchmarks.measuring import Reading
from benchmarks.peers import Launcher
from tests.conftest import require
from tests.pods import missing

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
OURS = peers.OURS
NOBODY = next(init for init in idle.INITS if not init.package and init.who != "trainer-launch")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = psutil.Process().children(recursive=True)  # of tests that have run in this process
    with trees.folder() as own:
        monkeypatch.setattr(trees, "FOLDERS", own)
        yield
        assert list(Path(own).iterdir()) == []
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def numbers(found: object) -> dict[str, float]:
    assert isinstance(found, dict)
    return {row: float(value.value if isinstance(value, Reading) else value) for row, value in found.items()}


@pytest.mark.parametrize("launcher", [startup.PLAIN, peers.SHELL_LOOP], ids=lambda one: one.who)
def test_a_start_up_is_read_in_all_its_rows(launcher: Launcher) -> None:
    found = numbers(startup.once(launcher))
    assert list(found) == list(startup.ROWS)
    assert 0 < found["to the program's first line"] < 60
    assert found["memory beside the program (PSS)"] > 0


@pytest.mark.parametrize("init", [idle.INITS[0], NOBODY], ids=lambda one: one.who)
def test_a_process_1_is_read_in_all_its_rows(init: idle.Init) -> None:
    found = numbers(idle.once(init))
    assert list(found) == list(idle.ROWS)
    assert found["memory (PSS)"] > 0
    assert 0 < found["a signal"] < 10_000


@pytest.mark.long("tests/benchmarks/test_runs.py")
@pytest.mark.torch
def test_a_killed_worker_is_seen_to_come_back() -> None:
    found = recovery.once(OURS, 1)
    assert list(found) == list(recovery.rows(1))
    awake = {name: value for name, value in numbers(found).items() if "wake-ups" not in name}  # none is the goal
    assert all(value > 0 for value in awake.values()), found


@pytest.mark.long("tests/benchmarks/test_runs.py")
@pytest.mark.torch
@pytest.mark.parametrize(("factor", "ranks"), [(3.0, {1}), (1.0, set())])
def test_a_slow_rank_is_named_a_straggler_and_nobody_is_without(factor: float, ranks: set[int]) -> None:
    assert stragglers.named(stragglers.Straggling(4, factor)) == ranks


@pytest.mark.long("tests/benchmarks/test_runs.py")
@pytest.mark.torch
def test_a_fault_of_the_matrix_is_survived_and_timed() -> None:
    require(missing() is None, str(missing()))
    row = survival.ROWS["worker-1"]
    reading = survival.once(contestants.ours()[0], row)[row.text]
    assert not isinstance(reading, str), reading
    assert reading.note == "1/1/1"
    assert 0 < reading.value < survival.WATCH_S


@pytest.mark.long("tests/benchmarks/test_runs.py")
@pytest.mark.torch
def test_a_job_reaches_its_last_step_without_faults_and_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    require(missing() is None, str(missing()))
    monkeypatch.setattr(schedule, "STEPS", 60)
    found = schedule.once(contestants.ours()[0], {30: schedule.FAULTS[100]})
    assert list(found) == list(schedule.ROWS), found
    with_faults = found[schedule.FAULTY]
    assert isinstance(with_faults, Reading)
    assert with_faults.note == "1/1/1"
    assert numbers(found)[schedule.RATIO] > 0


def test_all_bytes_of_all_writers_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MEGABYTES", 4)
    assert numbers(output.once("cat", 2))["2 writers"] > 0


def test_simulated_nodes_get_their_verdict() -> None:
    found = preflight.simulated(8)
    assert list(found) == list(preflight.rows(8))
    assert all(value > 0 for value in found.values())


def test_simulated_nodes_form_again_after_losses() -> None:
    found = coordinator.simulated(8, losses=1)
    assert list(found) == list(coordinator.ROWS)
    assert found["join"] > 0
    assert found["1 % lost every second: form again, longest"] > 0
    assert found["connections refused, reset or dropped"] >= 0
