"""How torchrun itself reads its PET_* variables, for every contract that carries them."""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.contracts import generic_env, names
from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Job, Json, Member, NodeRange, Origin, Rendezvous

_STATIC = "static"
_C10D = "c10d"
_C10D_PORT = 29400  # what torch's c10d backend takes when the endpoint has no port
_MASTER_PORT = 29500  # torchrun's default
_MISSPELLED = "PET_N_PROC_PER_NODE"  # v1.4 wrote it; torchrun knows no such variable
_STANDALONE = "PET_STANDALONE"

_MEETING = (
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)


def given_rendezvous(source: Source, master: Endpoint | None = None) -> Rendezvous | None:
    """The rendezvous, if one of the variables about it is set."""
    return rendezvous(source, master) if source.has_any(*_MEETING) else None


def rendezvous(source: Source, master: Endpoint | None) -> Rendezvous:
    """The rendezvous that torchrun would make: static unless a backend is named."""
    backend = source.text("PET_RDZV_BACKEND", "rdzv_backend", default=_STATIC)
    written = _written_endpoint(source, backend)
    told = source.raw("PET_RDZV_ENDPOINT")
    return Rendezvous(
        kind=_STATIC if backend == _STATIC else "dynamic",
        backend=backend,
        endpoint=written or (master if backend == _STATIC else None),
        written=told.strip() if told is not None and written else None,
        run_id=None if source.blank("PET_RDZV_ID") else source.text("PET_RDZV_ID", "rdzv_id"),
        conf=source.conf("PET_RDZV_CONF", "rdzv_conf"),
    )


def _written_endpoint(source: Source, backend: str) -> Endpoint | None:
    # An empty endpoint is torchrun's own default and says nothing.
    if source.blank("PET_RDZV_ENDPOINT"):
        return None
    default_port = _C10D_PORT if backend == _C10D else None
    return source.endpoint("PET_RDZV_ENDPOINT", "rdzv_endpoint", default_port=default_port)


def master(source: Source) -> Endpoint:
    """PET_MASTER_ADDR and PET_MASTER_PORT, both needed."""
    return Endpoint(
        source.host("PET_MASTER_ADDR", "master_addr"),
        source.port("PET_MASTER_PORT", "master_port"),
    )


def nodes(source: Source) -> NodeRange:
    """PET_NNODES, needed."""
    return source.node_range("PET_NNODES", "nodes")


def oddities(source: Source) -> dict[str, Json]:
    """Details about variables that torchrun would stumble over, with a warning for each."""
    details: dict[str, Json] = {}
    standalone = source.flag(_STANDALONE, "standalone", default=None)
    if standalone is not None:
        details["standalone"] = standalone
        if source.blank(_STANDALONE):
            details["must_unset_before_torchrun"] = (_STANDALONE,)
            source.warn(f"{_STANDALONE} is empty: the launcher reads it as 1, but torchrun itself fails on it")
    if source.has(_MISSPELLED):
        details["misspelled_env"] = _MISSPELLED
        source.warn(f"torchrun ignores the misspelled {_MISSPELLED}; did you mean PET_NPROC_PER_NODE?")
    return details


def job(source: Source, nodes: NodeRange | None, nproc: int | str | None, rendezvous: Rendezvous | None) -> Job:
    """What all jobs that torchrun may run have in common; reads what is left to read."""
    fixed = nodes.fixed if nodes else None
    return Job(
        nodes=nodes,
        nproc_per_node=nproc,
        world_size=fixed * nproc if fixed is not None and isinstance(nproc, int) else None,
        coordinator=rendezvous.endpoint if rendezvous else None,
        rendezvous=rendezvous,
        max_restarts=source.index("PET_MAX_RESTARTS", "max_restarts", default=None),
        engine="torchrun",
        details=oddities(source),
    )


def by_hand(source: Source) -> Job:
    """A job that only torchrun's own variables describe; each may be absent."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    node_rank = source.index("PET_NODE_RANK", "node_rank", below=nodes.max if nodes else None, default=None)
    meeting = given_rendezvous(source, _some_master(source))
    static = meeting is None or meeting.kind == _STATIC
    made = job(source, nodes, nproc, meeting)
    is_told = nodes is not None or source.has(_STANDALONE)
    shown = None if is_told else generic_env.several_nodes_shown_by(source)
    return replace(
        made,
        node_rank=node_rank,
        is_coordinator=node_rank == 0 if node_rank is not None and static else None,
        engine=None if shown is None else "torchrun",
        details=made.details if shown is None else {**made.details, "several_nodes_shown_by": shown},
    )


def _some_master(source: Source) -> Endpoint | None:
    # The port may be left out, the address may not.
    host = source.host("PET_MASTER_ADDR", "master_addr", default=None)
    port = source.port("PET_MASTER_PORT", "master_port", default=_MASTER_PORT)
    return None if host is None else Endpoint(host, port)


# -- elastic -----------------------------------------------------------------------------------


def read_elastic(source: Source, engine: str) -> Job:
    """Read a PyTorchJob with `elasticPolicy`: PET_RDZV_*, a range of nodes, ranks only with a Master."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    meeting = rendezvous(source, None)
    own = names.split_v1(source.pod.hostname)
    host = meeting.endpoint.host if meeting.endpoint else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
    made = job(source, nodes, nproc, meeting)
    return replace(
        made,
        role=own.role if own else "worker",
        hostname_index=own.index if own else None,
        is_coordinator=_is_host(host, meeting.backend, own) if own and host else None,
        members=_members(host, own, nodes),
        engine=engine,
        details={
            **made.details,
            **_master_too(source, own, nodes, nproc),
            "elastic": nodes.fixed is None if nodes else None,
        },
    )


def _is_host(host: str, backend: str | None, own: names.V1Name) -> bool:
    """Whether this pod is the one that the endpoint names; behind a name that is no pod's, worker 0 hosts.

    Such as a Service, or a rehearsal's loopback address. Backends other than c10d have a server of their own.
    """
    named = names.split_v1(host)
    if named is not None and named.job == own.job:
        return named == own
    return backend == _C10D and (own.role, own.index) == ("worker", 0)


def _members(host: str | None, own: names.V1Name | None, nodes: NodeRange | None) -> tuple[Member, ...] | None:
    if nodes is None:
        return None
    # The endpoint may be an etcd server; then only the own name shows the pattern.
    worker_0 = host if host and names.first_label(host).endswith(f"{names.V1_WORKER}0") else None
    if worker_0 is None and own and own.role == "worker":
        worker_0 = f"{own.job}{names.V1_WORKER}0"
    return names.members_like(worker_0, names.V1_WORKER, nodes.max) if worker_0 else None


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
    details = generic_env.rank_details(told, source.index("RANK", "env_rank"))
    if own and own.role == "master" and nodes:
        details["rank_behind_workers"] = _behind_workers(told, nodes, nproc)
    return details


def _behind_workers(told: int, nodes: NodeRange, nproc: int | str | None) -> int:
    """The Master's rank: the workers have their indices, and its own index is that of worker 0."""
    # WORLD_SIZE counts pods, in newer operators times nproc: where both can be, the larger rank is free as well.
    times = nproc if isinstance(nproc, int) and told > nodes.max + 1 and told % nproc == 0 else 1
    return told // times - 1
