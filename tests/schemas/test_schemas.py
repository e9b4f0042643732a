"""What is printed or written as JSON is as the schemas say; of real launchers in tests/cli and tests/preflight."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from tests.contracts.pods import CASES
from tests.membership.world import World, running
from tests.schemas.validator import NAMES, SCHEMAS, schema, violations
from trainer_launch.cli import run_command
from trainer_launch.commands.status import job_table
from trainer_launch.diagnosis.stall import StallJudge
from trainer_launch.diagnosis.stragglers import StragglerJudge
from trainer_launch.membership import state
from trainer_launch.observability import event_log
from trainer_launch.observability.goodput import TrainingStatus
from trainer_launch.observability.training_judge import TrainingJudge
from trainer_launch.supervisor.run_observer import TimeKind

GOOD = [name for name, case in CASES.items() if "error" not in case]


def explained(pod: Path, capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    run_command(["explain", "--json", "--pod", str(pod), *command])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", GOOD)
def test_what_explain_prints_is_as_its_schema_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, pod, saved = CASES[name], tmp_path / "pod.json", tmp_path / "saved.json"
    pod.write_text(json.dumps(case["pod"]))
    assert violations("pod", case["pod"]) == []
    asked = ("--contract", case["ask_for"]) if "ask_for" in case else ()
    assert violations("explain", explained(pod, capsys, *asked, "--save-pod", str(saved))) == []
    command = case["pod"].get("command") or ["train.py"]  # a contract may be read by it
    assert violations("explain", explained(pod, capsys, *asked, "--", *command)) == []
    assert violations("pod", json.loads(saved.read_text())) == []


def test_without_a_plan_it_is_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = tmp_path / "pod.json"
    pod.write_text(json.dumps({"env": {}}))
    told = explained(pod, capsys, "--nodes=2", "--", "train.py")
    assert told["plan"] is None
    assert violations("explain", told) == []


def test_a_job_as_status_shows_it_is_so_too() -> None:
    for shown in (
        TrainingStatus(),
        TrainingStatus(progress=0.5, progress_age_s=3.0, goodput={TimeKind.TRAINING: 1.0}),
    ):
        judges = [StallJudge(), StragglerJudge(every_s=60.0), TrainingJudge(shown=partial(replace, shown))]
        worlds = [World(3), running(judges=judges)[0], World(2, judges=judges)]
        worlds[-1].come(0)
        for world in worlds:
            made = json.loads(json.dumps(job_table(state.status(world.state, world.now_s))))
            told = {"launchers": [], "job": made, "job_problem": None}
            assert violations("status", told) == []


def test_a_line_of_the_event_log_is_so_too() -> None:
    assert (
        violations("event", {"time": event_log.rfc3339_ms(0), "event": "stopping", "rung": "kill", "node": 0}) == []
    )


@pytest.mark.parametrize(
    "line",
    [
        {"event": "stopping", "rung": "kill", "node": 0},
        {"event": "nothing", "node": 0, "time": event_log.rfc3339_ms(0)},
        {"event": "signal", "node": None, "time": event_log.rfc3339_ms(0), "signal": "TERM", "asks_to_stop": True},
        {"event": "stopping", "rung": "kill", "node": None, "time": "yesterday"},
        {"event": "stopping", "rung": "kill", "node": None, "time": event_log.rfc3339_ms(0), "more": 1},
    ],
)
def test_a_line_that_is_otherwise_is_none(line: dict[str, Any]) -> None:
    assert violations("event", line)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_itself_a_schema_of_its_draft(name: str) -> None:
    assert schema(name)["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(schema(name))


def test_readers_may_not_count_on_there_being_no_more_keys() -> None:
    """But for preflight, which has a version that would rise, and external, which others write: a typo is told."""
    for name in NAMES:
        text = (SCHEMAS / f"{name}.schema.json").read_text()
        assert ('"additionalProperties": false' in text) == (name in ("external", "preflight"))
