"""Which worker of its node a process is, by its variables: torch elastic, Open MPI, PMIx, MPICH, Horovod. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK")
_GLOBAL = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # RANK may be a whole pod's

Env = Mapping[str, str]


def chosen(processes: Mapping[int, Env], parents: Mapping[int, int], local_rank: int) -> int | None:
    """The pid of the worker with this local rank; what it has forked has its variables too, and is not it."""
    local = {pid: _first(env, _LOCAL) for pid, env in processes.items()}
    if any(rank is not None for rank in local.values()):
        mine = [pid for pid, rank in local.items() if rank == local_rank]
        return next((pid for pid in mine if parents.get(pid, 0) not in mine), None)
    ranks = {pid: rank for pid, env in processes.items() if (rank := _first(env, _GLOBAL)) is not None}
    by_rank = sorted((rank, pid) for pid, rank in ranks.items() if ranks.get(parents.get(pid, 0)) != rank)
    return by_rank[local_rank][1] if local_rank < len(by_rank) else None


def _first(env: Env, names: tuple[str, ...]) -> int | None:
    found = (env[name] for name in names if env.get(name, "").isdecimal())
    text = next(found, None)
    return None if text is None or len(text) > 9 else int(text)
