"""Real jobs: what their wall time was spent on is named by every node, and is all of it."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch, script, start
from tests.conftest import require
from tests.schemas.validator import violations
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

TICKS_S = 0.02  # the kernel tells when a process began in ticks of 10 ms
# Saves each tenth step, and prints each.
TRAIN = """
import os, sys, time
saved, last, rank = sys.argv[1], int(sys.argv[2]), os.environ["RANK"]
step = int(open(saved).read()) if os.path.exists(saved) else 0
while step < last:
    time.sleep(0.05)
    step += 1
    print('step', step, flush=True)
    if rank == "0" and step % 10 == 0:
        with open(saved + ".new", "w") as file:
            file.write(str(step))
        os.replace(saved + ".new", saved)
"""


def time_of(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"][:-1]).timestamp()


@pytest.mark.torch
@pytest.mark.long("tests/observability/test_goodput_job.py")
def test_a_killed_pod_is_waited_for_and_its_successor_knows_the_jobs_ledger(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    events = tmp_path / "events"
    env = {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    words = ("--nodes=2", "--fault", "kill pod node=0 back=3s at=step:45", "--events", str(events))
    program = (script(tmp_path, TRAIN), str(tmp_path / "saved"), "120")
    with start("rehearse", *words, "--", *program, env=env) as run:
        output = run.ends_with(0, 180.0)
    whole = re.search(r"Succeeded after ([0-9.]+) s", output)
    ((ratio_of, spent),) = re.findall(r"^Goodput: [0-9.]+ % of ([0-9.]+) s: (.*)$", output, re.MULTILINE)
    assert whole is not None
    assert 0.5 * float(whole[1]) < float(ratio_of) <= float(whole[1])
    seconds = {kind: float(one_s) for kind, one_s in re.findall(r"([a-z ]+?) ([0-9.]+) s(?:, |$)", spent)}
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [bad for line in lines for bad in violations("event", line)] == []
    finished = {one["node"]: one for one in lines if one["event"] == "finished"}
    ends = {node: one["goodput_seconds"] for node, one in finished.items()}
    # Of 3 s, its absence may be a blip for the first.
    assert seconds["waiting for nodes"] >= 1.0
    assert ends[0]["waiting_for_nodes"] >= 1.0, "as node 1 told it"
    begun_s = [time_of(finished[node]) - sum(ends[node].values()) for node in (0, 1)]
    assert begun_s[0] == pytest.approx(begun_s[1], abs=2.0)


def test_a_program_that_reports_checkpoints_shows_them_everywhere(tmp_path: Path) -> None:
    end, events = tmp_path / "end", tmp_path / "events"
    text = (
        "import os, sys, time, trainer_launch\n"
        "trainer_launch.report(step=1)\n"
        "begun_s = time.monotonic()\n"
        "trainer_launch.report(checkpointing=True)\n"
        "time.sleep(1.5)\n"
        "trainer_launch.report(step=2, checkpointing=False)\n"
        "print('took', time.monotonic() - begun_s, flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
        "trainer_launch.report(step=3)\n"
    )
    env, last_words = {"TMPDIR": str(tmp_path)}, tmp_path / "words"
    begun_s = time.monotonic()
    words = ("--engine=plain", "--events", str(events), "--termination-log", str(last_words))
    with start("run", *words, "--", script(tmp_path, text), str(end), env=env) as run:

        def now() -> dict[str, Any]:
            told = launch("status", "--json", "--pid", str(run.pid), env=env)  # /tmp has those of other tests
            return json.loads(told.stdout) if told.returncode == 0 else {}

        def saved_s() -> float:
            launchers = now().get("launchers") or [{"goodput": {"seconds": {"checkpointing": 0.0}}}]
            return float(launchers[0]["goodput"]["seconds"]["checkpointing"])

        eventually(lambda: saved_s() >= 1.5, "status knows of the checkpoint")
        told = now()
        shown = launch("status", "--pid", str(run.pid), env=env).stdout
        end.touch()
        output = run.ends_with(0)
    whole_s = time.monotonic() - begun_s
    assert violations("status", told) == []
    assert "goodput   " in shown
    assert re.search(r"checkpointing [1-9]", shown)
    began, *_, finished = [json.loads(line) for line in events.read_text().splitlines()]
    (took_s,) = re.findall(r"^took ([0-9.]+)$", output, re.MULTILINE)
    assert 1.5 <= finished["goodput_seconds"]["checkpointing"] <= float(took_s)
    assert sum(finished["goodput_seconds"].values()) <= whole_s + TICKS_S
    assert sum(finished["goodput_seconds"].values()) >= time_of(finished) - time_of(began) - 2.0
    assert re.search(r"^Goodput: [0-9.]+ % of .*checkpointing [1-9]", last_words.read_text(), re.MULTILINE)
