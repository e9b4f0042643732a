"""How torchrun itself reads its PET_* variables, for every contract that carries them."""

from __future__ import annotations

from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Job, Json, NodeRange, Rendezvous

STATIC = "static"
C10D = "c10d"
C10D_PORT = 29400  # what torch's c10d backend takes when the endpoint has no port
MASTER_PORT = 29500  # torchrun's default
MISSPELLED = "PET_N_PROC_PER_NODE"  # v1.4 wrote it; torchrun knows no such variable
STANDALONE = "PET_STANDALONE"

_MEETING = (
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)


def says_how_to_meet(source: Source) -> bool:
    """Whether one of the variables about the rendezvous is set."""
    return source.has_any(*_MEETING)


def rendezvous(source: Source, master: Endpoint | None) -> Rendezvous:
    """The rendezvous that torchrun would make: static unless a backend is named."""
    backend = source.text("PET_RDZV_BACKEND", "rdzv_backend", default=STATIC)
    written = _written_endpoint(source, backend)
    told = source.raw("PET_RDZV_ENDPOINT")
    return Rendezvous(
        kind=STATIC if backend == STATIC else "dynamic",
        backend=backend,
        endpoint=written or (master if backend == STATIC else None),
        written=told.strip() if told is not None and written else None,
        run_id=None if source.blank("PET_RDZV_ID") else source.text("PET_RDZV_ID", "rdzv_id"),
        conf=source.conf("PET_RDZV_CONF", "rdzv_conf"),
    )


def _written_endpoint(source: Source, backend: str) -> Endpoint | None:
    # An empty endpoint is torchrun's own default and says nothing.
    if source.blank("PET_RDZV_ENDPOINT"):
        return None
    default_port = C10D_PORT if backend == C10D else None
    return source.endpoint("PET_RDZV_ENDPOINT", "rdzv_endpoint", default_port=default_port)


def master(source: Source) -> Endpoint:
    """PET_MASTER_ADDR and PET_MASTER_PORT, both needed."""
    return Endpoint(
        source.host("PET_MASTER_ADDR", "master_addr"),
        source.port("PET_MASTER_PORT", "master_port"),
    )


def some_master(source: Source) -> Endpoint | None:
    """The master by hand: the port may be left out, the address may not."""
    host = source.host("PET_MASTER_ADDR", "master_addr", default=None)
    port = source.port("PET_MASTER_PORT", "master_port", default=MASTER_PORT)
    return None if host is None else Endpoint(host, port)


def nodes(source: Source) -> NodeRange:
    """PET_NNODES, needed."""
    return source.node_range("PET_NNODES", "nodes")


def max_restarts(source: Source) -> int | None:
    """PET_MAX_RESTARTS, when it is set."""
    return source.index("PET_MAX_RESTARTS", "max_restarts", default=None)


def world_size(nodes: NodeRange | None, nproc: int | str | None) -> int | None:
    """Processes in the job, when both numbers are fixed."""
    fixed = nodes.fixed if nodes else None
    return fixed * nproc if fixed is not None and isinstance(nproc, int) else None


def oddities(source: Source) -> dict[str, Json]:
    """Details about variables that torchrun would stumble over, with a warning for each."""
    details: dict[str, Json] = {}
    standalone = source.flag(STANDALONE, "standalone", default=None)
    if standalone is not None:
        details["standalone"] = standalone
        if source.blank(STANDALONE):
            details["must_unset_before_torchrun"] = (STANDALONE,)
            source.warn(f"{STANDALONE} is empty: the launcher reads it as 1, but torchrun itself fails on it")
    if source.has(MISSPELLED):
        details["misspelled_env"] = MISSPELLED
        source.warn(f"torchrun ignores the misspelled {MISSPELLED}; did you mean PET_NPROC_PER_NODE?")
    return details


def by_hand(source: Source) -> Job:
    """A job that only torchrun's own variables describe; each may be absent."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    node_rank = source.index("PET_NODE_RANK", "node_rank", below=nodes.max if nodes else None, default=None)
    meeting = rendezvous(source, some_master(source)) if says_how_to_meet(source) else None
    static = meeting is None or meeting.kind == STATIC
    return Job(
        contract=source.contract,
        nodes=nodes,
        nproc_per_node=nproc,
        node_rank=node_rank,
        world_size=world_size(nodes, nproc),
        coordinator=meeting.endpoint if meeting else None,
        is_coordinator=node_rank == 0 if node_rank is not None and static else None,
        rendezvous=meeting,
        max_restarts=max_restarts(source),
        details=oddities(source),
    )
