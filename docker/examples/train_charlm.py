"""Train a small character-level language model with DDP, on text that every machine has.

    python train_charlm.py                                    # one process
    torchrun --nproc-per-node 4 train_charlm.py               # four
    trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- train_charlm.py

The text is the source code of Python's own standard library, so nothing is downloaded. With `--checkpoint PATH` the
run continues where the last one ended, whatever ended it: rank 0 writes the file whole or not at all, and sends
what it finds there to the others, so only node 0 needs the disk. On SIGTERM, to any rank, all save after the step
they are in and leave with exit code 0. What a rank reads follows from (seed, step, rank): a resumed run reads on.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import socket
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from trainer_launch import report
except ImportError:  # an image without it, where torchrun starts this script

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY = 256  # bytes: any text will do, and a model that knows nothing has loss ln(256) = 5.55
TEXT_BYTES = 3_000_000
HELD_OUT_BYTES = 65_536  # the end of the text, never trained on


@dataclass(frozen=True)
class World:
    """Who this process is among all processes of the job, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> World:
        """Meet the other processes, as torchrun's variables say; alone when there are none."""
        env = os.environ
        rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        local_rank, local_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        has_gpus = torch.cuda.device_count() >= local_size
        device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
        if has_gpus:
            torch.cuda.set_device(device)
        if size > 1:
            dist.init_process_group("nccl" if has_gpus else "gloo")
        put(f"rank {rank} of {size} on {socket.gethostname()}, {device}, pid {os.getpid()}")
        return cls(rank, size, device)

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over all ranks."""
        sums = torch.tensor(values, device=self.device)
        if self.size > 1:
            dist.all_reduce(sums)
        means: list[float] = (sums / self.size).tolist()
        return means

    def bytes_of_rank_0(self, data: bytes) -> bytes:
        """What rank 0 passed, on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, 0)
        if not length.item():
            return b""
        buffer = bytearray(data if self.rank == 0 else int(length.item()))
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        sent = view.to(self.device)
        dist.broadcast(sent, 0)
        view.copy_(sent)
        return bytes(buffer)

    def leave(self) -> None:
        """End the process group; with it, this process may end."""
        if self.size > 1:
            time.sleep(0.2)  # gloo's threads drop their last tensors only now; as Python ends, that would abort it
            dist.destroy_process_group()

    def say(self, text: str) -> None:
        """Print one line (or block) for the whole job."""
        if self.rank == 0:
            put(text)


def put(text: str) -> None:
    """Print in one write: `print` makes two under `python -u`, and ranks that share a pipe would mix lines."""
    print(text + "\n", end="", flush=True)


class CharModel(nn.Module):
    """Which byte comes next: embedding, one GRU, and a linear layer."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.gru = nn.GRU(64, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, text: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.gru(self.embed(text), state)
        return self.out(hidden), state


@dataclass
class Training:
    """Everything a checkpoint holds: the model, its optimizer, and how far they are."""

    model: CharModel
    optimizer: torch.optim.Optimizer
    step: int = 0
    first_loss: float | None = None

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all: a crash, even of the machine, leaves the one before."""
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content |= {"step": self.step, "first_loss": self.first_loss}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def load(self, data: bytes, device: torch.device) -> None:
        """Go on from what `save` wrote."""
        content: dict[str, Any] = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step, self.first_loss = content["step"], content["first_loss"]


def read_text() -> torch.Tensor:
    """The standard library's modules in order of name, as one tensor of bytes; the same on every node."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    if len(text) < 2 * HELD_OUT_BYTES:
        raise SystemExit("train_charlm: this Python comes without the sources of its standard library")
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def batch_of(text: torch.Tensor, step: int, world: World, args: argparse.Namespace) -> torch.Tensor:
    """This rank's share of the step's global batch."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq, (world.size, args.batch), generator=draw)
    return text[starts[world.rank][:, None] + torch.arange(args.seq + 1)].long().to(world.device)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits, _ = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(training: Training, text: torch.Tensor, world: World, args: argparse.Namespace) -> tuple[float, bool]:
    """Train up to `--steps`, or until some rank is asked to stop; say the last loss, and whether it was stopped."""
    signals: list[int] = []  # those received; a handler only takes a note
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    model = DistributedDataParallel(training.model) if world.size > 1 else training.model
    loss, stopped = float("nan"), False
    clock, clock_step = time.monotonic(), training.step
    while training.step < args.steps and not stopped:
        training.optimizer.zero_grad()
        local_loss = loss_of(model, batch_of(text, training.step, world, args))
        local_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.optimizer.step()
        training.step += 1

        loss, asked = world.mean(local_loss.item(), float(len(signals)))
        stopped = asked > 0  # the same answer on every rank
        report(step=training.step, progress=training.step / args.steps, metrics={"loss": loss})
        training.first_loss = loss if training.first_loss is None else training.first_loss
        is_last = stopped or training.step == args.steps
        if args.checkpoint and world.rank == 0 and (is_last or training.step % args.checkpoint_every == 0):
            training.save(args.checkpoint)
        if training.step == 1 or training.step % args.log_every == 0 or is_last:
            seconds = time.monotonic() - clock
            chars = (training.step - clock_step) * world.size * args.batch * args.seq
            world.say(f"step {training.step}/{args.steps}  loss {loss:.3f}  {chars / seconds:,.0f} chars/s")
            clock, clock_step = time.monotonic(), training.step
    return loss, stopped


def held_out_loss(model: CharModel, text: torch.Tensor, world: World, args: argparse.Namespace) -> float:
    """The loss on text that no rank was trained on."""
    with torch.no_grad():
        losses = [loss_of(model, batch_of(text, step, world, args)).item() for step in range(8)]
    return world.mean(sum(losses) / len(losses))[0]


def sample(model: CharModel, device: torch.device, prompt: str = "def ", length: int = 160) -> str:
    """Let the model write on from the prompt."""
    text = list(prompt.encode())
    news, state = torch.tensor([text], device=device), None
    with torch.no_grad():
        for _ in range(length):
            logits, state = model(news, state)
            news = torch.multinomial((logits[:, -1] / 0.8).softmax(-1), 1)
            text.append(int(news.item()))
    return bytes(text).decode(errors="replace")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows per process and step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="characters per row (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the data (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save to this file and resume from it")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=25, metavar="N", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    world = World.join()
    torch.manual_seed(args.seed)
    text = read_text()
    model = CharModel().to(world.device)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    has_checkpoint = world.rank == 0 and args.checkpoint and args.checkpoint.exists()
    if data := world.bytes_of_rank_0(args.checkpoint.read_bytes() if has_checkpoint else b""):
        training.load(data, world.device)
        world.say(f"resumed at step {training.step} from {args.checkpoint}")

    loss, stopped = train(training, text[:-HELD_OUT_BYTES], world, args)
    if stopped:
        world.say(f"stopped at step {training.step}: asked by SIGTERM" + (", saved" if args.checkpoint else ""))
    else:
        held_out = held_out_loss(model, text[-HELD_OUT_BYTES:], world, args)
        written = sample(model, world.device).replace("\n", "\n  | ") if world.rank == 0 else ""
        first = training.first_loss if training.first_loss is not None else float("nan")
        world.say(f"done: loss {first:.3f} -> {loss:.3f}, held-out {held_out:.3f}; it writes:\n  | {written}")
    world.leave()


if __name__ == "__main__":
    main()
