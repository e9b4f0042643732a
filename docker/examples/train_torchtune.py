"""A recipe for torchtune: train a tiny Llama on text that every machine has.

    tune run --nproc_per_node 2 train_torchtune.py --config train_torchtune.yaml
    trainer-launch rehearse --nodes 2 -- tune run --nproc_per_node 1 train_torchtune.py --config …

`trainer-launch run -- tune run …` starts the workers itself, and each of them runs the recipe as torchtune would.
The run continues where `checkpoint` ended: rank 0 writes the file whole or not at all.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchtune import config

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Train up to `cfg.steps`."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}", flush=True)
    torch.manual_seed(cfg.seed)
    model = DistributedDataParallel(config.instantiate(cfg.model))
    optimizer = config.instantiate(cfg.optimizer, model.parameters())
    stdlib = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text, step, saved = torch.frombuffer(bytearray(stdlib[:1_000_000]), dtype=torch.uint8), 0, Path(cfg.checkpoint)
    if saved.exists():
        kept = torch.load(saved)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
        if rank == 0:
            print(f"resumed at step {step} from {saved}", flush=True)
    while step < cfg.steps:
        draw = torch.Generator().manual_seed(step * 1_000 + rank)  # a resumed run reads on
        length = cfg.model.max_seq_len
        places = torch.randint(len(text) - length, (cfg.batch_size, 1), generator=draw)
        rows = text[places + torch.arange(length + 1)].long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report(step=step, progress=step / cfg.steps, metrics={"loss": loss.item()})
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{cfg.steps}  loss {loss.item():.3f}", flush=True)
        if rank == 0 and (step % cfg.save_every == 0 or step == cfg.steps):
            saved.parent.mkdir(parents=True, exist_ok=True)
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(content, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    # The model must not hold the group's last reference: torch would free the group with Python's lock held, and
    # wait there for a thread of gloo that may need this lock too (https://github.com/pytorch/pytorch/issues/56297).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(recipe_main())
