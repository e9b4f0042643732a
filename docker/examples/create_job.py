"""Submit a Python function as a TrainJob by Kubeflow's SDK: `create_job(name, func, num_workers, ...)`.

    pip install kubeflow
    python create_job.py --image REGISTRY/IMAGE    # to the cluster of your kubeconfig

The SDK writes the pods' command, `bash -c "… torchrun FILE"`, so the image's ENTRYPOINT never runs. In an image of
`--target shims` that torchrun runs under the launcher.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from kubeflow.trainer import CustomTrainer, TrainerClient  # type: ignore[import-not-found]
from kubeflow.trainer.options import Name  # type: ignore[import-not-found]


def train(steps: int, checkpoint: str) -> None:
    """Fit a line, from the last checkpoint on. The SDK sends this source alone, so all imports are inside."""
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, begin, weight = dist.get_rank(), 0, torch.zeros(1)
    print(f"rank {rank} of {dist.get_world_size()}, pid {os.getpid()}", flush=True)
    if os.path.exists(checkpoint):
        begin, weight = torch.load(checkpoint)
        print(f"resumed at step {begin}", flush=True)
    for step in range(begin, steps):
        x = torch.rand(64, generator=torch.Generator().manual_seed(step * 1000 + rank))
        gradient = (2 * (weight * x - 3 * x) * x).mean(0, keepdim=True)
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient / dist.get_world_size()
        if rank == 0:
            torch.save((step + 1, weight), checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
            print(f"step {step + 1}/{steps}  weight {weight.item():.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def create_job(
    name: str,
    func: Callable[..., None],
    num_workers: int = 1,
    resources_per_worker: Mapping[str, Any] | None = None,
    **more: Any,
) -> str:
    """Submit `func` as a TrainJob of `num_workers` nodes; return its name.

    `more` are further fields of the SDK's CustomTrainer.
    """
    resources = dict(resources_per_worker) if resources_per_worker else None
    trainer = CustomTrainer(func=func, num_nodes=num_workers, resources_per_node=resources, **more)
    return str(TrainerClient().train(trainer=trainer, options=[Name(name)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", help="an image of --target shims")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", default="/checkpoints/line.pt")
    given = parser.parse_args()
    arguments = {"steps": given.steps, "checkpoint": given.checkpoint}
    made = create_job("line", train, 2, {"cpu": 1}, func_args=arguments, image=given.image)
    print(f"submitted {made}: kubectl get trainjob {made}")
