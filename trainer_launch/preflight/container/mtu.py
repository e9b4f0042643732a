"""There is a way to the other nodes, and packets on it may be as large as any network allows."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "mtu"
LEAST = 1280  # what IPv6 asks of every link; overlays have 1370 and more


def check(subject: Subject) -> Iterator[Finding]:
    """Ask the kernel how it would reach the coordinator; where that is not known, look at the interfaces."""
    if not subject.has_remote_peers:
        yield Finding(check=NAME, status=Status.SKIPPED, text="this machine has no traffic to other nodes")
        return
    target = _coordinator(subject)
    if target is None and not subject.interfaces:
        yield Finding(check=NAME, status=Status.UNKNOWN, text="the kernel does not list the network interfaces")
        return
    if target is None:
        found = {one.name: one.mtu for one in subject.interfaces if one.is_up and not one.is_loopback}
        yield _judged(found) if found else _no_way("no interface but loopback is up")
        return
    try:
        route = subject.route_to(target)
    except OSError as problem:
        yield _no_way(f"there is no route to node 0 at {target}: {problem.strerror or problem}")
        return
    through = [one for one in subject.interfaces if route.source in one.addresses]
    yield _judged({through[0].name if through else route.source: route.mtu})


def _coordinator(subject: Subject) -> str | None:
    """Node 0's address, once its name resolves; what is wrong with names is said by another check."""
    coordinator = subject.topology.coordinator
    if coordinator is None or subject.topology.is_coordinator:
        return None
    try:
        return min(subject.lookup(coordinator.host), key=lambda address: (":" in address, address))
    except OSError:
        return None


def _judged(mtus: dict[str, int]) -> Finding:
    shown = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
    small = min(mtus.values())
    if small >= LEAST:
        return Finding(check=NAME, status=Status.PASS, text=f"MTU {shown}", measured=small, unit="bytes")
    return Finding(
        check=NAME,
        status=Status.WARN,
        text=f"packets may be no larger than {small} bytes: {shown}",
        measured=small,
        expected=LEAST,
        unit="bytes",
        action="raise the MTU of the pod network to that of the nodes' network, less the overlay's share",
    )


def _no_way(text: str) -> Finding:
    action = "look at the pod network (CNI) of this node"
    return Finding(check=NAME, status=Status.FAIL, fault=Fault.NODE, text=text, action=action)
