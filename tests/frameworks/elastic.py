"""An elastic Horovod training: steps that continue from committed state, whoever comes and goes.

`elastic.py STEPS SECONDS`: so many steps in all, so long for each; each line tells the step, rank and size.
"""

from __future__ import annotations

import os
import sys
import time

import horovod.torch as hvd  # type: ignore[import-not-found]
import torch

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < STEPS:
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ones")
        assert int(total) == hvd.size()
        state.step += 1
        said = f"step {state.step} rank {hvd.rank()} size {hvd.size()} on {os.uname().nodename}\n"
        print(said, end="", flush=True)  # in one piece
        time.sleep(SECONDS)
        state.commit()


hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
train(hvd.elastic.TorchState(model, optimizer, step=0))
print(f"done rank {hvd.rank()}\n", end="", flush=True)
