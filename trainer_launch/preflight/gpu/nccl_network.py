"""NCCL uses the fast network that this container has, and does not fall back to plain sockets without a word."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus

NAME = "gpu-network"
NEEDS_LOAD = True


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """What a communicator of one rank has chosen, by its own log."""
    found = findings_of_gpus.load(subject)
    chosen = {one.network for one in found.tested if one.network} if found is not None else set()
    if not chosen:
        return
    used = ", ".join(sorted(chosen))
    active = [port for port in subject.adapters if port.is_active] if subject.has_rdma else []
    wished = subject.env.get("NCCL_IB_DISABLE") == "1" or subject.env.get("NCCL_NET") == "Socket"
    if "Socket" not in chosen or not active or wished or not subject.has_peers:
        yield Finding(check=NAME, status=Status.PASS, text=f"NCCL uses {used}", measured=used)
        return
    there = ", ".join(f"{port.device}:{port.port}" for port in active[:8])
    yield Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.JOB,
        text=f"NCCL falls back to plain sockets (NET/Socket) although adapters are up: {there}",
        measured="Socket",
        action="see NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK",
    )
