"""Train a tiny GPT as Megatron-LM does: tensor, pipeline and data parallel groups, and its layout of checkpoints.

    torchrun --nproc-per-node 4 train_megatron.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- train_megatron.py --tensor-model-parallel-size 2

Options have Megatron's names, but this needs only torch, and no GPU. With `--save FOLDER`, on a disk that all nodes
share, each model-parallel rank writes `iter_0000020/mp_rank_TP_PP/model_optim_rng.pt`. Then rank 0 writes the
tracker file, latest_checkpointed_iteration.txt, from which a run resumes. On SIGTERM, to any rank, all save and
exit with code 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


VOCABULARY, LENGTH, WIDTH, HEADS = 256, 32, 64, 4  # bytes: a model that knows nothing has loss ln(256) = 5.55


def summed(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over the ranks of a group."""
    values = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, group=group)
    return values


class Layer(nn.Module):
    """A transformer layer; each rank of the tensor group has its share of the heads and of the wide layer."""

    def __init__(self, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp, self.heads, share = tp, HEADS // tp.size(), WIDTH // tp.size()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * share, bias=False), nn.Linear(share, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * share), nn.Linear(4 * share, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self._in(self.norms[0](hidden))).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self._out(self.projection(attended))
        return hidden + self._out(self.down(nn.functional.gelu(self.up(self._in(self.norms[1](hidden))))))

    def _in(self, hidden: torch.Tensor) -> torch.Tensor:
        """Megatron's f: the gradient is the sum over the tensor group."""
        hidden.register_hook(lambda gradient: summed(gradient, self.tp))
        return hidden

    def _out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Megatron's g: the value is the sum over the tensor group, the gradient as it comes."""
        return hidden + (summed(hidden, self.tp) - hidden.detach())


class Stage(nn.Module):
    """One stage of the pipeline: the first embeds, the last says how wrong it was."""

    def __init__(self, layers: int, tp: dist.ProcessGroup, pp: dist.ProcessGroup) -> None:
        super().__init__()
        self.pp, self.at, last = pp, pp.rank(), pp.size() - 1
        torch.manual_seed(1)  # these are the same on all ranks of a tensor group
        self.embed = nn.Embedding(VOCABULARY + LENGTH, WIDTH) if self.at == 0 else None
        self.out = nn.Linear(WIDTH, VOCABULARY) if self.at == last else None
        torch.manual_seed(2 + tp.rank() + tp.size() * self.at)  # and these are their shares
        self.layers = nn.Sequential(*(Layer(tp) for _ in range(layers // pp.size())))

    def step(self, rows: torch.Tensor) -> float:
        """Forward and backward of one micro-batch; the loss, 0 but on the last stage."""
        received = torch.zeros(len(rows), LENGTH, WIDTH)
        if self.embed is None:
            dist.recv(received, group=self.pp, group_src=self.at - 1)
            start = received.requires_grad_()
        else:
            start = self.embed(rows[:, :-1]) + self.embed(VOCABULARY + torch.arange(LENGTH))
        hidden, loss, gradient = self.layers(start), torch.zeros(()), None
        if self.out is None:
            dist.send(hidden.detach(), group=self.pp, group_dst=self.at + 1)
            gradient = torch.zeros_like(hidden)
            dist.recv(gradient, group=self.pp, group_src=self.at + 1)
        else:
            hidden = loss = nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), rows[:, 1:].flatten())
        hidden.backward(gradient)
        if received.grad is not None:
            dist.send(received.grad, group=self.pp, group_dst=self.at - 1)
        return float(loss.item())


def save(tracker: Path, iteration: int, path: Path, state: dict[str, object] | None) -> None:
    """Write this rank's part, if it has one; when all have, rank 0 names the checkpoint in the tracker file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if state is not None:
        torch.save(state, path)
    dist.barrier()
    if dist.get_rank() == 0:
        tracker.with_suffix(".new").write_text(str(iteration))
        tracker.with_suffix(".new").replace(tracker)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--train-iters", type=int, default=200)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    parser.add_argument("--save-interval", type=int, default=20)
    args = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (args.pipeline_model_parallel_size, -1, args.tensor_model_parallel_size)
    mesh = torch.arange(size).view(shape)  # Megatron's order: ranks that are next to each other share tensors
    pp, dp, tp = DeviceMesh("cpu", mesh, mesh_dim_names=("pp", "dp", "tp")).get_all_groups()
    print(f"rank {rank} of {size}: tp {tp.rank()} dp {dp.rank()} pp {pp.rank()}", flush=True)
    stage = Stage(args.num_layers, tp, pp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))[
        :1_000_000
    ]
    data, iteration, stopped = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 0, False
    micro_batches = args.global_batch_size // args.micro_batch_size // dp.size()

    tracker = args.save / "latest_checkpointed_iteration.txt" if args.save else Path(os.devnull)
    part = f"mp_rank_{tp.rank():02d}_{pp.rank():03d}/model_optim_rng.pt"
    if tracker.is_file():
        iteration = int(tracker.read_text())
        kept = torch.load(args.save / f"iter_{iteration:07d}" / part)
        stage.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        if rank == 0:
            print(f"resumed at step {iteration} from {args.save}", flush=True)
    while iteration < args.train_iters and not stopped:
        draw = torch.Generator().manual_seed(iteration * 1_000 + dp.rank())  # a resumed run reads on
        places = torch.randint(len(data) - LENGTH, (micro_batches, args.micro_batch_size, 1), generator=draw)
        losses = [stage.step(data[place + torch.arange(LENGTH + 1)]) for place in places]
        for weight in stage.parameters():
            weight.grad = summed(weight.grad, dp) / dp.size() / micro_batches
        optimizer.step()
        optimizer.zero_grad()
        iteration += 1
        told = summed(torch.tensor([sum(losses), float(len(signals))]))
        loss, stopped = told[0].item() / micro_batches / dp.size() / tp.size(), told[1].item() > 0
        report(step=iteration, progress=iteration / args.train_iters, metrics={"loss": loss})
        if rank == size - 1 and (iteration % 10 == 0 or stopped):
            print(f" iteration {iteration:8d}/{args.train_iters:8d} | lm loss: {loss:.6E} |", flush=True)
        if args.save and (iteration % args.save_interval == 0 or iteration == args.train_iters or stopped):
            state = {"model": stage.state_dict(), "optimizer": optimizer.state_dict()}
            save(tracker, iteration, args.save / f"iter_{iteration:07d}" / part, state if dp.rank() == 0 else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
