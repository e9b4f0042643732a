"""A training script whose survivors keep their state: each rank shows its generations, and at last a hash of all.

usage: keeping.py STEPS FOLDER FAULTS; FAULTS is JSON, {step: [rank, what]}, and each comes once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import trainer_launch

steps, folder, faults = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "losses": []}


def fails(step: int, rank: int) -> None:
    """Let this rank fail as it is told, once."""
    who, what = faults.get(str(step), (None, None))
    mark = folder / f"failed-{step}"
    if who not in (rank, "all") or mark.exists():
        return
    if who != "all":
        mark.touch()
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("no luck")
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(600)


def average(rank_loss: torch.Tensor, size: int) -> float:
    """Make gradients and the loss the mean of all ranks, in an order that is always the same."""
    tensors = [each.grad for each in model.parameters()]
    flat = torch.cat([*(each.reshape(-1) for each in tensors), rank_loss.reshape(1)])
    distributed.all_reduce(flat)
    flat /= size
    at = 0
    for each in tensors:
        each.copy_(flat[at : at + each.numel()].view_as(each))
        at += each.numel()
    return float(flat[-1])


for generation in trainer_launch.generations():
    with generation:
        distributed.init_process_group("gloo")
        generation.share(state)
        shown = {"generation": generation.number, "rank": generation.rank, "of": generation.world_size}
        shown |= {"kept": generation.kept, "new": generation.is_new, "step": state["step"], "pid": os.getpid()}
        print(f"generation {json.dumps(shown)}", flush=True)
        while state["step"] < steps:
            fails(state["step"], generation.rank)
            inputs = torch.randn(
                4, 8, generator=torch.Generator().manual_seed(state["step"] * 100 + generation.rank)
            )
            loss = model(inputs).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                mean = average(loss.detach(), generation.world_size)
            optimizer.step()
            scheduler.step()
            state["losses"] = [*state["losses"], mean]
            state["step"] += 1
content = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
digest = hashlib.sha256(content + repr(state["losses"]).encode()).hexdigest()
print(f"end {digest[:20]}", flush=True)
