"""How torchrun itself reads its PET_* variables, for every contract that has them; and what shows other nodes."""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Job, NodeRange, Rendezvous

STATIC = "static"
C10D = "c10d"
_C10D_PORT = 29400  # what torch's c10d backend takes when the endpoint has no port
_MASTER_PORT = 29500  # torchrun's default
_MISSPELLED = "PET_N_PROC_PER_NODE"  # v1.4 wrote it; torchrun knows no such variable
_STANDALONE = "PET_STANDALONE"

_MEETING = (
    *("PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_CONF"),
    *("PET_MASTER_ADDR", "PET_MASTER_PORT"),
)


def given_rendezvous(source: Source, master: Endpoint | None = None) -> Rendezvous | None:
    """The rendezvous, if one of the variables about it is set."""
    return rendezvous(source, master) if source.has_any(*_MEETING) else None


def rendezvous(source: Source, master: Endpoint | None) -> Rendezvous:
    """The rendezvous that torchrun would make: static unless a backend is named."""
    backend = source.text("PET_RDZV_BACKEND", "rdzv_backend", default=STATIC)
    written = _written_endpoint(source, backend)
    return Rendezvous(
        kind=STATIC if backend == STATIC else "dynamic",
        backend=backend,
        endpoint=written or (master if backend == STATIC else None),
        written=source.peek("PET_RDZV_ENDPOINT") if written else None,
        run_id=None if source.blank("PET_RDZV_ID") else source.text("PET_RDZV_ID", "rdzv_id"),
        conf=source.conf("PET_RDZV_CONF", "rdzv_conf"),
    )


def _written_endpoint(source: Source, backend: str) -> Endpoint | None:
    # An empty endpoint is torchrun's own default and says nothing.
    if source.blank("PET_RDZV_ENDPOINT"):
        return None
    default_port = _C10D_PORT if backend == C10D else None
    return source.endpoint("PET_RDZV_ENDPOINT", "rdzv_endpoint", default_port=default_port, naked_ipv6=True)


def master(source: Source) -> Endpoint:
    """PET_MASTER_ADDR and PET_MASTER_PORT, both needed."""
    return Endpoint(source.host("PET_MASTER_ADDR", "master_addr"), source.port("PET_MASTER_PORT", "master_port"))


def _warn_of_oddities(source: Source) -> None:
    """Warn of variables that torchrun would stumble over."""
    if source.flag(_STANDALONE, "standalone", default=None) is not None and source.blank(_STANDALONE):
        source.derive(must_unset_before_torchrun=(_STANDALONE,))
        source.warn(f"{_STANDALONE} is empty: the launcher reads it as 1, but torchrun itself fails on it")
    if source.has(_MISSPELLED):
        source.derive(misspelled_env=_MISSPELLED)
        source.warn(f"torchrun ignores the misspelled {_MISSPELLED}; did you mean PET_NPROC_PER_NODE?")


def job(source: Source, nodes: NodeRange | None, nproc: int | str | None, rendezvous: Rendezvous | None) -> Job:
    """A job that torchrun may run; reads the variables that all such jobs have in common."""
    fixed = nodes.fixed if nodes else None
    restarts = source.index("PET_MAX_RESTARTS", "max_restarts", default=None)
    _warn_of_oddities(source)
    return Job(
        nodes=nodes,
        nproc_per_node=nproc,
        world_size=fixed * nproc if fixed is not None and isinstance(nproc, int) else None,
        coordinator=rendezvous.endpoint if rendezvous else None,
        rendezvous=rendezvous,
        max_restarts=restarts,
        engine="torchrun",
    )


def by_hand(source: Source) -> Job:
    """A job that only torchrun's own variables describe; each may be absent."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    node_rank = source.index("PET_NODE_RANK", "node_rank", below=nodes.max if nodes else None, default=None)
    meeting = given_rendezvous(source, _some_master(source))
    static = meeting is None or meeting.kind == STATIC
    made = job(source, nodes, nproc, meeting)
    is_complete = nodes is not None or source.has(_STANDALONE)
    shown = None if is_complete else several_nodes_shown_by(source)
    return replace(
        made,
        node_rank=node_rank,
        is_coordinator=node_rank == 0 if node_rank is not None and static else None,
        engine=None if shown is None else "torchrun",
        several_nodes_shown_by=shown,
    )


def _some_master(source: Source) -> Endpoint | None:
    # The port may be left out, the address may not.
    host = source.host("PET_MASTER_ADDR", "master_addr", default=None)
    port = source.port("PET_MASTER_PORT", "master_port", default=_MASTER_PORT)
    return None if host is None else Endpoint(host, port)


def shows_others(source: Source) -> bool:
    """Whether MASTER_ADDR is another pod's; on loopback, or in a job of one pod, it says nothing of others.

    127.0.0.2 and up are pods of a rehearsal.
    """
    return source.peek("MASTER_ADDR") not in ("127.0.0.1", "localhost", "::1") and source.peek("WORLD_SIZE") != "1"


def several_nodes_shown_by(source: Source) -> str | None:
    """The variable by which a user's own manifest shows several nodes; None: there is none."""
    named = [name for name in ("NODE_RANK", "WORLD_SIZE") if source.peek(name)]
    if named and source.peek("MASTER_ADDR") and shows_others(source):
        return named[0]
    return "NODE_RANK" if source.peek("NODE_RANK") not in ("", "0") else None
