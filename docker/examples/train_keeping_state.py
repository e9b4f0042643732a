"""A DDP job whose ranks keep their state when one of them is lost: no step is repeated, no checkpoint is read.

Rehearse it: trainer-launch rehearse --nodes 2 --nproc-per-node 2 --fault 'kill worker at=step:40' -- THIS_FILE
It runs under torchrun as well, where a lost rank is a restart from the last checkpoint.
"""

import os
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trainer_launch

STEPS, BATCH, SAVE_EVERY, CHECKPOINT = 120, 16, 50, os.environ.get("CHECKPOINT", "model.pt")


class Waves(Dataset):
    """Points of a wave; stands for your data."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((1,), index / 4096)
        return x, torch.sin(6.28 * x)


class Position:
    """Which samples come next, on which rank: a sampler whose position is a part of the state."""

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, 0

    def batches(self, rank: int, world_size: int) -> Iterator[list[int]]:
        """The indices of this rank's batches, from the position on; every rank counts all of them."""
        while True:
            epoch, start = divmod(self.taken, self.size)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
            yield order[start : start + BATCH * world_size][rank::world_size]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data, position = Waves(), Position(4096)
state = {"model": model, "optimizer": optimizer, "position": position, "step": 0}

for generation in trainer_launch.generations():  # once at the start, again each time a rank was lost
    with generation:  # a lost peer ends the block, not the process
        dist.init_process_group("gloo")
        if not generation.kept and os.path.exists(CHECKPOINT):  # nobody has the state in memory
            saved = torch.load(CHECKPOINT)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            position.taken, state["step"] = saved["taken"], saved["step"]
        generation.share(state)  # ranks that lack the newest state get it
        ddp = DistributedDataParallel(model)
        loader = iter(DataLoader(data, batch_sampler=position.batches(generation.rank, generation.world_size)))
        while state["step"] < STEPS:
            x, y = next(loader)
            loss = (ddp(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            position.taken += BATCH * generation.world_size
            state["step"] += 1  # at once: until here nothing of this step counts
            if generation.rank == 0:
                print("step", state["step"], "loss", round(loss.item(), 4), flush=True)
                trainer_launch.report(step=state["step"])
                if state["step"] % SAVE_EVERY == 0:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(saved | {"taken": position.taken, "step": state["step"]}, CHECKPOINT + ".new")
                    os.replace(CHECKPOINT + ".new", CHECKPOINT)  # whole or not at all
