"""JAXJob of the v1 operator: the address and the port are two variables."""

from __future__ import annotations

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange

NAME = "jaxjob-v1"
MARKS = Marks(all_of=("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), shows=("COORDINATOR_PORT",))
WEAKER_THAN: tuple[str, ...] = ("trainer-v2-jax",)  # whose users set these names too, for their own scripts


def read(source: Source) -> Job:
    """Read the four variables and join the address."""
    processes = source.count("NUM_PROCESSES", "nodes")
    rank = source.index("PROCESS_ID", "node_rank", below=processes)
    coordinator = Endpoint(
        source.host("COORDINATOR_ADDRESS", "master_addr"),
        source.port("COORDINATOR_PORT", "master_port"),
    )
    own = names.split_v1(source.pod.hostname)
    return Job(
        contract=NAME,
        role=own.role if own else "worker",
        nodes=NodeRange(processes, processes),
        nproc_per_node=1,
        node_rank=rank,
        hostname_index=own.index if own else None,
        world_size=processes,
        coordinator=coordinator,
        is_coordinator=rank == 0,
        members=_members(coordinator.host, processes),
        engine="plain",
        details={"rank": rank, "coordinator_address": str(coordinator)},
    )


def _members(host: str, processes: int) -> tuple[Member, ...] | None:
    return (Member(host),) if processes == 1 else names.members_like(host, "-worker-", processes)
