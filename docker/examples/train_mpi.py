"""Train a bigram language model by softmax regression, data-parallel over MPI, on text that every machine has.

    mpirun -n 4 python train_mpi.py
    trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- mpirun python train_mpi.py

The text is the source code of Python's own standard library. With `--checkpoint PATH` the run continues where the
last one ended: rank 0 writes the file whole or not at all, and sends what it finds there to the others.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import sysconfig
from pathlib import Path

import numpy as np
from mpi4py import MPI

VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
TEXT_BYTES = 1_000_000


def read_text() -> np.ndarray:
    """The standard library's modules in order of name, the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return np.frombuffer(text[:TEXT_BYTES], dtype=np.uint8).astype(np.int64)


def gradient(weights: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss of predicting each byte from the one before, and its gradient."""
    logits = weights[before]
    logits = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(logits)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(after))
    loss = -np.log(chances[rows, after]).mean()
    chances[rows, after] -= 1
    slope = np.zeros_like(weights)
    np.add.at(slope, before, chances / len(after))
    return float(loss), slope


def save(path: Path, weights: np.ndarray, step: int) -> None:
    """Write the checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, weights=weights, step=step)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content.getvalue())
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="train up to this step (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save to this file and resume from it")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    print(f"rank {rank} of {size} on {os.environ.get('HOSTNAME') or socket.gethostname()}", flush=True)

    start = (np.zeros((VOCABULARY, VOCABULARY)), 0)
    if rank == 0 and args.checkpoint and args.checkpoint.exists():
        with np.load(args.checkpoint) as content:
            start = content["weights"], int(content["step"])
        print(f"resumed at step {start[1]}", flush=True)
    weights, step = world.bcast(start)
    text = read_text()
    while step < args.steps:
        places = np.random.default_rng((step, rank)).integers(len(text) - 1, size=1024)
        loss, slope = gradient(weights, text[places], text[places + 1])
        mean = np.empty_like(slope)
        world.Allreduce(slope, mean)
        weights -= 100.0 * mean / size
        loss = world.allreduce(loss) / size
        step += 1
        if rank == 0 and (step % args.every == 0 or step == args.steps):
            if args.checkpoint:
                save(args.checkpoint, weights, step)
            print(f"step {step}/{args.steps}  loss {loss:.3f}", flush=True)
    if rank == 0:
        last = text[-65_536:]
        print(f"done: loss {gradient(weights, last[:-1], last[1:])[0]:.3f} at the end of the text", flush=True)


if __name__ == "__main__":
    main()
