"""Run a Python function as a distributed job in this pod or on this machine: `launch(func, Elastic(...))`.

    python launch_function.py                                                   # two workers on this machine
    trainer-launch rehearse --nodes 2 --engine plain -- python launch_function.py  # in each of two pods

Where a platform made several pods, each calls it and they meet. `create_job.py` submits a function to a cluster.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from train_charlm import CharModel, Training, loss_of, read_text  # type: ignore[import-not-found]

from trainer_launch import Elastic, launch


def train(name: str, threads: str, steps: int = 100) -> float:
    """Train a small language model on Python's own sources, from the last checkpoint on; the loss at its end."""
    torch.set_num_threads(int(threads))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}, pid {os.getpid()}", flush=True)
    torch.manual_seed(1)
    training = Training(model := CharModel(width=32), torch.optim.AdamW(model.parameters(), lr=5e-3))
    checkpoint = Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir()), f"{name}.pt")
    if checkpoint.exists():
        training.load(checkpoint.read_bytes(), torch.device("cpu"))
        if rank == 0:
            print(f"resumed at step {training.step}", flush=True)
    text = read_text()
    while training.step < steps:
        draw = torch.Generator().manual_seed(training.step * size + rank)
        starts = torch.randint(len(text) - 17, (4,), generator=draw)
        loss = loss_of(model, text[starts[:, None] + torch.arange(17)].long())
        training.optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        training.optimizer.step()
        training.step += 1
        if rank == 0 and training.step % 5 == 0:
            training.save(checkpoint)
            print(f"step {training.step}/{steps}  loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        last = float(loss_of(model, text[-4096:].reshape(16, 256).long()))
    dist.barrier()
    dist.destroy_process_group()
    return last


if __name__ == "__main__":
    losses = launch(train, Elastic(nproc_per_node=2, max_restarts=1), "charlm", "1")
    print("losses by rank:", ", ".join(f"{rank}: {loss:.3f}" for rank, loss in sorted(losses.items())), flush=True)
