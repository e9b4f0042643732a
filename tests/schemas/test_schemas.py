"""What is printed or written as JSON is as the schemas say; of real launchers in tests/cli and tests/preflight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import to_builtins

from tests.cli.launching import launch
from tests.contracts.pods import CASES
from tests.membership.world import World, running
from tests.preflight.test_outputs import made as preflight_report
from tests.schemas.validator import NAMES, SCHEMAS, schema, violations
from trainer_launch.cli import run_command
from trainer_launch.membership import state
from trainer_launch.observability import event_log

ROOT = Path(__file__).parents[2]
GOOD = [name for name, case in CASES.items() if "error" not in case]
RICH = [
    next(name for name in GOOD if name.startswith(f"{contract}/"))
    for contract in ("pytorchjob-v1-elastic", "mpijob-v2beta1")
]
OTHERS: dict[str, Any] = {"null": None, "boolean": True, "integer": 3, "string": "x", "array": [], "object": {}}
EVENTS = [one["properties"]["event"]["const"] for one in schema("event")["oneOf"]]


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
    assert violations("explain", explained(pod, capsys, *asked, "--", "train.py")) == []
    assert violations("pod", json.loads(saved.read_text())) == []


def test_without_a_plan_it_is_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = tmp_path / "pod.json"
    pod.write_text(json.dumps({"env": {}}))
    told = explained(pod, capsys, "--nodes=2", "--", "train.py")
    assert told["plan"] is None
    assert violations("explain", told) == []


def test_a_job_as_status_shows_it_is_so_too() -> None:
    worlds = [World(3), running()[0], World(2)]
    worlds[-1].come(0)
    for world in worlds:
        for progress in (None, (0.5, 3.0), (None, 1.0)):
            made = json.loads(json.dumps(to_builtins(state.status(world.state, world.now_s, progress))))
            del made["kind"]  # of the message
            told = {"launchers": [], "job": made, "job_problem": None}
            assert violations("status", told) == []


def test_every_event_has_its_own_schema() -> None:
    assert sorted(EVENTS) == sorted(event_log.EVENTS)
    assert violations("event", {"time": event_log.rfc3339_ms(0), "event": "resolved", "node": 0}) == []


@pytest.mark.parametrize(
    "line",
    [
        {"event": "resolved", "node": 0},
        {"event": "nothing", "node": 0, "time": event_log.rfc3339_ms(0)},
        {"event": "signal", "node": None, "time": event_log.rfc3339_ms(0), "signal": "TERM", "asks_to_stop": True},
        {"event": "resolved", "node": None, "time": "yesterday"},
        {"event": "resolved", "node": None, "time": event_log.rfc3339_ms(0), "more": 1},
    ],
)
def test_a_line_that_is_otherwise_is_none(line: dict[str, Any]) -> None:
    assert violations("event", line)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_itself_a_schema_of_its_draft(name: str) -> None:
    assert schema(name)["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(schema(name))


def documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, Any]]:
    """Of each schema, what is really written."""
    pod, saved = tmp_path / "pod.json", tmp_path / "saved.json"
    for name in RICH:
        pod.write_text(json.dumps(CASES[name]["pod"]))
        yield "explain", explained(pod, capsys, "--save-pod", str(saved), "--", "train.py")
        yield "pod", json.loads(saved.read_text())
    yield "preflight", preflight_report()
    job = to_builtins(state.status(running()[0].state, 0.0, (0.5, 3.0)))
    del job["kind"]  # of the message
    yield "status", {"launchers": [], "job": json.loads(json.dumps(job)), "job_problem": None}
    events = tmp_path / "events"
    run = ("run", "--engine=plain", "--prefix", "--events", str(events), "--", "sh", "-c", "echo said >&2; exit 3")
    assert launch(*run, cwd=tmp_path).returncode == 3
    yield from (("event", json.loads(line)) for line in events.read_text().splitlines())


@pytest.mark.process
def test_a_document_that_lacks_a_key_or_has_another_kind_of_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set()
    for name, document in documents(tmp_path, capsys):
        assert violations(name, document) == []
        wrong = list(mutated(document, _meant(name, document)))
        assert len(wrong) > 5, name
        for what, other in wrong:
            assert violations(name, other), f"{name} with {what}"
        seen.add(name)
    assert sorted(seen) == NAMES


def _meant(name: str, document: Any) -> Any:
    """The schema, of alternatives the one that is for this document."""
    said = schema(name)
    return next(
        (one for one in said.get("oneOf", ()) if one["properties"]["event"]["const"] == document["event"]), said
    )


def mutated(document: Any, said: Any) -> Iterator[tuple[str, Any]]:
    """The document with one thing wrong each: what, and all of it."""
    if kinds := said.get("type"):
        for kind, value in OTHERS.items():
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                yield f"{value!r}", value
    if "const" in said or "enum" in said:
        yield "another word", "no such word"
    if isinstance(document, dict):
        for key in set(said.get("required", ())):
            yield f"no {key}", {name: value for name, value in document.items() if name != key}
        for key, inner in said.get("properties", {}).items():
            if key in document:
                yield from (
                    (f"{key}: {what}", {**document, key: other}) for what, other in mutated(document[key], inner)
                )
        if "properties" in said and "additionalProperties" not in said:
            yield "a key more", {**document, "no such key": 1}
    elif isinstance(document, list) and document:
        inner = said["prefixItems"][0] if "prefixItems" in said else said.get("items", {})
        yield from ((f"[0]: {what}", [other, *document[1:]]) for what, other in mutated(document[0], inner))


def test_readers_may_not_count_on_there_being_no_more_keys() -> None:
    """But for preflight, which has a version that would rise."""
    for name in NAMES:
        text = (SCHEMAS / f"{name}.schema.json").read_text()
        assert ('"additionalProperties": false' in text) == (name == "preflight")


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    assert sorted(set(re.findall(r"`([a-z]+)\.schema\.json`", page))) == NAMES
