"""How a torchrun of ours knows how its workers ended, though torch may collect them first."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.cli.launching import clean_env
from tests.conftest import require

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.long("tests/pytorch/torchrun/test_supervised.py")]

# Each worker ends with a code of its own and is collected before anybody else could look; then torch tells of it.
SCRIPT = """
import json, logging, subprocess, sys
from trainer_launch.pytorch.torchrun_rendezvous import Deaths

codes, named = json.loads(sys.argv[1]), json.loads(sys.argv[2])
started = []
deaths = Deaths(started.append)
pids = []
for rank, code in enumerate(codes):
    end = f"import os, sys; os.kill(os.getpid(), {-code}) if {code} < 0 else sys.exit({code})"
    worker = subprocess.Popen([sys.executable, "-c", end])
    pids.append(worker.pid)
    assert worker.wait() == code
    about = {"worker_id": str(worker.pid), "global_rank": rank, "metadata": json.dumps({"local_rank": [rank]})}
    event = {"name": "torchelastic.worker.START", "metadata": about}
    logging.getLogger("torchelastic-events-null").warning(json.dumps(event))
assert len(started) == len(codes)
if named is not None:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").error(
        "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s", codes[named], named, pids[named], "train.py"
    )
first = deaths.first()
print(json.dumps(first and [first.rank, first.exit_code, first.signal]))
assert deaths.first() is None, "it is told once"
deaths.stop()
"""


@pytest.mark.parametrize(
    ("codes", "named", "first"),
    [
        ("[9]", "0", "[0, 9, null]"),
        ("[0, 9]", "1", "[1, 9, null]"),
        ("[-9, 0]", "0", "[0, null, 9]"),
        ("[0, 0]", "null", "null"),
    ],
)
def test_torchs_log_tells_how_a_worker_ended_that_torch_collected_first(codes: str, named: str, first: str) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    words = [sys.executable, "-c", SCRIPT, codes, named]
    ran = subprocess.run(words, env=clean_env(), capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, first), ran.stderr
