"""A PyTorchJob with `elasticPolicy`: PET_RDZV_*, a range of nodes, no ranks. Flyte's Elastic is one too."""

from __future__ import annotations

from trainer_launch.contracts import names, torchrun_env
from trainer_launch.contracts.source import Source
from trainer_launch.model import Job, Json, Member, NodeRange, Origin


def read_elastic(source: Source, engine: str) -> Job:
    """Read the elastic PET_* variables; where there is a Master too, its ranks only inform."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    meeting = torchrun_env.rendezvous(source, None)
    own = names.split_v1(source.pod.hostname)
    host = meeting.endpoint.host if meeting.endpoint else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
    return Job(
        contract=source.contract,
        role=own.role if own else "worker",
        nodes=nodes,
        nproc_per_node=nproc,
        hostname_index=own.index if own else None,
        world_size=torchrun_env.world_size(nodes, nproc),
        coordinator=meeting.endpoint,
        is_coordinator=_is_host(host, meeting.backend, own) if own and host else None,
        rendezvous=meeting,
        members=_members(host, own, nodes),
        max_restarts=torchrun_env.max_restarts(source),
        engine=engine,
        details={**torchrun_env.oddities(source), **_master_too(source, own, nodes, nproc), **_elastic(nodes)},
    )


def _is_host(host: str, backend: str | None, own: names.V1Name) -> bool:
    """Whether this pod is the one that the endpoint names; behind a name that is no pod's, worker 0 hosts.

    Such as a Service, or a rehearsal's loopback address. Backends other than c10d have a server of their own.
    """
    named = names.split_v1(host)
    if named is not None and named.job == own.job:
        return named == own
    return backend == torchrun_env.C10D and (own.role, own.index) == ("worker", 0)


def _elastic(nodes: NodeRange | None) -> dict[str, Json]:
    return {"elastic": nodes.fixed is None if nodes else None}


def _members(host: str | None, own: names.V1Name | None, nodes: NodeRange | None) -> tuple[Member, ...] | None:
    if nodes is None:
        return None
    # The endpoint may be an etcd server; then only the own name shows the pattern.
    worker_0 = host if host and names.first_label(host).endswith("-worker-0") else None
    if worker_0 is None and own and own.role == "worker":
        worker_0 = f"{own.job}-worker-0"
    return names.members_like(worker_0, "-worker-", nodes.max) if worker_0 else None


def _master_too(
    source: Source, own: names.V1Name | None, nodes: NodeRange | None, nproc: int | str | None
) -> dict[str, Json]:
    # Master plus elasticPolicy writes both sets: PET_NNODES counts workers only, WORLD_SIZE and RANK count all.
    if not all(map(source.has, ("MASTER_ADDR", "RANK", "WORLD_SIZE"))):
        return {}
    source.warn(
        "the job has a Master and an elasticPolicy: torchrun ignores the ranks, and one pod may be too many"
    )
    told = source.count("WORLD_SIZE", "env_world_size")
    details: dict[str, Json] = {
        "env_world_size": told,
        "env_rank": source.index("RANK", "env_rank"),
        "env_rank_means": "node",
    }
    if own and own.role == "master" and nodes:
        details["rank_behind_workers"] = _behind_workers(told, nodes, nproc)
    return details


def _behind_workers(told: int, nodes: NodeRange, nproc: int | str | None) -> int:
    """The Master's rank: the workers have their indices, and its own index is that of worker 0."""
    # WORLD_SIZE counts pods, in newer operators times nproc: where both can be, the larger rank is free as well.
    times = nproc if isinstance(nproc, int) and told > nodes.max + 1 and told % nproc == 0 else 1
    return told // times - 1
