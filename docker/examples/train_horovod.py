"""Train a small language model with Horovod's elastic state, on text that every machine has.

    horovodrun -np 2 --min-np 1 --max-np 3 --host-discovery-script ./discover_hosts.sh python train_horovod.py
    trainer-launch rehearse -f mpijob-horovod-elastic.yaml

The model predicts a byte from the three before it; the text is the source code of Python's own standard library.
Every `--commit-every` steps the state is committed: when a worker is lost, the others go on from there, in memory
and without a restart. With `--checkpoint PATH` rank 0 also writes each commit to a file, whole or not at all, from
which a new start of the whole job resumes. What a rank reads follows from (step, rank), whoever comes and goes.
"""

from __future__ import annotations

import argparse
import os
import socket
import sysconfig
from pathlib import Path

import horovod.torch as hvd  # type: ignore[import-not-found]
import torch
from torch import nn

VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
CONTEXT = 3
TEXT_BYTES = 1_000_000


def read_text() -> torch.Tensor:
    """The standard library's modules in order of name, the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


def batch(text: torch.Tensor, step: int, rank: int, size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank reads in a step: bytes before, and the byte that comes next."""
    dice = torch.Generator().manual_seed(step * 1_000 + rank)
    places = torch.randint(len(text) - CONTEXT, (size, 1), generator=dice)
    rows = text[places + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


def save(path: Path, state: hvd.elastic.TorchState) -> None:
    """Write the checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    content = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
    torch.save(content, temporary)
    temporary.replace(path)


def say(text: str) -> None:
    """Print a whole line at once."""
    print(text + "\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save to this file and resume from it")
    parser.add_argument("--commit-every", type=int, default=10, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    text = read_text()
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 128),
        nn.ReLU(),
        nn.Linear(128, VOCABULARY),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    step = 0
    if args.checkpoint and args.checkpoint.exists():
        content = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        step = int(content["step"])
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=step)
    host = os.environ.get("HOSTNAME") or socket.gethostname()

    # Starts again from the last commit whenever the workers change.
    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        say(f"rank {hvd.rank()} of {hvd.size()} on {host} begins at step {state.step}")
        while state.step < args.steps:
            before, after = batch(text, state.step, hvd.rank())
            loss = nn.functional.cross_entropy(state.model(before), after)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.step += 1
            if state.step % args.commit_every == 0 or state.step == args.steps:
                mean = hvd.allreduce(loss.detach(), name="loss").item()
                if hvd.rank() == 0:
                    if args.checkpoint:
                        save(args.checkpoint, state)
                    say(f"step {state.step}/{args.steps}  loss {mean:.3f}  workers {hvd.size()}")
                state.commit()  # after this, and only after this, others may join

    train(state)
    say(f"done: rank {hvd.rank()} of {hvd.size()} on {host}")


if __name__ == "__main__":
    main()
