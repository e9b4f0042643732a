"""This host's own name leads to an address of its own: where it does not, gloo listens on loopback or nowhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from trainer_launch.host.network import named
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "own-name"


def check(subject: Subject) -> Iterator[Finding]:
    """Look the name up as gloo does, and compare."""
    name = subject.host.hostname
    try:
        found = subject.lookup(name)
    except OSError as problem:
        yield _bad(
            subject, f"this host's own name {name} does not resolve ({problem.strerror or problem})", "nothing"
        )
        return
    if not subject.interfaces:
        yield Finding(check=NAME, status=Status.UNKNOWN, text="the kernel does not list the network interfaces")
        return
    own = {address for interface in subject.interfaces for address in interface.addresses}
    shown = ", ".join(sorted(found))
    beyond = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if subject.has_remote_peers and not beyond:
        yield _bad(
            subject, f"this host's own name {name} resolves to {shown}, which other nodes cannot reach", shown
        )
    elif not found & own:
        has = named([one for one in subject.interfaces if not one.is_loopback]) or "none but loopback's"
        yield _bad(subject, f"this host's own name {name} resolves to {shown}, but this host has {has}", shown)
    else:
        yield Finding(check=NAME, status=Status.PASS, text=f"{name} resolves to {shown}", measured=shown)


def _bad(subject: Subject, text: str, measured: str) -> Finding:
    """A failure where gloo will be used and was not told better."""
    told = bool(subject.env.get("GLOO_SOCKET_IFNAME"))
    certain = subject.has_remote_peers and subject.is_torch and not told and not subject.may_use_gpus
    usable = [found.name for found in subject.interfaces if found.is_up and not found.is_local_only]
    return Finding(
        check=NAME,
        status=Status.FAIL if certain else Status.WARN,
        fault=Fault.JOB if certain else None,
        text=text,
        measured=measured,
        expected="an address of an interface here, not loopback",
        action=f"set GLOO_SOCKET_IFNAME={usable[0] if usable else 'INTERFACE'} (an exact name), or fix /etc/hosts",
    )
