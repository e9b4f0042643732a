"""Faults of the pods' own network and names, in real jobs of torch: what the job makes of each."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started, script, start
from tests.conftest import require
from trainer_launch.rehearsal import pod_isolation

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/rehearsal/test_networking.py"),
]

# Trains until it is told that it is enough; goes on from its checkpoint.
TRAIN = """
import os, sys, time, torch
import torch.distributed as dist
folder = sys.argv[1]
dist.init_process_group("gloo")
rank, checkpoint = dist.get_rank(), os.path.join(folder, "checkpoint")
step = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
enough = torch.zeros(20_001)
while not enough[0]:
    began = time.monotonic()
    enough = torch.full((20_001,), float(rank == 0 and os.path.exists(os.path.join(folder, "enough"))))
    dist.all_reduce(enough)
    step += 1
    if rank == 0:
        with open(checkpoint + ".new", "w") as file: file.write(str(step))
        os.replace(checkpoint + ".new", checkpoint)
        print(f"step {step} took {time.monotonic() - began:.4f}", flush=True)
    time.sleep(0.05)
"""
STEP = r"step \d+ took ([0-9.]+)"


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    machine = pod_isolation.capability()
    require(not machine.why_not, f"needs namespaces and veth: {machine}")


@contextmanager
def job(folder: Path, fault: str, *flags: str, nodes: int = 2, text: str = TRAIN) -> Iterator[Started]:
    flags = ("--fault", fault, *flags)
    words = ("rehearse", "--nodes", str(nodes), *flags, "--", script(folder, text), str(folder))
    with start(*words, env={"TMPDIR": str(folder)}) as started:
        yield started


def enough(folder: Path) -> None:
    (folder / "enough").touch()


def test_a_job_waits_for_names_that_come_late_and_says_for_what(tmp_path: Path) -> None:
    enough(tmp_path)
    with job(tmp_path, "delay dns 15s", "--log-level", "info") as running:
        said = running.ends_with(0, 120)
    assert said.index("fault: delay dns 15s") < said.index("no address for local-node-0-0.local yet")
    assert said.startswith("[trainer-launch] fault: delay dns 15s"), "before anybody could ask for a name"
    assert said.index("fault ended") < said.index("step 1 took")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: int) -> None:
    with job(tmp_path, "partition node=1 at=1h") as running, contextlib.ExitStack() as held:
        running.read_until(STEP)
        below = psutil.Process(running.pid).children(recursive=True)
        pids = [running.pid, *(child.pid for child in below)]
        networks = {network_of(pid) for pid in pids} - {None}
        for pid in pids:  # while a namespace is open, no other one can get its number
            with contextlib.suppress(OSError):
                held.callback(os.close, os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        running.signal(number)
        code, said = running.end()
        assert code == 128 + number, said
        assert len(networks) == 3, "one for each pod, and one for the router"
        assert not networks & {network_of(pid) for pid in psutil.pids()}
    assert not list(tmp_path.glob("trainer-launch-rehearsal-*"))


def network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
