"""NCCL_IB_HCA leaves an adapter: otherwise NCCL goes on over plain sockets and says nothing."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.container import interface_filters

NAME = "nccl-ib-hca"


def check(subject: Subject) -> Iterator[Finding]:
    """Evaluate it as NCCL does, over the ports that are active."""
    spec = subject.env.get("NCCL_IB_HCA")
    if not subject.has_peers:
        yield Finding(check=NAME, status=Status.SKIPPED, text="there are no other nodes")
    elif subject.env.get("NCCL_IB_DISABLE") == "1":
        yield Finding(check=NAME, status=Status.SKIPPED, text="NCCL_IB_DISABLE=1")
    elif not (subject.adapters and subject.has_rdma) and not spec:
        yield Finding(check=NAME, status=Status.SKIPPED, text="this container was given no RDMA adapter")
    elif not (subject.adapters and subject.has_rdma):
        yield Finding(
            check=NAME,
            status=Status.WARN,
            text=f"NCCL_IB_HCA={spec}, but this container was given no RDMA adapter: NCCL will use plain sockets",
            action="request the RDMA device in the pod's resources, or unset NCCL_IB_HCA",
        )
    else:
        yield _evaluated(subject, spec)


def _evaluated(subject: Subject, spec: str | None) -> Finding:
    there = ", ".join(
        f"{port.device}:{port.port}{'' if port.is_active else ' (down)'}" for port in subject.adapters
    )
    chosen = interface_filters.nccl_adapters(spec, subject.adapters)
    said = f"NCCL_IB_HCA={spec}" if spec else "NCCL_IB_HCA is not set"
    if chosen:
        names = ", ".join(f"{port.device}:{port.port}" for port in chosen)
        return Finding(check=NAME, status=Status.PASS, text=f"{said}: {names}", measured=len(chosen), unit="ports")
    is_down = not any(port.is_active for port in subject.adapters)
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE if is_down else Fault.JOB,
        text=f"no port of an RDMA adapter is active: {there}" if is_down else f"{said} leaves none of {there}",
        measured=0,
        unit="ports",
        action="report this node" if is_down else f"set NCCL_IB_HCA to what is here: {there}",
    )
