"""Kubeflow Trainer v2, JAX runtime: one process per node, whatever the number of GPUs."""

from __future__ import annotations

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job, NodeRange

NAME = "trainer-v2-jax"
MARKS = Marks(all_of=("JAX_COORDINATOR_ADDRESS",), shows=("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))


def read(source: Source) -> Job:
    """Read the three JAX_* variables."""
    processes = source.count("JAX_NUM_PROCESSES", "nodes")
    rank = source.index("JAX_PROCESS_ID", "node_rank", below=processes)
    coordinator = source.endpoint("JAX_COORDINATOR_ADDRESS", "coordinator_address", least_port=1)
    own = names.split_v2(source.pod.hostname)
    return Job(
        contract=NAME,
        role="node",
        nodes=NodeRange(processes, processes),
        nproc_per_node=1,
        node_rank=rank,
        hostname_index=own.index if own else None,
        world_size=processes,
        coordinator=coordinator,
        is_coordinator=rank == 0,
        members=names.v2_members(coordinator.host, processes),
        engine="plain",
        details={"rank": rank, "coordinator_address": str(coordinator)},
    )
