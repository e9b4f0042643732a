"""Two rehearsed pods of a torch job: what every watcher sees of a worker that fails. Real torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.launching import launch, script, start
from tests.conftest import require
from tests.waiting import eventually

TRAIN = """
import os, sys, time, trainer_launch
rank, failures = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
trainer_launch.report(progress=0.1 + 0.4 * int(failures), metrics={"rank": int(rank)})
open(sys.argv[1] + rank, "w").close()
if rank == "1" and failures == "0":
    while not os.path.exists(sys.argv[1] + "0"):  # both have begun
        time.sleep(0.02)
    sys.exit(3)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


@pytest.mark.torch
@pytest.mark.process
def test_status_and_the_event_log_tell_of_a_failure_and_its_restart(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    events, end = tmp_path / "events", tmp_path / "end"
    (tmp_path / "secret").write_text("hunter2")
    env = {
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "TRAINER_LAUNCH_SECRET_FILE": str(tmp_path / "secret"),
    }

    def told(name: str) -> list[dict[str, Any]]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == name]

    words = ("local", "--nodes=2", "--events", str(events), "--", script(tmp_path, TRAIN), str(end))
    with start(*words, env=env) as run:
        eventually(lambda: len(told("workers_started")) == 4, f"both nodes start twice: {told('workers_started')}")
        eventually(
            lambda: (asked(env, run.pid)["job"] or {}).get("progress") == 0.5,
            f"the coordinator knows of progress: {asked(env, run.pid)}",
        )
        now = asked(env, run.pid)
        end.touch()
        assert run.end()[0] == 0
    assert [(one["node_rank"], one["standing"]["generation"]) for one in now["launchers"]] == [(0, 2), (1, 2)]
    job = now["job"]
    assert (job["phase"], job["generation"], job["restarts"]) == ("running", 2, 1)
    assert [row[2] for row in job["nodes"]] == ["running", "running"]
    (failed,) = told("worker_failed")
    assert (failed["node"], failed["rank"], failed["exit_code"], failed["generation"]) == (1, 1, 3, 1)
    formed = [(one["node"], one["generation"]) for one in told("generation_formed")]
    assert sorted(formed) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [(one["node"], one["generation"]) for one in told("generation_ended")] == [(0, 1)]
    assert any("generation 2" in str(one["text"]) for one in told("coordinator"))
    assert sorted(str(one["node"]) for one in told("finished")) == ["0", "1"]
    assert "hunter2" not in events.read_text() + json.dumps(now)


def asked(env: dict[str, str], rehearsal: int) -> dict[str, Any]:
    """What is told of a rehearsal's launchers; /tmp has those of other tests, too."""
    pods = [str(child.pid) for child in psutil.Process(rehearsal).children()]
    ends = [launch("status", "--json", "--pid", pid, env=env) for pid in pods]
    told: list[dict[str, Any]] = [json.loads(end.stdout) for end in ends if end.returncode == 0]
    launchers = sorted((one["launchers"][0] for one in told), key=lambda it: it["node_rank"])
    return {"launchers": launchers, "job": told[0]["job"] if told else None}
