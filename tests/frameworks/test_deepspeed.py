"""DeepSpeed on CPUs: its script under our torch engine, and by the `deepspeed` command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, changed, got_over, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("deepspeed-master-0", "deepspeed-worker-0")
TYPED = "deepspeed, --num_gpus, '1', --no_local_rank, train_deepspeed.py"


def test_a_script_of_deepspeed_gets_over_the_loss_of_a_pod_while_the_other_stays() -> None:
    output = got_over("deepspeed", "pytorchjob-deepspeed.yaml", PODS[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)]
    told = losses(output)
    assert told[0] > 2.5 > 2.2 > told[-1], "a model that knows nothing has 5.55"


def test_the_deepspeed_command_gets_over_the_loss_of_a_pod_and_gives_its_own_variables(tmp_path: Path) -> None:
    manifest = changed(
        "pytorchjob-deepspeed.yaml",
        tmp_path,
        lambda text: text.replace("[train_deepspeed.py", f"[{TYPED}", 1),
    )
    output = got_over("deepspeed", manifest, PODS[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)], output
