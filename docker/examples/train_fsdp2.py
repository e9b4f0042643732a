"""Train a small language model with FSDP2 (`fully_shard`), on text that every machine has; checkpoints are sharded.

    torchrun --nproc-per-node 2 train_fsdp2.py
    trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- train_fsdp2.py --checkpoints /tmp/fsdp2

Each rank holds a part of each parameter and writes its own part with torch.distributed.checkpoint. All nodes share
the folder of `--checkpoints`; the run continues there where the last one ended, with more or fewer ranks, too. On
SIGTERM, to any rank, all save after the step they are in and exit with code 0.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
LENGTH = 32
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


class Model(nn.Module):
    """Which byte comes next: a transformer of two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(LENGTH, width) / 10)
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer(), layer()])
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss of guessing each byte but the first."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=rows.device)
        hidden = self.embed(rows[:, :-1]) + self.place
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), rows[:, 1:].flatten())


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write all ranks' parts; then rank 0 names the checkpoint, so that what `latest` names is complete."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(f"step-{step}")
        (folder / "latest.new").replace(folder / "latest")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Continue from the newest checkpoint; the step it was written at."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder / (folder / "latest").read_text())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save in here and resume from it")
    parser.add_argument("--save-every", type=int, default=20, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}, pid {os.getpid()}", flush=True)
    torch.manual_seed(1)
    model, mesh = Model().to(DEVICE), init_device_mesh(DEVICE.type, (size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stdlib = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(stdlib[:1_000_000]), dtype=torch.uint8).long().to(DEVICE)
    step, stopped = 0, False
    if args.checkpoints and (args.checkpoints / "latest").exists():
        step = load(args.checkpoints, model, optimizer)
        if rank == 0:
            print(f"resumed at step {step} from {args.checkpoints}", flush=True)
    while step < args.steps and not stopped:
        draw = torch.Generator().manual_seed(step * 1_000 + rank)  # a resumed run reads on
        places = torch.randint(len(text) - LENGTH, (16, 1), generator=draw).to(DEVICE)
        loss = model(text[places + torch.arange(LENGTH + 1, device=DEVICE)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        told = torch.tensor([loss.item(), float(len(signals))], device=DEVICE)
        dist.all_reduce(told)
        everyones, asked = (told / size).tolist()
        stopped = asked > 0  # the same answer on every rank
        report(step=step, progress=step / args.steps, metrics={"loss": everyones})
        if rank == 0 and (step == 1 or step % 10 == 0 or stopped):
            print(f"step {step}/{args.steps}  loss {everyones:.3f}", flush=True)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps or stopped):
            save(args.checkpoints, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
