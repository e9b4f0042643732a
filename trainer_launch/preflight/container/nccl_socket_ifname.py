"""NCCL_SOCKET_IFNAME, or what NCCL takes without it, leaves an interface that other nodes can reach."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.host.network import named
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.container import interface_filters

NAME = "nccl-socket-ifname"


def check(subject: Subject) -> Iterator[Finding]:
    """Evaluate it as NCCL does."""
    spec = subject.env.get("NCCL_SOCKET_IFNAME")
    if spec is None and subject.host.gpus.count == 0:
        yield Finding(check=NAME, status=Status.SKIPPED, text="it is not set, and no GPU is here")
        return
    if not subject.interfaces:
        yield Finding(check=NAME, status=Status.UNKNOWN, text="the kernel does not list the network interfaces")
        return
    chosen = interface_filters.nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY"))
    names = named(chosen)
    said = "NCCL_SOCKET_IFNAME is not set" if spec is None else f"NCCL_SOCKET_IFNAME={spec}"
    if not chosen:
        yield _bad(subject, f"{said} leaves no interface here")
    elif subject.has_remote_peers and all(found.is_loopback for found in chosen):
        yield _bad(subject, f"{said} leaves only {names}, which other nodes cannot reach")
    elif subject.has_remote_peers and any(found.is_local_only for found in chosen):
        yield _bad(subject, f"{said} takes {names}, not all of which lead to other nodes", is_certain=False)
    else:
        yield Finding(check=NAME, status=Status.PASS, text=f"{said}: {names}", measured=names)


def _bad(subject: Subject, text: str, *, is_certain: bool = True) -> Finding:
    """A failure where there are GPUs; elsewhere NCCL is not used, unless this container only does not see them."""
    fails = is_certain and subject.host.gpus.count > 0
    usable = [found.name for found in subject.interfaces if found.is_up and not found.is_local_only]
    return Finding(
        check=NAME,
        status=Status.FAIL if fails else Status.WARN,
        fault=Fault.JOB if fails else None,
        text=text,
        evidence=(f"here are {named(subject.interfaces)}",),
        action=f"set NCCL_SOCKET_IFNAME=={usable[0]} (= for an exact name)" if usable else "give the pod a network",
    )
