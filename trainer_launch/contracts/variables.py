"""Platforms that tell it in a few variables: how many nodes there are, which one this is, and where node 0 is.

The contract of such a platform is one row: which variable says what.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Job, Json, NodeRange


def _nothing(_job: Job) -> dict[str, Json]:
    return {}


class Variables(Struct, frozen=True, kw_only=True):
    """The names of a platform's variables; `read` is its contract's."""

    nodes: str  # how many there are
    counts_workers: bool = False  # `nodes` is how many workers there are instead, and nobody counts the nodes
    rank: str  # which node this is, from 0
    coordinator: str  # where node 0 is: HOST:PORT, or HOST
    port: str = ""  # the port, where it is a variable of its own
    fields: tuple[str, str] = ("master_addr", "master_port")  # what `explain` calls the two, then
    nproc_per_node: int | None = None  # where the platform always has that many
    is_v1: bool = False  # pods are named as the v1 operator names them; False: as Kubeflow Trainer v2 does
    engine: str | None = None  # None: the command decides
    details: Callable[[Job], dict[str, Json]] = _nothing

    def read(self, source: Source) -> Job:
        """Read them all; each is needed."""
        count = source.count(self.nodes, "world_size" if self.counts_workers else "nodes")
        rank = source.index(self.rank, "node_rank", below=count)
        coordinator = self._coordinator(source)
        own = (names.split_v1 if self.is_v1 else names.split_v2)(source.pod.hostname)
        nproc = 1 if self.counts_workers else self.nproc_per_node
        before_index = names.V1_WORKER if self.is_v1 else names.V2_NODE
        job = Job(
            role=own.role if isinstance(own, names.V1Name) else ("worker" if self.is_v1 else "node"),
            nodes=None if self.counts_workers else NodeRange(count, count),
            nproc_per_node=self.nproc_per_node,
            node_rank=rank,
            hostname_index=own.index if own else None,
            world_size=None if nproc is None else count * nproc,
            coordinator=coordinator,
            is_coordinator=rank == 0,
            members=None if self.counts_workers else names.members(coordinator.host, before_index, count),
            engine=self.engine,
        )
        return replace(job, details=self.details(job))

    def _coordinator(self, source: Source) -> Endpoint:
        if not self.port:
            return source.endpoint(self.coordinator, "coordinator_address", least_port=1)
        host, port = self.fields
        return Endpoint(source.host(self.coordinator, host), source.port(self.port, port))


def jax_details(job: Job) -> dict[str, Json]:
    """What both JAX contracts add."""
    return {"rank": job.node_rank, "coordinator_address": str(job.coordinator)}
