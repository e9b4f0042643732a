"""Train a small language model with DeepSpeed (ZeRO stage 1), on text that every machine has.

    trainer-launch rehearse --nodes 2 -- train_deepspeed.py
    trainer-launch rehearse -f pytorchjob-deepspeed.yaml                # a master and a worker of the v1 operator

The launcher starts this script itself, without the `deepspeed` command: DeepSpeed finds torch's variables. The
text is the source code of Python's own standard library. With `--checkpoints FOLDER`, on a disk that all nodes
share, the run continues where the last one ended. On SIGTERM, to any rank, all save after the step they are in.
"""

from __future__ import annotations

import argparse
import signal
import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
BEFORE = 8  # bytes that the next one is guessed from
TEXT_BYTES = 1_000_000


def read_text() -> torch.Tensor:
    """The standard library's modules in order of name, the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        nn.Flatten(),
        nn.Linear(16 * BEFORE, 128),
        nn.ReLU(),
        nn.Linear(128, VOCABULARY),
    )


def settings(batch: int) -> dict[str, object]:
    """DeepSpeed's own configuration."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }


def save(engine: Any, folder: Path, step: int) -> None:
    """Save all ranks' parts, and then name them: DeepSpeed itself does so as soon as rank 0 has saved its own."""
    tag = f"step-{step}"
    # It ends with a barrier: all have saved.
    engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step}, save_latest=False)
    if dist.get_rank() == 0:
        beside = folder / "latest.new"
        beside.write_text(tag)
        beside.replace(folder / "latest")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows per process and step (default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save in here and resume from it")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--local_rank", help="the deepspeed command adds it; LOCAL_RANK says the same")
    args = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    if not torch.cuda.is_available():  # else DeepSpeed compiles an operation for it first, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}", flush=True)
    torch.manual_seed(1)
    model = new_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(args.batch))
    text, step, stopped = read_text().to(engine.device), 0, False
    if args.checkpoints and (args.checkpoints / "latest").exists():  # written last: what it names is whole
        _, kept = engine.load_checkpoint(str(args.checkpoints))
        step = kept["step"]
        if rank == 0:
            print(f"resumed at step {step} from {args.checkpoints}", flush=True)
    while step < args.steps and not stopped:
        draw = torch.Generator().manual_seed(step * 1_000 + rank)  # a resumed run reads on
        places = torch.randint(len(text) - BEFORE, (args.batch, 1), generator=draw).to(engine.device)
        rows = text[places + torch.arange(BEFORE + 1, device=engine.device)]
        loss = nn.functional.cross_entropy(engine(rows[:, :-1]), rows[:, -1])
        engine.backward(loss)
        engine.step()
        step += 1
        told = torch.tensor([loss.item(), float(len(signals))], device=engine.device)
        dist.all_reduce(told)
        everyones, asked = (told / size).tolist()
        stopped = asked > 0  # the same answer on every rank
        report(step=step, progress=step / args.steps, metrics={"loss": everyones})
        if rank == 0 and (step % 25 == 0 or stopped):
            print(f"step {step}/{args.steps}  loss {everyones:.3f}", flush=True)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps or stopped):
            save(engine, args.checkpoints, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
