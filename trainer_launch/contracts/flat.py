"""The `job` object of `explain --json`: one level, the common keys always there, null for what nobody said."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.model import Job, Json, Member, Rendezvous


def flat(job: Job) -> dict[str, Json]:
    """A job as plain JSON: the common keys, then the contract's own details."""
    nodes = job.nodes
    made: dict[str, Json] = {
        "contract": job.contract,
        "role": job.role,
        "nodes": nodes.fixed if nodes else None,
        "min_nodes": nodes.min if nodes else None,
        "max_nodes": nodes.max if nodes else None,
        "nproc_per_node": job.nproc_per_node,
        "node_rank": job.node_rank,
        "hostname_index": job.hostname_index,
        "world_size": job.world_size,
        **_master(job),
        **_hosts(job.members),
        "is_coordinator": job.is_coordinator,
        **_rendezvous(job.rendezvous),
        "max_restarts": job.max_restarts,
        "elastic": nodes.fixed is None if nodes else None,
        "standalone": None,
    }
    made.update((key, _plain(value)) for key, value in job.details.items())
    return made


def _master(job: Job) -> dict[str, Json]:
    # An endpoint that was told as a rendezvous names no master.
    told = job.rendezvous is not None and job.rendezvous.written is not None
    dynamic = job.rendezvous is not None and job.rendezvous.kind == "dynamic"
    master = None if told or dynamic else job.coordinator
    return {
        "master_addr": master.host if master else None,
        "master_port": master.port if master else None,
    }


def _hosts(members: tuple[Member, ...] | None) -> dict[str, Json]:
    if members is None:
        return {"hosts": None, "slots": None, "total_slots": None}
    told = [m.slots for m in members if m.slots is not None]
    complete = len(told) == len(members)
    return {
        "hosts": [m.host for m in members],
        "slots": list(told) if complete else None,
        "total_slots": sum(told) if complete else None,
    }


def _rendezvous(meeting: Rendezvous | None) -> dict[str, Json]:
    if meeting is None:
        keys = ("rendezvous", "rdzv_backend", "rdzv_endpoint", "rdzv_host", "rdzv_port", "rdzv_id", "rdzv_conf")
        return dict.fromkeys(keys)
    endpoint = meeting.endpoint if meeting.written is not None else None
    return {
        "rendezvous": meeting.kind,
        "rdzv_backend": meeting.backend,
        "rdzv_endpoint": meeting.written,
        "rdzv_host": endpoint.host if endpoint else None,
        "rdzv_port": endpoint.port if endpoint else None,
        "rdzv_id": meeting.run_id,
        "rdzv_conf": dict(meeting.conf),
    }


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
