"""Train a small language model with Lightning, on text that every machine has.

    trainer-launch rehearse --nodes 2 -- train_lightning.py --checkpoints /tmp/lightning

The launcher starts this script itself, once for each worker: Lightning recognises torchrun's variables and starts
no processes of its own. With `--checkpoints FOLDER`, on a disk that all nodes share, the run continues where the
last one ended: Lightning writes `last.ckpt` whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
LENGTH = 9  # bytes of a row: the last one is guessed from the others


class Model(lightning.LightningModule):
    """Which byte comes next: an embedding and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Linear(16 * (LENGTH - 1), 128)
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, 16), nn.Flatten(), wide, nn.ReLU(), nn.Linear(128, VOCABULARY)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        rows = batch[0].long()
        return nn.functional.cross_entropy(self.layers(rows[:, :-1]), rows[:, -1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def on_train_start(self) -> None:
        if self.global_step and self.global_rank == 0:
            print(f"resumed at step {self.global_step}", flush=True)

    def on_train_batch_end(self, outputs: Any, *_: object) -> None:
        step, steps, loss = self.global_step, self.trainer.max_steps, outputs["loss"].item()
        report(step=step, progress=step / steps, metrics={"loss": loss})
        if self.global_rank == 0 and step % 10 == 0:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)


def read_rows() -> TensorDataset:
    """The standard library's modules in order of name, in rows; the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return TensorDataset(torch.frombuffer(bytearray(text[:900_000]), dtype=torch.uint8).view(-1, LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="rows per process and step (default: %(default)s)")
    parser.add_argument("--checkpoints", default="checkpoints", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=20, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args()
    size, of_this_node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    print(f"rank {os.environ.get('RANK', '0')} of {size}, pid {os.getpid()}", flush=True)
    lightning.seed_everything(1)
    last = ModelCheckpoint(
        args.checkpoints,
        every_n_train_steps=args.save_every,
        save_last=True,
        save_top_k=0,  # only the last one
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=of_this_node,
        num_nodes=size // of_this_node,
        max_steps=args.steps,
        callbacks=[last],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(read_rows(), args.batch, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main()
