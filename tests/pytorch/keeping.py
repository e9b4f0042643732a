"""A training script whose survivors keep their state: each rank shows its generations, and at last a hash of all.

usage: keeping.py STEPS FOLDER FAULTS [GENERATIONS]; FAULTS is JSON, {step: [rank, what]}, and each comes once. It
makes more steps until there were GENERATIONS, so that a fault from outside comes in time.

A step has as many samples as any job has ranks, or more, and adds their gradients in one order: the result is equal
to the last bit however many ranks there are.
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

SAMPLES = 8
steps, folder, faults = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
generations = int(sys.argv[4]) if sys.argv[4:] else 1
folder.mkdir(exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
sizes = [each.numel() for each in model.parameters()]
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


def gradients(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Each sample's gradients, and its loss as the last number: one row for each, of all ranks."""
    parameters = [*model.parameters()]
    rows = torch.zeros(SAMPLES, sum(sizes) + 1)
    for sample in range(rank, SAMPLES, world_size):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 100 + sample))
        loss = model(inputs).pow(2).mean()
        own = torch.autograd.grad(loss, parameters)
        rows[sample] = torch.cat([*(each.reshape(-1) for each in own), loss.detach().reshape(1)])
    distributed.all_reduce(rows)
    return rows


def apply(rows: torch.Tensor) -> float:
    """Take the optimizer's step with the mean of all samples; their mean loss."""
    mean = rows.sum(0) / SAMPLES
    for parameter, gradient in zip(model.parameters(), mean[:-1].split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    optimizer.step()
    scheduler.step()
    return float(mean[-1])


for generation in trainer_launch.generations():
    with generation:
        distributed.init_process_group("gloo")
        generation.share(state)
        distributed.barrier()  # so that a fault which comes with this line hits nobody within `share`
        shown = {"generation": generation.number, "rank": generation.rank, "of": generation.world_size}
        shown |= {"kept": generation.kept, "new": generation.is_new, "step": state["step"], "pid": os.getpid()}
        print(f"generation {json.dumps(shown)}", flush=True)
        while state["step"] < steps or generation.number < generations:
            fails(state["step"], generation.rank)
            mean = apply(gradients(state["step"], generation.rank, generation.world_size))
            state["losses"] = [*state["losses"], mean]
            state["step"] += 1
content = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
digest = hashlib.sha256(content + repr(state["losses"]).encode()).hexdigest()
print(f"end {digest[:20]}", flush=True)
distributed.destroy_process_group()  # without it torch 2.4 may abort while Python shuts down
