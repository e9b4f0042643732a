"""SIGTERM at any point of a torch job's life: the pod ends in time with 143, and nothing of it survives."""

from __future__ import annotations

import re
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.launching import Started, script, start
from tests.ports import free_port
from tests.process.world import end_all, survivors
from tests.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.long("tests/cli/test_torch.py")]

GRACE_S = 8.0
IN_TIME_S = 30.0  # of what torch itself gives a worker that does not end, nothing is waited for
TRAIN = """
import os, signal, sys, time
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("worker %s rank %s start %s\\n" % (os.getpid(), rank, start), end="", flush=True)
{body}
"""
IMPORTS = "import torch\ntime.sleep(60)"
FAILS_ONCE = "if start == '0':\n    sys.exit(3)\ntime.sleep(60)"
FAILS_BESIDE_ONE_THAT_SAVES = """
ready = os.path.join(os.path.dirname(__file__), "ready")
if rank == "0":
    signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), time.sleep(1), sys.exit(0)))
    open(ready, "w").close()
    while True: time.sleep(0.1)
while not os.path.exists(ready):
    time.sleep(0.05)
sys.exit(3)
"""
RANK_0_LEAVES = "if rank == '1':\n    time.sleep(60)"


Point = Callable[[Started], object]  # waits until the launcher is there


def seen(pattern: str) -> Point:
    return lambda launcher: launcher.read_until(pattern)


def worker_gone(launcher: Started) -> None:
    (pid,) = launcher.read_until(r"worker (\d+) rank 0")
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the worker is collected")


def environment(nodes: int, node: int, port: int, token: str) -> dict[str, str]:
    job = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1" if nodes > 1 else "2", "PET_MASTER_PORT": str(port)}
    return job | {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.2", "TOKEN": token}


@pytest.mark.parametrize(
    ("body", "present", "nodes", "point"),
    [
        pytest.param(IMPORTS, 1, 1, seen("connected"), id="while-the-fork-server-imports"),
        pytest.param(IMPORTS, 1, 2, seen("1 of 2 nodes, waiting up to"), id="while-nodes-are-awaited"),
        pytest.param(IMPORTS, 1, 1, seen(r"worker \d+"), id="while-workers-import"),
        pytest.param(FAILS_ONCE, 1, 1, seen("rank [01] ended with"), id="between-two-starts"),
        pytest.param(FAILS_BESIDE_ONE_THAT_SAVES, 1, 1, seen("saving"), id="while-a-failure-stops-the-others"),
        pytest.param(RANK_0_LEAVES, 2, 2, worker_gone, id="at-the-barrier-of-the-end"),
    ],
)
def test_asked_to_stop(body: str, present: int, nodes: int, point: Point, tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN.format(body=body))
    port, token = free_port(), uuid.uuid4().hex
    others = [environment(nodes, node, port, uuid.uuid4().hex) for node in range(1, present)]
    options = ("run", "--grace", str(GRACE_S), "--", train)
    try:
        with start(*options, env=environment(nodes, 0, port, token)) as launcher:
            beside = [start(*options, env=env) for env in others]
            for other in beside:
                other.__enter__()
            try:
                point(launcher)
                asked_s = time.monotonic()
                launcher.signal(signal.SIGTERM)
                code, output = launcher.end()
            finally:
                for other in beside:
                    other.__exit__(None, None, None)
        assert code == 143, output
        assert time.monotonic() - asked_s < IN_TIME_S, output
        assert survivors(token) == []
        assert not re.search("Traceback", output), output
        if body == IMPORTS:
            assert "sent SIGKILL" not in output, f"whoever only imports ends when asked:\n{output}"
    finally:
        for env in (*others, {"TOKEN": token}):
            end_all(env["TOKEN"])
