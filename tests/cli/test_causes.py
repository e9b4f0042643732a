"""What a torch job is started again for, and what it is not, with real workers on two nodes."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest

from tests.cli.launching import script, start
from tests.conftest import require
from trainer_launch.host.net import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

# Each start leaves a mark. The error is told by torch's @record; rank 0 lives until it is stopped.
TRAIN = """
import os, sys, time
open(os.path.join({folder!r}, "start-" + os.environ["TORCHELASTIC_RESTART_COUNT"]), "a").close()
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        {ending}
    time.sleep(60)
main()
"""


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (
            "import not_there",
            1,
            "because the same ModuleNotFoundError has ended two starts in a row",
        ),
        ("sys.exit(2)", 2, "because its arguments are refused (exit code 2), two starts in a row"),
    ],
    ids=["ImportError", "argparse"],
)
def test_what_fails_the_same_way_each_time_is_not_started_ten_times(
    tmp_path: Path, ending: str, code: int, said: str
) -> None:
    train = script(tmp_path, TRAIN.format(folder=str(tmp_path), ending=ending))
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.2"}
    env |= {"PET_MASTER_PORT": str(free_port()), "PET_MAX_RESTARTS": "10"}
    words = [tmp_path / f"words-{node}" for node in range(2)]
    with contextlib.ExitStack() as pods:
        launchers = []
        for node in range(2):
            words[node].touch()
            options = ("--termination-log", str(words[node]), "--grace", "8")
            own = env | {"PET_NODE_RANK": str(node)}
            launchers.append(pods.enter_context(start("run", *options, "--", train, env=own)))
        codes = [launcher.end() for launcher in launchers]
    assert [ended for ended, _ in codes] == [138, code], codes
    assert len(list(tmp_path.glob("start-*"))) == 2
    innocent, guilty = (path.read_text() for path in words)
    assert innocent.startswith("reason=PeerLost node=0")
    assert "| rank 1 failed on node 1 (" in innocent
    assert f") with exit code {code}" in innocent
    assert f"not restarted, {said}" in innocent
    assert "rank=1 node=1" in guilty
    assert f"not restarted, {said}" in guilty
    if "import" in ending:
        assert "it said: ModuleNotFoundError: No module named 'not_there'" in innocent
        assert guilty.startswith("reason=ProgramError")
