"""GLOO_SOCKET_IFNAME names interfaces that are here: gloo wants exact names, and each of them."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.host.network import named
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.container import interface_filters

NAME = "gloo-socket-ifname"


def check(subject: Subject) -> Iterator[Finding]:
    """Evaluate it as gloo does."""
    spec = subject.env.get("GLOO_SOCKET_IFNAME")
    if spec is None or len(spec) < 2:  # torch passes over a single letter, too
        yield Finding(check=NAME, status=Status.SKIPPED, text="it is not set; own-name tells what gloo does then")
        return
    if not subject.interfaces:
        yield Finding(check=NAME, status=Status.UNKNOWN, text="the kernel does not list the network interfaces")
        return
    found, missing = interface_filters.gloo_interfaces(spec, subject.interfaces)
    if missing:
        text = f"GLOO_SOCKET_IFNAME={spec} names {', '.join(missing)}, which is not here"
        if any(mark in spec for mark in "^=*:"):
            text += "; gloo knows no patterns"
        yield _bad(subject, text)
    elif subject.has_remote_peers and any(one.is_loopback for one in found):
        yield _bad(subject, f"GLOO_SOCKET_IFNAME={spec} takes loopback, which other nodes cannot reach")
    else:
        yield Finding(check=NAME, status=Status.PASS, text=f"GLOO_SOCKET_IFNAME={spec} is here", measured=spec)


def _bad(subject: Subject, text: str) -> Finding:
    """A failure where gloo will be used; beside NCCL it may not be."""
    fails = subject.is_torch and not subject.may_use_gpus
    usable = [found.name for found in subject.interfaces if found.is_up and not found.is_local_only]
    return Finding(
        check=NAME,
        status=Status.FAIL if fails else Status.WARN,
        fault=Fault.JOB if fails else None,
        text=text,
        evidence=(f"here are {named(subject.interfaces)}",),
        action=f"set GLOO_SOCKET_IFNAME={usable[0]}" if usable else "unset it",
    )
