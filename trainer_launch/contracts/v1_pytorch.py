"""PyTorchJob of the v1 operator, fixed: with a Master, with Workers only, and as up to 1.6, without PET_*.

With an elasticPolicy too; Flyte's multi-node Elastic is one in which flytekit starts torch elastic itself.
PyTorchJob up to 1.6 and an XGBoostJob with one replica write the same general names: MASTER_ADDR, RANK, WORLD_SIZE.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from trainer_launch.contracts import flyte, names, torchrun_env, v1_table
from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.contracts.v1_table import PYTORCH
from trainer_launch.model import Job, Member, NodeRange, Origin, Rendezvous


def _fits(source: Source) -> bool:
    if source.has_any("JOB_COMPLETION_INDEX", "PET_RDZV_ENDPOINT"):
        return False
    return _has_master(source) or _is_worker_only(source) or v1_table.may_be_pytorch(source)


def _has_master(source: Source) -> bool:
    return source.has_any("RANK", "WORLD_SIZE") and source.has_any("PET_NODE_RANK", "PET_MASTER_ADDR")


def _is_worker_only(source: Source) -> bool:
    if not source.has("PET_NNODES") or v1_table.is_owned(source):
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
    nodes = source.node_range("PET_NNODES", "nodes")
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    rank = source.index(v1_table.ROW.rank, "node_rank", below=nodes.max)
    _same(source, "rank", str(rank), str(source.index("PET_NODE_RANK")))
    master, plain = torchrun_env.master(source), v1_table.plain_master(source)
    _same(source, "host", plain.host, master.host)
    _same(source, "port", str(plain.port), str(master.port))
    env_world_size = source.count("WORLD_SIZE", "env_world_size")
    _check_world_size(source, env_world_size, nodes, nproc)
    job = torchrun_env.job(source, nodes, nproc, torchrun_env.rendezvous(source, master))
    v1_table.derive_ranks(source, env_world_size, rank)
    own = _own_name(source)
    return replace(
        job,
        role=own.role if own else ("master" if rank == 0 else "worker"),
        node_rank=rank,
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=rank == 0,
        members=_members(master.host, nodes.max),
    )


def _worker_only(source: Source) -> Job:
    nodes = source.node_range("PET_NNODES", "nodes")
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
    job = v1_table.ROW.read(source)
    master = v1_table.plain_master(source)
    first = master.host
    if job.role == "master" and first == "localhost" and job.hostname_index is not None:
        first = source.pod.hostname  # up to 1.3 its MASTER_ADDR is this
        source.warn("MASTER_ADDR is localhost on the master: the workers know it by its host name")
    source.derive(env_rank_means="node")
    return replace(
        job,
        rendezvous=Rendezvous(kind="static", backend="static", endpoint=master),
        members=_members(first, source.count(v1_table.ROW.nodes, "nodes")),
        engine="torchrun",
    )


def _same(source: Source, value: str, expected: str, actual: str) -> None:
    """Check that both variables that hold this value of the row hold the same."""
    name, other = PYTORCH.variables(value)
    if actual != expected:
        raise source.error(other, actual, f"the same as {name}, which is {expected[:60]}")


def _check_world_size(source: Source, size: int, nodes: NodeRange, nproc: int | str | None) -> None:
    # pods x nproc, where a word counts as 1
    expected = nodes.max * nproc if isinstance(nproc, int) else nodes.max
    if size not in (expected, nodes.max):
        raise source.error("WORLD_SIZE", str(size), f"PET_NNODES x PET_NPROC_PER_NODE, which is {expected}")
    if size != expected:
        source.warn(f"WORLD_SIZE is {size} and counts pods: PET_NNODES x PET_NPROC_PER_NODE is {expected}")


def _members(master: str, pods: int) -> tuple[Member, ...] | None:
    if pods == 1:
        return (Member(master),)
    label, dot, domain = master.partition(".")
    if not label.endswith("-master-0"):
        return None
    worker_0 = f"{label.removesuffix('-master-0')}{names.V1_WORKER}0{dot}{domain}"
    workers = names.members_like(worker_0, names.V1_WORKER, pods - 1)
    return None if workers is None else (Member(master), *workers)


def _read_elastic(source: Source, engine: str) -> Job:
    """Read a PyTorchJob with `elasticPolicy`: PET_RDZV_*, a range of nodes, ranks only with a Master."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    meeting = torchrun_env.rendezvous(source, None)
    own = names.split_v1(source.pod.hostname)
    host = meeting.endpoint.host if meeting.endpoint else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
    made = torchrun_env.job(source, nodes, nproc, meeting)
    return replace(
        made,
        role=own.role if own else "worker",
        hostname_index=own.index if own else None,
        is_coordinator=_is_host(host, meeting.backend, own) if own and host else None,
        members=_workers(host, own, nodes),
        engine=engine,
        rank_behind_workers=_master_too(source, own, nodes, nproc),
    )


def _is_host(host: str, backend: str | None, own: names.V1Name) -> bool:
    """Whether this pod is the one that the endpoint names; behind a name that is no pod's, worker 0 hosts.

    Such as a Service, or a rehearsal's loopback address. Backends other than c10d have a server of their own.
    """
    named = names.split_v1(host)
    if named is not None and named.job == own.job:
        return named == own
    return backend == torchrun_env.C10D and (own.role, own.index) == ("worker", 0)


def _workers(host: str | None, own: names.V1Name | None, nodes: NodeRange | None) -> tuple[Member, ...] | None:
    if nodes is None:
        return None
    # The endpoint may be an etcd server; then only the own name shows the pattern.
    worker_0 = host if host and names.first_label(host).endswith(f"{names.V1_WORKER}0") else None
    if worker_0 is None and own and own.role == "worker":
        worker_0 = f"{own.job}{names.V1_WORKER}0"
    return names.members_like(worker_0, names.V1_WORKER, nodes.max) if worker_0 else None


def _master_too(
    source: Source, own: names.V1Name | None, nodes: NodeRange | None, nproc: int | str | None
) -> int | None:
    # Master plus elasticPolicy writes both sets: PET_NNODES counts workers only, WORLD_SIZE and RANK count all.
    if not all(map(source.has, ("MASTER_ADDR", "RANK", "WORLD_SIZE"))):
        return None
    source.warn(
        "the job has a Master and an elasticPolicy: torchrun ignores the ranks, and one pod may be too many"
    )
    size = source.count("WORLD_SIZE", "env_world_size")
    v1_table.derive_ranks(source, size, source.index("RANK", "env_rank"))
    is_master = own is not None and own.role == "master"
    return _behind_workers(size, nodes, nproc) if is_master and nodes else None


def _behind_workers(size: int, nodes: NodeRange, nproc: int | str | None) -> int:
    """The Master's rank: the workers have their indices, and its own index is that of worker 0."""
    # WORLD_SIZE counts pods, in newer operators times nproc: where both can be, the larger rank is free as well.
    times = nproc if isinstance(nproc, int) and size > nodes.max + 1 and size % nproc == 0 else 1
    return size // times - 1


# -- contracts ----------------------------------------------------------------------------------

# v1 pods never have a completion index; a Trainer v2 pod in which somebody set the endpoint by hand does.
_NO_INDEX = ("JOB_COMPLETION_INDEX",)


FIXED = Contract(
    "pytorchjob-v1",
    Marks(when=_fits, shows=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", *v1_table.NAMES)),
    _read,
    kind=PYTORCH.name,
)
FLYTE = Contract(
    "flyte-elastic",
    Marks(all_of=("PET_RDZV_ENDPOINT",), none_of=_NO_INDEX, when=flyte.is_flyte, shows=flyte.MARKS),
    flyte.reader(partial(_read_elastic, engine="plain")),  # a second agent around flytekit's would be wrong,
    kind=PYTORCH.name,
)
ELASTIC = Contract(
    "pytorchjob-v1-elastic",
    Marks(all_of=("PET_RDZV_ENDPOINT",), none_of=_NO_INDEX, shows=("PET_NNODES", "PET_RDZV_BACKEND")),
    partial(_read_elastic, engine="torchrun"),
    kind=PYTORCH.name,
)
