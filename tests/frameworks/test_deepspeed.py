"""DeepSpeed: its script under our torch engine; the `deepspeed` command as a program like any other, on CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, Rehearsal, changed, got_over, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("deepspeed-master-0", "deepspeed-worker-0")


def test_a_script_of_deepspeed_gets_over_the_loss_of_a_pod_while_the_other_stays() -> None:
    output = got_over("deepspeed", "pytorchjob-deepspeed.yaml", PODS[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 50
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)]
    told = losses(output)
    assert told[0] > 2.5 > 2.2 > told[-1], "a model that knows nothing has 5.55"


def test_the_deepspeed_command_runs_as_any_program_once_on_each_node(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("".join(f"{pod} slots=1\n" for pod in PODS))
    typed = (
        f"[deepspeed, --hostfile, '{tmp_path}/hostfile', --no_ssh, --node_rank, $(RANK), --master_addr, "
        "$(MASTER_ADDR), --master_port, $(MASTER_PORT), train_deepspeed.py"
    )
    manifest = changed(
        "pytorchjob-deepspeed.yaml",
        tmp_path,
        lambda text: text.replace("[train_deepspeed.py", typed, 1).replace('"500"', '"100"'),
    )
    with Rehearsal("deepspeed", manifest) as job:
        code, output = job.ended()
    assert code == 0, output
    assert {f"rank {rank} of 2" for rank in (0, 1)} <= set(re.findall(r"rank \d of \d", output))
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 0)]
    assert "step 100/100" in output
