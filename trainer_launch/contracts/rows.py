"""The one form of row: which variables of a platform tell a job, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.model.value_parsers import parse_host

PORT = 29500  # torchrun's own: most platforms name none


def lines(source: Source, name: str) -> Sequence[str]:
    """Hosts separated by white space; () where the variable is not set."""
    hosts = source.text(name, "hosts", default="").split()
    if bad := next((host for host in hosts if parse_host(host) is None), None):
        raise source.error(name, bad, "host names or IP addresses, one a line")
    return hosts


def json_list(source: Source, name: str) -> Sequence[str]:
    """Hosts as a JSON list; () where the variable is not set."""
    if not source.has(name):
        return ()
    hosts = source.json(name, list[str], "hosts")
    if not hosts or not all(map(parse_host, hosts)):
        raise source.error(name, source.peek(name), "a JSON list of host names")
    return tuple(hosts)


class Row(Struct, frozen=True, kw_only=True):
    """The names of a platform's variables, "" for one that it has not; `read` is its contract's."""

    nodes: str = ""  # how many there are
    rank: str = ""  # which node this is, from 0
    hosts: str = ""  # where all nodes are, or node 0
    own: str = ""  # which of `hosts` this node is
    coordinator: str = ""  # where node 0 is: HOST, or HOST:PORT without `port`
    port: str = ""
    workers: str = ""  # how many workers a node has; 0 counts as not set
    list_hosts: Callable[[Source, str], Sequence[str]] = lines
    counts_workers: bool = False  # `nodes` is how many workers there are, and nothing counts the nodes
    nproc_per_node: int | None = None  # where the platform always has that many
    v1_roles: tuple[str, str] | None = None  # of node 0, and of the others; None: pods of Trainer v2
    engine: str | None = None  # None: the command decides
    fields: tuple[str, str] = ("master_addr", "master_port")  # what `explain` calls `coordinator` and `port`
    words: tuple[tuple[str, str], ...] = ()  # the platform's word for a field of Job

    @property
    def shown(self) -> tuple[str, ...]:
        """The variables that show several nodes."""
        return tuple(name for name in (self.nodes, self.hosts, self.own, self.rank) if name)

    def read(self, source: Source) -> Job:
        """Read them: with a `coordinator` each is needed, else what is missing stays unknown."""
        return self._complete(source) if self.coordinator else self._partial(source)

    def _complete(self, source: Source) -> Job:
        count = source.count(self.nodes, "world_size" if self.counts_workers else "nodes")
        rank = source.index(self.rank, "node_rank", below=count)
        coordinator = self._endpoint(source)
        own = (names.split_v1 if self.v1_roles else names.split_v2)(source.pod.hostname)
        nproc = 1 if self.counts_workers else self.nproc_per_node
        before_index = names.V1_WORKER if self.v1_roles else names.V2_NODE
        role = self.v1_roles[min(rank, 1)] if self.v1_roles else "node"
        job = Job(
            role=own.role if isinstance(own, names.V1Name) else role,
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
        for word, field in self.words:
            value = getattr(job, field)
            value = value.fixed if isinstance(value, NodeRange) else value
            source.derive(**{word: str(value) if isinstance(value, Endpoint) else value})
        return job

    def _endpoint(self, source: Source) -> Endpoint:
        if not self.port:
            return source.endpoint(self.coordinator, "coordinator_address", least_port=1)
        host, port = self.fields
        return Endpoint(source.host(self.coordinator, host), source.port(self.port, port))

    def _partial(self, source: Source) -> Job:
        count = source.count(self.nodes, "nodes", default=None) if self.nodes else None
        rank = source.index(self.rank, "node_rank", below=count, default=None) if self.rank else None
        hosts = self.list_hosts(source, self.hosts)
        if self.own:
            count, rank = len(hosts) or None, self._place(source, hosts)
        nproc = source.index(self.workers, "nproc_per_node", default=None) if self.workers else None
        return several(source, count, rank, hosts, self.shown, nproc=nproc or None)

    def _place(self, source: Source, hosts: Sequence[str]) -> int | None:
        own = source.host(self.own, "node_rank", default=None)
        if own is not None and hosts and own not in hosts:
            raise source.error(self.own, own, f"one of {self.hosts}, which are {', '.join(hosts[:8])}")
        return hosts.index(own) if own is not None and hosts else None


def several(
    source: Source,
    nodes: int | None,
    rank: int | None,
    hosts: Sequence[str],
    shown_by: Sequence[str],
    *,
    nproc: int | None = None,
) -> Job:
    """A job of that many nodes, which meet at the first host unless MASTER_ADDR and MASTER_PORT say otherwise.

    A pod that shows several nodes and does not say enough never runs as a job of one node: what is missing stays
    unknown, and the plan is refused unless flags say it. `shown_by` are the variables that show several nodes.
    """
    shown = next(filter(source.has, shown_by), None)
    if shown is None:
        raise source.missing(shown_by[0], "the number of nodes")
    host = source.host("MASTER_ADDR", "master_addr", default=hosts[0] if hosts else None)
    port = source.port("MASTER_PORT", "master_port", default=PORT)
    return Job(
        role="node",
        nodes=None if nodes is None else NodeRange(nodes, nodes),
        nproc_per_node=nproc,
        node_rank=rank,
        world_size=None if nproc is None or nodes is None else nodes * nproc,
        coordinator=None if host is None else Endpoint(host, port),
        is_coordinator=None if rank is None else rank == 0,
        members=tuple(map(Member, hosts)) if hosts and len(hosts) == nodes else None,
        engine="torchrun" if nodes is None else None,
        several_nodes_shown_by=shown,
    )
