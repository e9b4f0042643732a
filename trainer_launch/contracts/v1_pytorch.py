"""PyTorchJob of the v1 operator, fixed: with a Master, with Workers only, and as up to 1.6, without PET_*.

With an elasticPolicy too; Flyte's multi-node Elastic is one in which flytekit starts torch elastic itself.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.contracts import flyte, generic_env, names, torchrun_env
from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.model import Job, Member, NodeRange, Origin, Rendezvous


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


def _read(source: Source) -> Job:
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
    plain = generic_env.master(source)
    _same(source, "PET_MASTER_ADDR", master.host, "MASTER_ADDR", plain.host)
    _same(source, "PET_MASTER_PORT", str(master.port), "MASTER_PORT", str(plain.port))
    env_world_size = source.count("WORLD_SIZE", "env_world_size")
    _check_world_size(source, env_world_size, nodes, nproc)
    job = torchrun_env.job(source, nodes, nproc, torchrun_env.rendezvous(source, master))
    own = _own_name(source)
    return replace(
        job,
        role=own.role if own else ("master" if rank == 0 else "worker"),
        node_rank=rank,
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=rank == 0,
        members=_members(master.host, nodes.max),
        details={**job.details, **generic_env.rank_details(env_world_size, rank)},
    )


def _worker_only(source: Source) -> Job:
    nodes = torchrun_env.nodes(source)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)  # 1.7 wrote it with a Master only
    own = _own_name(source)
    members = names.members_like(f"{own.job}{names.V1_WORKER}0", names.V1_WORKER, nodes.max) if own else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
        source.warn("a PyTorchJob without a Master gives no rank: it has to come from the host name")
    return replace(
        torchrun_env.job(source, nodes, nproc, torchrun_env.given_rendezvous(source)),
        role=own.role if own else "worker",
        hostname_index=own.index if own else None,
        coordinator=None,
        is_coordinator=own.index == 0 if own else None,
        members=members,
    )


def _up_to_1_6(source: Source) -> Job:
    pods = source.count("WORLD_SIZE", "nodes")  # counts pods here, whatever runs in them
    rank = source.index("RANK", "node_rank", below=pods)
    master = generic_env.master(source)
    own = _own_name(source)
    first = master.host
    if own and own.role == "master" and first == "localhost":  # up to 1.3 the master is told this
        first = source.pod.hostname
        source.warn("MASTER_ADDR is localhost on the master: the workers know it by its host name")
    return Job(
        role=own.role if own else ("master" if rank == 0 else "worker"),
        nodes=NodeRange(pods, pods),
        node_rank=rank,
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=rank == 0,
        rendezvous=Rendezvous(kind="static", backend="static", endpoint=master),
        members=_members(first, pods),
        engine="torchrun",
        details=generic_env.rank_details(pods, rank),
    )


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


def _members(master: str, pods: int) -> tuple[Member, ...] | None:
    if pods == 1:
        return (Member(master),)
    label, dot, domain = master.partition(".")
    if not label.endswith("-master-0"):
        return None
    worker_0 = f"{label.removesuffix('-master-0')}{names.V1_WORKER}0{dot}{domain}"
    workers = names.members_like(worker_0, names.V1_WORKER, pods - 1)
    return None if workers is None else (Member(master), *workers)


# -- contracts ----------------------------------------------------------------------------------

# v1 pods never have a completion index; a Trainer v2 pod in which somebody set the endpoint by hand does.
_NO_INDEX = ("JOB_COMPLETION_INDEX",)


def _read_elastic(source: Source) -> Job:
    return torchrun_env.read_elastic(source, engine="torchrun")


def _read_flyte(source: Source) -> Job:
    # a second agent around flytekit's own would be wrong
    return torchrun_env.read_elastic(source, engine="plain")


FIXED = Contract(
    "pytorchjob-v1",
    Marks(when=_fits, shows=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", *generic_env.NAMES)),
    _read,
)
ELASTIC = Contract(
    "pytorchjob-v1-elastic",
    Marks(all_of=("PET_RDZV_ENDPOINT",), none_of=_NO_INDEX, shows=("PET_NNODES", "PET_RDZV_BACKEND")),
    _read_elastic,
    weaker_than=("flyte-elastic",),
)
FLYTE = Contract(
    "flyte-elastic",
    Marks(all_of=("PET_RDZV_ENDPOINT",), none_of=_NO_INDEX, when=flyte.is_flyte, shows=flyte.MARKS),
    flyte.reader(_read_flyte),
)
