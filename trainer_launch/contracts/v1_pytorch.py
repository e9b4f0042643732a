"""PyTorchJob of the v1 operator, fixed: with a Master, with Workers only, and as up to 1.6, without PET_*."""

from __future__ import annotations

from trainer_launch.contracts import generic_env, names, torchrun_env
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Member, NodeRange, Origin, Rendezvous

NAME = "pytorchjob-v1"


def _fits(source: Source) -> bool:
    if source.has_any("JOB_COMPLETION_INDEX", "PET_RDZV_ENDPOINT"):
        return False
    return _has_master(source) or _is_worker_only(source) or generic_env.may_be_pytorch(source)


def _has_master(source: Source) -> bool:
    return source.has_any("RANK", "WORLD_SIZE") and source.has_any("PET_NODE_RANK", "PET_MASTER_ADDR")


def _is_worker_only(source: Source) -> bool:
    if not source.has("PET_NNODES") or generic_env.is_owned(source):
        return False
    if source.has_any("RANK", "PET_NODE_RANK", "PET_MASTER_ADDR"):
        return False
    return source.has("PYTHONUNBUFFERED") or _own_name(source) is not None


def _own_name(source: Source) -> names.V1Name | None:
    own = names.split_v1(source.pod.hostname)
    return own if own and own.role in ("master", "worker") else None


MARKS = Marks(when=_fits, shows=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", *generic_env.NAMES))


def read(source: Source) -> Job:
    """Read whichever of the three forms is there."""
    if source.has_any("PET_NODE_RANK", "PET_MASTER_ADDR"):
        return _with_master(source)
    if source.has("PET_NNODES"):
        return _worker_only(source)
    return _up_to_1_6(source)


def _with_master(source: Source) -> Job:
    nodes = torchrun_env.nodes(source)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    rank = source.index("RANK", "node_rank", below=nodes.max)
    _same(source, "PET_NODE_RANK", str(source.index("PET_NODE_RANK")), "RANK", str(rank))
    master = torchrun_env.master(source)
    plain = _master(source)
    _same(source, "PET_MASTER_ADDR", master.host, "MASTER_ADDR", plain.host)
    _same(source, "PET_MASTER_PORT", str(master.port), "MASTER_PORT", str(plain.port))
    env_world_size = source.count("WORLD_SIZE", "env_world_size")
    _check_world_size(source, env_world_size, nodes, nproc)
    meeting = torchrun_env.rendezvous(source, master)
    return Job(
        contract=NAME,
        role=_role(source, rank),
        nodes=nodes,
        nproc_per_node=nproc,
        node_rank=rank,
        hostname_index=_index(source),
        world_size=torchrun_env.world_size(nodes, nproc),
        coordinator=master,
        is_coordinator=rank == 0,
        rendezvous=meeting,
        members=_members(master.host, nodes.max),
        max_restarts=torchrun_env.max_restarts(source),
        engine="torchrun",
        details={**torchrun_env.oddities(source), **_raw_ranks(env_world_size, rank)},
    )


def _worker_only(source: Source) -> Job:
    nodes = torchrun_env.nodes(source)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)  # 1.7 wrote it with a Master only
    own = _own_name(source)
    members = names.members_like(f"{own.job}-worker-0", "-worker-", nodes.max) if own else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
        source.warn("a PyTorchJob without a Master gives no rank: it has to come from the host name")
    return Job(
        contract=NAME,
        role=own.role if own else "worker",
        nodes=nodes,
        nproc_per_node=nproc,
        hostname_index=own.index if own else None,
        world_size=torchrun_env.world_size(nodes, nproc),
        is_coordinator=own.index == 0 if own else None,
        rendezvous=torchrun_env.rendezvous(source, None) if torchrun_env.says_how_to_meet(source) else None,
        members=members,
        max_restarts=torchrun_env.max_restarts(source),
        engine="torchrun",
        details=torchrun_env.oddities(source),
    )


def _up_to_1_6(source: Source) -> Job:
    pods = source.count("WORLD_SIZE", "nodes")  # counts pods here, whatever runs in them
    rank = source.index("RANK", "node_rank", below=pods)
    master = _master(source)
    own = _own_name(source)
    first = master.host
    if own and own.role == "master" and first == "localhost":  # up to 1.3 the master is told this
        first = source.pod.hostname
        source.warn("MASTER_ADDR is localhost on the master: the workers know it by its host name")
    return Job(
        contract=NAME,
        role=_role(source, rank),
        nodes=NodeRange(pods, pods),
        node_rank=rank,
        hostname_index=_index(source),
        coordinator=master,
        is_coordinator=rank == 0,
        rendezvous=Rendezvous(kind="static", backend="static", endpoint=master),
        members=_members(first, pods),
        engine="torchrun",
        details=_raw_ranks(pods, rank),
    )


def _master(source: Source) -> Endpoint:
    return Endpoint(source.host("MASTER_ADDR", "master_addr"), source.port("MASTER_PORT", "master_port"))


def _same(source: Source, name: str, value: str, other: str, expected: str) -> None:
    if value != expected:
        raise source.error(name, value, f"the same as {other}, which is {expected[:60]}")


def _check_world_size(source: Source, told: int, nodes: NodeRange, nproc: int | str | None) -> None:
    # pods x nproc, where a word counts as 1
    expected = nodes.max * nproc if isinstance(nproc, int) else nodes.max
    if told not in (expected, nodes.max):
        raise source.error("WORLD_SIZE", str(told), f"PET_NNODES x PET_NPROC_PER_NODE, which is {expected}")
    if told != expected:
        source.warn(f"WORLD_SIZE is {told} and counts pods: PET_NNODES x PET_NPROC_PER_NODE is {expected}")


def _raw_ranks(env_world_size: int, env_rank: int) -> dict[str, Json]:
    return {"env_world_size": env_world_size, "env_rank": env_rank, "env_rank_means": "node"}


def _role(source: Source, rank: int) -> str:
    own = _own_name(source)
    return own.role if own else ("master" if rank == 0 else "worker")


def _index(source: Source) -> int | None:
    own = _own_name(source)
    return own.index if own else None


def _members(master: str, pods: int) -> tuple[Member, ...] | None:
    if pods == 1:
        return (Member(master),)
    label, dot, domain = master.partition(".")
    if not label.endswith("-master-0"):
        return None
    worker_0 = f"{label.removesuffix('-master-0')}-worker-0{dot}{domain}"
    workers = names.members_like(worker_0, "-worker-", pods - 1)
    return None if workers is None else (Member(master), *workers)
