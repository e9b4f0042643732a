"""The two ways in which Flyte tasks ask for workers: `Elastic(...)` on one node, and on several.

    python flyte_elastic.py                         # one node: a plain pod, two workers in it
    trainer-launch rehearse -f flyte-elastic.yaml   # several nodes: the PyTorchJob that Flyte makes of nnodes="1:2"

In a Flyte project the two functions are tasks; without flytekit they are just functions. `launch` starts the
workers in the pod that the task runs in, and meets those of the other pods.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from launch_function import train  # type: ignore[import-not-found]

from trainer_launch import Elastic, launch


def task(function: Callable[[], float]) -> Callable[[], float]:
    """A Flyte task where there is Flyte; else a function is a function."""
    try:
        import flytekit  # type: ignore[import-not-found]
    except ImportError:
        return function
    made: Callable[[], float] = flytekit.task(function)
    return made


@task
def on_one_node() -> float:
    """Two workers in this pod; the loss of rank 0."""
    losses = launch(train, Elastic(nnodes=1, nproc_per_node=2, max_restarts=1), "one-node", "1")
    return float(losses[0])


@task
def on_several_nodes() -> float:
    """One worker in each of one or two pods; the loss of this pod's first rank."""
    losses = launch(train, Elastic(nnodes="1:2", nproc_per_node=1, max_restarts=3), "several-nodes", "1")
    return float(losses[min(losses)])


if __name__ == "__main__":
    chosen = on_several_nodes if "PET_RDZV_ENDPOINT" in os.environ else on_one_node
    print(f"{'several nodes' if chosen is on_several_nodes else 'one node'}: loss {chosen():.3f}", flush=True)
