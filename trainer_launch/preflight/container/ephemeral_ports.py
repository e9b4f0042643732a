"""The kernel has enough ports for the job's connections, and does not give away the one that the nodes meet at."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "ephemeral-ports"
# Ports of a node: for services of all kinds; for each worker, as NCCL listens once for each channel and peer; for
# the connections to each rank.
BASE, EACH_WORKER, EACH_RANK = 1024, 256, 1


def check(subject: Subject) -> Iterator[Finding]:
    """Count the range without what is reserved."""
    if subject.limits.ephemeral_ports is None:
        yield Finding(check=NAME, status=Status.UNKNOWN, text="the kernel does not tell its range of ports")
        return
    low, high = subject.limits.ephemeral_ports
    reserved = subject.limits.reserved_ports
    count = high - low + 1 - sum(max(0, min(high, last) - max(low, first) + 1) for first, last in reserved)
    need = BASE + EACH_WORKER * subject.workers + EACH_RANK * subject.ranks
    yield from _too_few(low, high, count, need) if count < need else ()
    coordinator = subject.topology.coordinator
    port = coordinator.port if coordinator is not None and subject.has_peers else None
    exposed = port is not None and low <= port <= high and not any(a <= port <= b for a, b in reserved)
    if exposed:
        yield Finding(
            check=NAME,
            status=Status.WARN,
            text=f"port {port} of node 0 is one that the kernel gives to any connection ({low} to {high})",
            measured=port,
            action=f"choose a port below {low}, or reserve it (sysctl net.ipv4.ip_local_reserved_ports={port})",
        )
    elif count >= need:
        yield Finding(
            check=NAME, status=Status.PASS, text=f"{count} ports, {low} to {high}", measured=count, unit="ports"
        )


def _too_few(low: int, high: int, count: int, need: int) -> Iterator[Finding]:
    yield Finding(
        check=NAME,
        status=Status.WARN,
        text=f"the kernel has {count} ports for connections ({low} to {high}); this job may need {need}",
        measured=count,
        expected=need,
        unit="ports",
        action="widen sysctl net.ipv4.ip_local_port_range in the pod's securityContext.sysctls (it is a safe one)",
    )
