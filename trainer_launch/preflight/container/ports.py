"""The port that all nodes meet at is free on the node that opens it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "ports"


def check(subject: Subject) -> Iterator[Finding]:
    """Listen on it for a moment, where it is this node's to open."""
    coordinator = subject.topology.coordinator
    if coordinator is None or not subject.has_peers or not subject.topology.is_coordinator:
        yield Finding(check=NAME, status=Status.SKIPPED, text="this node opens no port that others know")
        return
    trouble = subject.port_trouble(coordinator.port)
    if trouble is None:
        yield Finding(check=NAME, status=Status.PASS, text=f"port {coordinator.port} is free")
        return
    number, holder = trouble
    may_not = number in (errno.EACCES, errno.EPERM)
    yield Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.JOB if may_not else Fault.NODE,
        text=f"port {coordinator.port} of node 0 cannot be opened here: {os.strerror(number)}"
        + (f", {holder} has it" if holder else ""),
        measured=coordinator.port,
        action="choose a port above 1023"
        if may_not
        else "end what has it, a sidecar or with hostNetwork another pod, or choose another port",
    )
