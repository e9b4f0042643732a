"""Where a rehearsed job's time went, all of it and for each fault; made of its pods' phases and steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.rehearsal.told import Tale, finished
from trainer_launch.model.goodput import Kind
from trainer_launch.rehearsal.report import summary, wall_time
from trainer_launch.rehearsal.report.fault_costs import analyse
from trainer_launch.rehearsal.report.history import History, What
from trainer_launch.rehearsal.script_checks import judge


def phase(tale: Tale, at_s: float, kind: Kind, *pods: str) -> None:
    for pod in pods or tale.pods:
        tale.add(at_s, What.PHASE, pod, text=kind.value)


def begun() -> Tale:
    """Two pods: 1 s of start, 2 s of waiting, workers from 4 s on, steps 1 to 50 from 6.0 to 10.9."""
    tale = Tale("a", "b").start(0.0)
    for at_s, kind in ((1.0, Kind.WAITING), (3.0, Kind.MEETING), (4.0, Kind.TRAINING)):
        phase(tale, at_s, kind)
    return tale.steps(6.0, range(1, 51))


def goes_on(tale: Tale, from_s: float) -> History:
    """Workers from then on; resumed from step 40, one step each 0.1 s after 1 s, up to 100."""
    phase(tale, from_s, Kind.TRAINING)
    tale.steps(from_s + 1.0, range(41, 101))
    phase(tale, from_s + 7.5, Kind.ENDING)
    return finished(tale, from_s + 8.0)


def seconds(history: History) -> dict[str, float]:
    return {kind.value: round(one_s, 2) for kind, one_s in wall_time.spent(wall_time.spans(history)).items()}


def test_a_killed_worker_is_stopping_restarting_and_repeating() -> None:
    tale = begun().fault(11.0, "kill worker node=0 at=11s", "a")
    phase(tale, 11.25, Kind.STOPPING)
    phase(tale, 11.75, Kind.WAITING)
    history = goes_on(tale, 12.0)
    assert seconds(history) == {
        "starting": 3.0,
        "waiting_for_nodes": 2.25,
        "meeting": 1.0,
        "training": 5.0 + 6.6 - 1.0 + 0.0,
        "detecting": 0.25,
        "stopping": 0.5,
        "restarting": 1.0,
        "repeating_steps": 0.9,
        "ending": 0.5,
    }
    (line, total) = summary.cost_lines(analyse(history)).splitlines()
    assert line.endswith(
        "resumed from step 40; waiting for nodes 0.2 s, stopping 0.5 s, restarting 1.0 s, repeating steps 0.9 s, "
        "detecting 0.2 s"
    )
    assert total.startswith("Goodput: 53.0 % of 20.0 s: training 10.6 s, ")
    (row,) = summary.fault_rows(analyse(history))
    assert "restarting 1.0 s" in row[-1]
    assert ("53 %", "goodput") in summary.headline(analyse(history), judge(analyse(history))).sums


def test_who_waits_for_a_killed_pod_has_the_jobs_phase() -> None:
    tale = begun().fault(11.0, "kill pod node=0 at=11s", "a").end(11.0, "a", 137, "Gone")
    phase(tale, 11.1, Kind.STOPPING, "b")
    phase(tale, 11.5, Kind.WAITING, "b")
    tale.start(14.0, "a")
    phase(tale, 15.0, Kind.WAITING, "a")
    phase(tale, 16.0, Kind.MEETING, "b", "a")
    told = seconds(goes_on(tale, 16.5))
    assert told["waiting_for_nodes"] == 2.0 + 4.5, "not a restart of the new pod's launcher"
    assert told["detecting"] == 0.1
    assert told["meeting"] == 1.5


def test_a_hang_is_detected_from_the_last_step_on() -> None:
    tale = begun().fault(11.0, "stop worker node=1 at=11s", "b")
    phase(tale, 31.0, Kind.STOPPING)
    assert seconds(goes_on(tale, 32.0))["detecting"] == 20.0


def test_checkpoints_are_no_training() -> None:
    tale = begun()
    tale.add(13.0, What.CHECKPOINT, "a", took_s=2.0).steps(13.1, [51])
    told = seconds(finished(tale, 14.0))
    assert (told["training"], told["checkpointing"]) == (6.0, 2.0)


def test_a_job_without_steps_has_trained_if_it_succeeds() -> None:
    tale = Tale("a").start(0.0)
    phase(tale, 1.0, Kind.TRAINING)
    phase(tale, 9.0, Kind.ENDING)
    assert seconds(finished(tale, 10.0)) == {"starting": 1.0, "training": 8.0, "ending": 1.0}
    assert seconds(tale.history(succeeded=False)) == {"starting": 9.0, "ending": 1.0}


def test_pods_without_a_launcher_of_ours_have_no_goodput() -> None:
    history = finished(Tale("a", "b").start(0.0).meet(0.5).steps(1.0, range(1, 20)), 5.0)
    assert wall_time.spans(history) == ()
    assert "Goodput" not in summary.cost_lines(analyse(history))


def test_all_of_the_time_is_spent_once() -> None:
    tale = begun().fault(11.0, "kill worker node=0 at=11s", "a")
    phase(tale, 11.25, Kind.STOPPING, "b")
    phase(tale, 11.3, Kind.STOPPING, "a")
    found = wall_time.spans(goes_on(tale, 12.0))
    assert found[0].begin_s == 0.0
    assert found[-1].end_s == pytest.approx(20.0)
    assert all(one.end_s == other.begin_s for one, other in pairwise(found))
