"""Stragglers of real jobs: a slowed rank is named within three looks, and whoever only looks like one is not."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cli.launching import Started, launch, launched, script, start
from tests.ports import free_port
from tests.schemas.validator import violations
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(400)]
EVERY_S = 2  # between two looks, for which nobody can wait here otherwise
LOOKED_S = 20  # three looks on a loaded machine, and more

# Steps of STEP_S; SLOW computes for FACTOR times as long. The job ends at all ranks after FOR_S.
TRAIN = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total, begin_s = dist.get_rank(), torch.ones(100), time.monotonic()
def compute():
    time.sleep(STEP_S * (FACTOR if rank in SLOW else 1))
print(f"rank {rank} begins", flush=True)
goes_on = torch.ones(1)
while goes_on.item():
    compute()
    dist.all_reduce(total)
    goes_on = torch.tensor([float(time.monotonic() - begin_s < FOR_S)])
    dist.broadcast(goes_on, 0)
"""


def training(
    folder: Path,
    slow: tuple[int, ...],
    factor: float,
    for_s: float = 600.0,
    step_s: float = 0.04,
) -> str:
    text = TRAIN.replace("STEP_S", str(step_s)).replace("FOR_S", str(for_s))
    return script(folder, text.replace("SLOW", repr(slow)).replace("FACTOR", str(factor)))


@pytest.fixture
def soon(tmp_path: Path) -> dict[str, str]:
    """Variables with which a launcher looks every few seconds."""
    folder = tmp_path / "soon"
    folder.mkdir()
    text = f"from trainer_launch.diagnosis import stragglers\nstragglers.EVERY_S = {EVERY_S}\n"
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def run(soon: dict[str, str], *words: str) -> AbstractContextManager[Started]:
    return start("run", "--nproc-per-node", "4", *words, env=soon)


def test_a_slowed_rank_is_named(tmp_path: Path, soon: dict[str, str]) -> None:
    with run(soon, "--", training(tmp_path, (2,), 1.2)) as job:
        job.read_until(r"rank 2 \(node 0\) is a straggler: late in \d+ of \d+ steps, by [\d.]+ ms")
        job.signal(signal.SIGTERM)
        output = job.ends_with(143)
    assert set(re.findall(r"(rank \d+) \(node \d+\) is a straggler", output)) == {"rank 2"}


def test_where_no_rank_is_slow_nobody_is_named(tmp_path: Path, soon: dict[str, str]) -> None:
    words = ("--nproc-per-node", "4", "--", training(tmp_path, (), 2.0, for_s=LOOKED_S))
    ended = launched("run", *words, env=soon)
    assert "straggler" not in ended.stderr


def test_a_straggler_is_in_the_log_once_and_in_events_metrics_and_status(
    tmp_path: Path, soon: dict[str, str]
) -> None:
    events, port = tmp_path / "events", free_port()
    watched = ("--events", str(events), "--metrics-port", str(port))
    with run(soon, *watched, "--", training(tmp_path, (1,), 3.0, step_s=0.1)) as job:
        job.read_until(r"rank 1 \(node 0\) is a straggler: ")
        told = json.loads(launch("status", "--pid", str(job.pid), "--json").stdout)
        assert not violations("status", told)
        (one,) = told["job"]["stragglers"]
        assert (one["rank"], one["node"]) == (1, 0)
        assert one["late"] > one["steps"] / 2
        assert 0.02 < one["median_s"] <= one["p95_s"]
        assert told["launchers"][0]["stragglers"][0]["rank"] == 1
        assert "     rank 1 (node 0) is a straggler: " in launch("status", "--pid", str(job.pid)).stdout
        assert 'trainer_launch_straggler{rank="1",node="0"} 1.0\n' in metrics(port)
        eventually(lambda: "straggler" in events.read_text(), events.read_text)
        job.signal(signal.SIGTERM)
        _, output = job.end()
    assert output.count("is a straggler") == 1
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "straggler"]
    assert not violations("event", line)
    assert (line["rank"], line["node"]) == (1, 0)


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())
