"""Train a small language model with PaddlePaddle, data-parallel, on text that every machine has.

    python train_paddle.py                                              # alone
    python -m paddle.distributed.launch --nproc_per_node 2 train_paddle.py
    trainer-launch rehearse -f paddlejob-charlm.yaml                       # two workers of the v1 operator

The text is the source code of Python's own standard library. With `--checkpoint PATH` the run continues where the
last one ended: rank 0 writes the file whole or not at all, and sends what it finds there to the others. When a pod
is lost the others' collectives fail and they end, too; all go on from the checkpoint. On SIGTERM, to any rank,
rank 0 saves after the step they are in, and all end with 143: the job is not done.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import sysconfig
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes; a model that knows nothing has loss ln(256) = 5.55
BEFORE = 8  # bytes that the next one is guessed from
TEXT_BYTES = 1_000_000
ASKED_TO_STOP = 143


def read_text() -> np.ndarray:
    """The standard library's modules in order of name, the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return np.frombuffer(text[:TEXT_BYTES], dtype=np.uint8).astype(np.int64)


def rows_of(text: np.ndarray, places: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The bytes before each place, and the one there."""
    before = text[places[:, None] + np.arange(BEFORE)]
    return paddle.to_tensor(before), paddle.to_tensor(text[places + BEFORE])


def new_model() -> nn.Layer:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        nn.Flatten(),
        nn.Linear(16 * BEFORE, 128),
        nn.ReLU(),
        nn.Linear(128, VOCABULARY),
    )


def mean(*values: float) -> list[float]:
    """The mean of each value over all ranks."""
    sums = paddle.to_tensor(values, dtype="float32")
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return [float(value) / dist.get_world_size() for value in sums]


def of_rank_0(data: bytes) -> bytes:
    """What rank 0 passed, on every rank."""
    if dist.get_world_size() == 1:
        return data
    length = paddle.to_tensor([len(data)], dtype="int64")
    dist.broadcast(length, 0)
    if not int(length):
        return b""
    content = np.frombuffer(data, dtype=np.uint8) if dist.get_rank() == 0 else np.zeros(int(length), np.uint8)
    sent = paddle.to_tensor(content)
    dist.broadcast(sent, 0)
    return bytes(sent.numpy())


def save(path: Path, model: nn.Layer, optimizer: paddle.optimizer.Optimizer, step: int) -> None:
    """Write the checkpoint whole or not at all."""
    content = io.BytesIO()
    paddle.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content.getvalue())
    temporary.replace(path)


def train(args: argparse.Namespace) -> bool:
    """Train up to `--steps`, from the checkpoint if there is one; whether it was stopped before."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    rank, size = dist.get_rank(), dist.get_world_size()
    paddle.seed(1)
    model = new_model()
    optimizer = paddle.optimizer.Adam(3e-3, parameters=model.parameters())
    step, stopped = 0, False
    has_checkpoint = rank == 0 and args.checkpoint and args.checkpoint.exists()
    if data := of_rank_0(args.checkpoint.read_bytes() if has_checkpoint else b""):
        content = paddle.load(io.BytesIO(data))
        model.set_state_dict(content["model"])
        optimizer.set_state_dict(content["optimizer"])
        step = content["step"]
        if rank == 0:
            print(f"resumed at step {step} from {args.checkpoint}", flush=True)
    parallel = paddle.DataParallel(model) if size > 1 else model
    text = read_text()
    while step < args.steps and not stopped:
        draw = np.random.default_rng((step, rank))  # a resumed run reads on
        before, after = rows_of(text, draw.integers(len(text) - BEFORE, size=args.batch))
        loss = nn.functional.cross_entropy(parallel(before), after)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        step += 1
        everyones, asked = mean(float(loss), float(len(signals)))
        stopped = asked > 0  # the same answer on every rank
        report(step=step, progress=step / args.steps, metrics={"loss": everyones})
        is_last = stopped or step == args.steps
        if rank == 0 and (step % args.log_every == 0 or is_last):
            print(f"step {step}/{args.steps}  loss {everyones:.3f}", flush=True)
        if rank == 0 and args.checkpoint and (step % args.checkpoint_every == 0 or is_last):
            save(args.checkpoint, model, optimizer, step)
    return stopped


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows per process and step (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save to this file and resume from it")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=50, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        dist.init_parallel_env()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    return ASKED_TO_STOP if train(args) else 0


if __name__ == "__main__":
    sys.exit(main())
