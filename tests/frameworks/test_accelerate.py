"""Hugging Face's Accelerate: its script under our torch engine, named itself or by `accelerate launch`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, changed, got_over, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("accelerate-master-0", "accelerate-worker-0")
# On CPUs it calls torchrun only if it is told that there are GPUs.
OPTIONS = (
    "accelerate, launch, --multi_gpu, --num_processes, '2', --num_machines, '2', --machine_rank, $(RANK), "
    "--main_process_ip, $(MASTER_ADDR), --main_process_port, $(MASTER_PORT), --mixed_precision, 'no', "
    "--dynamo_backend, 'no', train_accelerate.py"
)
CONFIGURED = "accelerate, launch, --config_file, '{folder}/two.yaml', --main_process_port, '0', train_accelerate.py"
CONFIGURATION = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 2
num_processes: 2
main_process_ip: null
same_network: true
use_cpu: false
"""


def gets_over_the_loss(manifest: str | Path) -> None:
    # What was saved at step 100 is whole at step 125.
    output = got_over("accelerate", manifest, PODS[1], after=r"step 125/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 100
    assert [lives(output, pod) for pod in PODS] == [(1, 0), (1, 1)]
    told = losses(output)
    assert told[0] > 2.5 > 2.2 > told[-1], "a model that knows nothing has 5.55"
    assert {f"rank {rank} of 2: MULTI_CPU" for rank in (0, 1)} <= set(re.findall(r"rank \d of \d: \w+", output))


def test_a_script_of_accelerate_gets_over_the_loss_of_a_pod_while_the_other_stays() -> None:
    gets_over_the_loss("pytorchjob-accelerate.yaml")


@pytest.mark.parametrize("typed", [OPTIONS, CONFIGURED], ids=["options", "configuration file"])
def test_accelerate_launch_as_it_is_gets_over_the_loss_of_a_pod(typed: str, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(CONFIGURATION)
    manifest = changed(
        "pytorchjob-accelerate.yaml",
        tmp_path,
        lambda text: text.replace("[train_accelerate.py", f"[{typed.format(folder=tmp_path)}", 1),
    )
    gets_over_the_loss(manifest)
