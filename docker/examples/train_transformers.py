"""Train a tiny GPT-2 with the Trainer of Hugging Face's Transformers, on text that every machine has.

    trainer-launch rehearse --nodes 2 -- train_transformers.py --checkpoints /tmp/transformers

The launcher starts this script itself, without `accelerate launch`: the Trainer finds torch's variables. The model
is made from a configuration in the code, so nothing is downloaded. With `--checkpoints FOLDER`, on a disk that all
nodes share, the run continues where the last one ended: at the newest checkpoint that is complete.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
LENGTH = 32


class Text(Dataset[dict[str, torch.Tensor]]):
    """The standard library's modules in order of name, in pieces; the same on every node."""

    def __init__(self) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        self.rows = torch.frombuffer(bytearray(text[: 1_000_000 // LENGTH * LENGTH]), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.rows) // LENGTH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = self.rows[number * LENGTH : (number + 1) * LENGTH].long()
        return {"input_ids": row, "labels": row}


class Progress(TrainerCallback):
    """Tell the launcher each step, and anyone who reads the log each tenth."""

    def on_train_begin(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        if state.global_step and state.is_world_process_zero:
            print(f"resumed at step {state.global_step}", flush=True)

    def on_step_end(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        report(step=state.global_step, progress=state.global_step / state.max_steps)

    def on_log(
        self, _: TrainingArguments, state: TrainerState, __: TrainerControl, logs: dict[str, float], **___: Any
    ) -> None:
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--checkpoints", default="checkpoints", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=20, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args()
    settings = TrainingArguments(
        output_dir=args.checkpoints,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=10,
        save_steps=args.save_every,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        seed=1,
    )
    print(f"rank {settings.process_index} of {settings.world_size}, pid {os.getpid()}", flush=True)
    torch.manual_seed(1)
    shape = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    trainer = Trainer(model=model, args=settings, train_dataset=Text(), callbacks=[Progress()])
    trainer.remove_callback(PrinterCallback)  # Progress prints
    trainer.train(resume_from_checkpoint=newest(Path(args.checkpoints)))


def newest(folder: Path) -> str | None:
    """The newest checkpoint that the Trainer finished: it writes its own state last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    return str(max(complete, key=lambda path: int(path.name.partition("-")[2]))) if complete else None


if __name__ == "__main__":
    main()
