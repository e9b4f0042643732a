"""Kubeflow Trainer v2, torch runtime: the five PET_* variables, in the trainer container or injected elsewhere."""

from __future__ import annotations

from trainer_launch.contracts import names, torchrun_env
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Rendezvous

NAME = "trainer-v2-torch"

_FIVE = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def _fits(source: Source) -> bool:
    if source.has("JOB_COMPLETION_INDEX"):  # the v1 operator makes bare pods, which never have it
        return True
    # The Kubeflow SDK's local container backend sets the five and no index. MASTER_ADDR may be set by hand.
    return all(map(source.has, _FIVE)) and not source.has_any("RANK", "WORLD_SIZE", "PET_RDZV_ENDPOINT")


MARKS = Marks(all_of=("PET_MASTER_ADDR",), when=_fits, shows=(*_FIVE, "JOB_COMPLETION_INDEX"))


def read(source: Source) -> Job:
    """Read the five variables, and tell a foreign rank by the host name."""
    nodes = torchrun_env.nodes(source)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node")
    node_rank = source.index("PET_NODE_RANK", "node_rank")
    master = torchrun_env.master(source)
    index = source.index("JOB_COMPLETION_INDEX", default=None)
    if index is not None and index != node_rank:
        raise source.error("PET_NODE_RANK", str(node_rank), f"JOB_COMPLETION_INDEX, which is {index}")
    foreign = names.is_foreign(source.pod.hostname, master.host, node_rank)
    if not foreign and node_rank >= nodes.max:
        raise source.error("PET_NODE_RANK", str(node_rank), f"a whole number from 0 to {nodes.max - 1}")
    meeting = torchrun_env.rendezvous(source, master)
    own = names.split_v2(source.pod.hostname)
    return Job(
        contract=NAME,
        role="node",
        nodes=nodes,
        nproc_per_node=nproc,
        node_rank=node_rank,
        hostname_index=own.index if own else None,
        world_size=torchrun_env.world_size(nodes, nproc),
        coordinator=_coordinator(meeting, master),
        is_coordinator=node_rank == 0 and not foreign,
        rendezvous=meeting,
        members=names.v2_members(master.host, nodes.max),
        max_restarts=torchrun_env.max_restarts(source),
        engine="torchrun",
        details=_details(source, foreign),
    )


def _coordinator(meeting: Rendezvous, master: Endpoint) -> Endpoint:
    return meeting.endpoint if meeting.written and meeting.endpoint else master


def _details(source: Source, foreign: bool) -> dict[str, Json]:
    details = torchrun_env.oddities(source)
    details["foreign_replicated_job"] = foreign
    if foreign:
        source.warn("PET_NODE_RANK is the index in another replicatedJob than the trainer's: this pod has no rank")
    return details
