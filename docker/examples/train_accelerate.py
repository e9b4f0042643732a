"""Train a small language model with Hugging Face's Accelerate, on text that every machine has.

    python train_accelerate.py                                          # alone
    trainer-launch rehearse --nodes 2 -- train_accelerate.py
    trainer-launch rehearse -f pytorchjob-accelerate.yaml               # a master and a worker of the v1 operator

The launcher starts this script itself: the Accelerator finds torch's variables, and what `accelerate launch` would
set for the script (`ACCELERATE_MIXED_PRECISION` and the like) goes into the pod's `env`. `accelerate launch` in
front of it works as well.
The text is the source code of Python's own standard library. With `--checkpoints FOLDER`, on a disk that all nodes
share, the run continues where the last one ended. On SIGTERM, to any rank, all save after the step they are in.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
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


def newest(folder: Path | None) -> int:
    """The step of the newest checkpoint; 0 when there is none."""
    found = folder.glob("step-*") if folder else ()
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write a checkpoint, whole or not at all; the two newest are kept."""
    unfinished = folder / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        place = folder / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        unfinished.replace(place)
        for old in sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows per process and step (default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save in here and resume from it")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {size}: {accelerator.distributed_type.value}", flush=True)
    torch.manual_seed(1)
    model = new_model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    text, step, stopped = read_text().to(accelerator.device), newest(args.checkpoints), False
    if step:
        accelerator.load_state(str(args.checkpoints / f"step-{step}"))
        if rank == 0:
            print(f"resumed at step {step} from {args.checkpoints}", flush=True)
    while step < args.steps and not stopped:
        draw = torch.Generator().manual_seed(step * 1_000 + rank)  # a resumed run reads on
        places = torch.randint(len(text) - BEFORE, (args.batch, 1), generator=draw).to(accelerator.device)
        rows = text[places + torch.arange(BEFORE + 1, device=accelerator.device)]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        told = torch.tensor([loss.item(), float(len(signals))], device=accelerator.device)
        everyones, asked = accelerator.reduce(told, "mean").tolist()
        stopped = asked > 0  # the same answer on every rank
        report(step=step, progress=step / args.steps, metrics={"loss": everyones})
        if rank == 0 and (step % 25 == 0 or stopped):
            print(f"step {step}/{args.steps}  loss {everyones:.3f}", flush=True)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps or stopped):
            save(accelerator, args.checkpoints, step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
