"""Every check, in one list, in the order in which a person would look."""

from __future__ import annotations

from typing import Any

from trainer_launch.host import logs
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.preflight import container_checks, external_check, gpu_checks, mpi_hosts
from trainer_launch.preflight.check import Check, Where
from trainer_launch.preflight.cluster import node_facts, pairs, present_nodes

CHECKS: tuple[Check[Any], ...] = (
    external_check.external,
    container_checks.memory,
    container_checks.cpu,
    container_checks.pids,
    container_checks.nofile,
    container_checks.memlock,
    container_checks.shm,
    container_checks.tmpdir,
    container_checks.storage,
    container_checks.own_name,
    container_checks.dns,
    container_checks.gloo_socket_ifname,
    container_checks.nccl_socket_ifname,
    container_checks.nccl_ib_hca,
    container_checks.rdma_errors,
    *gpu_checks.CHECKS,
    present_nodes.all_present,
    node_facts.facts,
    node_facts.clock,
    *gpu_checks.SPEED,
    pairs.pairs,
    mpi_hosts.mpi_hosts,
    mpi_hosts.mpi_ssh,
    mpi_hosts.mpi_programs,
)


# Checks of 0.2: one that an option still names is a warning in 0.3, and unknown in 0.4.
REMOVED = frozenset(
    (
        *("program", "rank-collision", "shm-leftovers", "mtu", "gpu-persistence", "mpi-callback", "mpi-ring"),
        *("subdomain", "ephemeral-ports", "gpu-temperature", "mpi-slots", "full-job", "gpu-checksum"),
        *("shared-storage", "ports"),
    )
)


def at(*places: Where) -> tuple[Check[Any], ...]:
    """The checks that run there."""
    return tuple(check for check in CHECKS if check.where in places)


def ids(*places: Where) -> tuple[str, ...]:
    """Their names."""
    return tuple(check.id for check in at(*places))


def is_known(name: str, flag: str) -> bool:
    """Whether there is this check; one that is gone is a warning. Raises UsageError: there never was."""
    if name in REMOVED:
        logs.warn(f"check {name} no longer exists; remove it from {flag}")
    elif name not in ids(*Where):
        near = did_you_mean(name, ids(*Where)) or "preflight --list prints all checks"
        raise UsageError(f"{flag} names {name[:60]!r}, which is not a check; {near}")
    return name not in REMOVED


def named(text: str | None, flag: str) -> tuple[str, ...]:
    """The checks that a comma-separated list names. Raises UsageError: one of them does not exist."""
    names = filter(None, map(str.strip, (text or "").split(",")))
    return tuple(name for name in names if is_known(name, flag))


def listed() -> str:
    """All of them for people: where each runs, its name, and what a pass means."""
    width = max(len(check.id) for check in CHECKS)
    lines = []
    for place in Where:
        lines += ["", f"{place.value}:"]
        lines += [f"  {check.id:{width}}  {check.title}" for check in at(place)]
    return "\n".join(lines[1:]) + "\n"
