"""Lightning Fabric's `fabric run` and Hugging Face's `trl sft`, as they are, in rehearsals of two pods."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import Started
from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
FABRIC = """
from lightning.fabric import Fabric

fabric = Fabric()
print(f"rank {fabric.global_rank} of {fabric.world_size}", flush=True)
fabric.barrier()
"""
# A tiny model, its tokenizer and a data set, made without network.
TINY = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
fast.save_pretrained(folder / "model")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=len(words), num_attention_heads=2, num_key_value_heads=2, **sizes)
LlamaForCausalLM(config).save_pretrained(folder / "model")
(folder / "data").mkdir()
lines = [json.dumps({"text": f"number {n} is {n * n}"}) for n in range(64)]
(folder / "data" / "train.jsonl").write_text("\\n".join(lines))
"""
TRL = (
    "trl sft --multi_gpu --num_machines 2 --machine_rank 0 --num_processes 2 --main_process_port 0 "
    "--model_name_or_path model --dataset_name data --output_dir out --max_steps 3 --use_cpu true "
    "--report_to none --save_strategy no --bf16 false"
)


def rehearsed(framework: str, folder: Path, line: str) -> tuple[int, str]:
    """A job of two pods that run this line in this folder: exit code and output.

    On a busy machine torch 2.13 may lock itself up at a program's end: gloo's thread drops a tensor of Python's,
    the main thread, in DDP's destructor, waits for that thread and holds the interpreter (pytorch#56297). Such a
    rank is ended, and both train again.
    """
    words = ("local", "--nodes", "2", "--hang-timeout", "30", "--", *line.split())
    path = f"{Path(frameworks.python(framework)).parent}:{os.environ['PATH']}"
    env = frameworks.env({"PATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")})
    with Started(words, env, folder, frameworks.launcher(framework)) as job:
        return job.end(timeout_s=RUN_S)


def test_fabric_run_trains_with_the_ranks_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FABRIC)
    line = "fabric run --accelerator cpu --strategy ddp --devices 2 --num-nodes 2 train.py"
    code, output = rehearsed("lightning", tmp_path, line)
    assert code == 0, output
    assert set(re.findall(r"rank (\d) of 4", output)) == set("0123")


SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
}
TRAINER = """
import lightning

trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
"""


@pytest.mark.parametrize(
    "script", [FABRIC.replace("Fabric()", "Fabric(devices=2)\nfabric.launch()"), TRAINER], ids=["fabric", "trainer"]
)
def test_lightning_in_a_slurm_step_has_the_launchers_ranks_not_slurms(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    words = (*frameworks.launcher("lightning"), "run", "--nproc-per-node", "2", "--no-prefix", "--", "train.py")
    env = frameworks.env(SLURM_STEP)
    done = subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "contract=slurm engine=torch node=0/1 workers=2" in done.stderr
    assert set(re.findall(r"rank (\d) of 2", done.stdout)) == set("01")


def test_trl_sft_trains_with_the_ranks_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(TINY)
    subprocess.run([frameworks.python("trl"), "make.py", "."], cwd=tmp_path, env=frameworks.env(), check=True)
    code, output = rehearsed("trl", tmp_path, TRL)
    assert code == 0, output
    assert "[1:1] " in output, "the rank of the other pod"
    assert re.search(r"'train_loss': '?[0-9.]+", output), output
    assert (tmp_path / "out" / "model.safetensors").exists()
