"""A real job whose ranks keep their state after a loss: what each place tells of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.launching import launched
from tests.schemas.validator import violations
from trainer_launch.diagnosis import incident_bundle

EXAMPLE = Path(__file__).parents[2] / "docker" / "examples" / "train_keeping_state.py"
IN_TIME = Path(__file__).parents[1] / "pytorch" / "in_time.py"
pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]


def test_a_rehearsal_tells_everywhere_that_ranks_kept_their_state_and_repeated_no_step(tmp_path: Path) -> None:
    page, data, events, place = (tmp_path / name for name in ("r.html", "r.json", "events", "incidents"))
    words = ("--nproc-per-node", "4", "--fault", "kill worker worker=2 at=step:40", "--report", str(page))
    env = {"TRAINER_LAUNCH_EVENTS": str(events), "TRAINER_LAUNCH_INCIDENT_DIR": str(place)}
    # Pods do not inherit what a shell has set.
    program = ("env", f"CHECKPOINT={tmp_path}/model.pt", sys.executable, str(IN_TIME), "2", str(EXAMPLE))
    ended = launched("rehearse", *words, "--report", str(data), "--", *program, env=env, cwd=tmp_path)
    output = ended.stdout + ended.stderr
    sentence = r"1 rank replaced in \d+\.\d\d s; 3 ranks kept their state at step \d+, no step is repeated"
    assert re.search(rf"generation 2: {sentence}", output), output
    assert re.search(r"cost .*, 0 repeated steps; reached step \d+, .*; surviving ranks kept their state", output)
    assert re.search(r"Goodput: .*replacing ranks", output), output
    assert "surviving ranks kept their state" in page.read_text()
    (fault,) = json.loads(data.read_text())["faults"]
    assert (fault["repeated_steps"], fault["state_kept"]) == (0, True)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [text for event in told for text in violations("event", event)] == []
    by_name = {event["event"]: event for event in told}
    assert (by_name["state_kept"]["ranks"], by_name["state_kept"]["replaced"]) == (3, 1)
    assert by_name["finished"]["goodput_seconds"]["replacing_ranks"] > 0
    assert not {"repeating_steps", "restarting"} & by_name["finished"]["goodput_seconds"].keys()
    (stored,) = incident_bundle.stored(str(place))
    assert re.search(sentence, stored.incident.sentence), stored.incident.sentence
    assert {state.rank for state in stored.incident.states if state.stack} == {0, 1, 3}
