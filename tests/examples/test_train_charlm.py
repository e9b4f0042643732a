"""The example job learns, resumes where it ended, and saves when it is asked to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = Path(__file__).parents[2] / "docker" / "examples" / "train_charlm.py"
SMALL = ("--batch", "4", "--seq", "16", "--log-every", "5")
ALONE = (sys.executable, str(SCRIPT), *SMALL)
TWO_RANKS = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    str(SCRIPT),
    *SMALL,
)


def start(*argv: str) -> subprocess.Popen[str]:
    distributed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in distributed}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*argv: str) -> str:
    with start(*argv) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)", output, re.MULTILINE)]


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that would train for hours."""
    with start(*TWO_RANKS, "--steps", "1000000", "--checkpoint", str(tmp_path / "model.pt")) as process:
        yield process
        process.kill()


@pytest.mark.long("tests/examples/test_train_charlm.py")
def test_two_ranks_learn_and_go_on_where_they_ended(tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "new" / "model.pt"))
    first = run(*TWO_RANKS, *checkpoint, "--steps", "20")
    assert "rank 0 of 2" in first
    assert "rank 1 of 2" in first
    assert first.count("step 20/20") == 1, "only rank 0 reports progress"

    second = run(*TWO_RANKS, *checkpoint, "--steps", "40")
    assert "resumed at step 20" in second
    assert "step 25/40" in second
    assert "step 20/40" not in second
    assert losses(first)[0] > 5 > losses(second)[0], "the loss goes on from where it was"
    assert losses(second)[-1] < losses(first)[-1]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.pt"], "no temporary file is left"


@pytest.mark.long("tests/examples/test_train_charlm.py")
def test_a_resumed_run_ends_as_one_without_a_break(tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "model.pt"))
    run(*ALONE, *checkpoint, "--steps", "6")
    resumed, unbroken = run(*ALONE, *checkpoint, "--steps", "12"), run(*ALONE, "--steps", "12")
    assert resumed[resumed.index("done:") :] == unbroken[unbroken.index("done:") :]


def test_sigterm_to_one_rank_makes_all_save_the_same_step(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    assert long_run.stdout is not None
    pids: dict[str, int] = {}
    for line in long_run.stdout:
        if start_line := re.match(r"rank (\d+) of 2 .* pid (\d+)", line):
            pids[start_line[1]] = int(start_line[2])
        if line.startswith("step 5/"):
            break
    os.kill(pids["1"], signal.SIGTERM)
    rest = long_run.stdout.read()
    assert long_run.wait(timeout=30) == 0
    stopped = re.search(r"stopped at step (\d+): asked by SIGTERM, saved", rest)
    assert stopped, rest
    after = run(*ALONE, "--checkpoint", str(tmp_path / "model.pt"), "--steps", str(int(stopped[1]) + 1))
    assert f"resumed at step {stopped[1]} " in after, "one rank can go on from what two saved"


@pytest.mark.long("tests/examples/test_train_charlm.py")
def test_a_pod_that_is_asked_to_stop_does_not_make_the_others_wait_for_what_saved_and_ended(tmp_path: Path) -> None:
    """All ranks save and exit with 0 when one pod gets SIGTERM; torch used to wait 30 s for the others."""
    events = tmp_path / "events"
    fault = ("--nodes", "2", "--fault", "term pod node=1 at=step:40", "--events", str(events))
    steps = ("--steps", "200", "--checkpoint", str(tmp_path / "model.pt"))
    command = (sys.executable, "-m", "trainer_launch", "rehearse", *fault, "--", str(SCRIPT), *SMALL, *steps)
    with start(*command) as process:
        output = process.communicate(timeout=200)[0]
        assert process.returncode == 0, output
    assert output.index("stopped at step") < output.index("resumed at step")
    told = [json.loads(line) for line in events.read_text().splitlines()]
    saved_s = min(time_of(one) for one in told if one["event"] == "exited")
    formed = [one for one in told if one["event"] == "generation_formed"]
    (met_s,) = [time_of(one) for one in formed if (one["node"], one["generation"]) == (0, 2)]
    assert met_s < saved_s + 20, "no import of torch is in between"


def time_of(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()
