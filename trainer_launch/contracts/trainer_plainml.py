"""Kubeflow Trainer v2, PlainML; and every other Indexed Job of which nothing but the completion index is known.

So also a TrainJob without `spec.trainer`, and init containers and sidecars that nothing is injected into.
"""

from __future__ import annotations

from trainer_launch.contracts import names, torchrun_env
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job

NAME = "trainer-v2-plainml"
MARKS = Marks(all_of=("JOB_COMPLETION_INDEX",))


def read(source: Source) -> Job:
    """Read the completion index, and torchrun's variables where the user set some by hand."""
    index = source.index("JOB_COMPLETION_INDEX", "node_rank")
    by_hand = torchrun_env.by_hand(source)
    own = names.split_v2(source.pod.hostname)
    # A container that nobody told anything sees index 0 too: only a higher one proves that there are ranks.
    told = index if index > 0 else None
    node_rank = told if by_hand.node_rank is None else by_hand.node_rank
    return Job(
        contract=NAME,
        role="node",
        nodes=by_hand.nodes,
        nproc_per_node=by_hand.nproc_per_node,
        node_rank=node_rank,
        hostname_index=own.index if own else None,
        world_size=by_hand.world_size,
        coordinator=by_hand.coordinator,
        is_coordinator=by_hand.is_coordinator,
        rendezvous=by_hand.rendezvous,
        max_restarts=by_hand.max_restarts,
        engine=None if by_hand.nodes or by_hand.rendezvous else "plain",
        details={**by_hand.details, "completion_index": index},
    )
