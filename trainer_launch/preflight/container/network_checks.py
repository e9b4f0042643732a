"""The network of a pod: the interfaces and adapters that gloo and NCCL take, and its ports.

NCCL (src/misc/socket.cc, src/misc/utils.cc): a list of prefixes, `=` before it makes them exact names, `^` in front
of all that leaves them out. A value of one letter is as good as none. NCCL_IB_HCA likewise, with `:port` behind.
gloo in torch (ProcessGroupGloo::createDefaultDevice): a list of exact names, each of which has to be there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from trainer_launch.host.network import AdapterPort, Interface, named
from trainer_launch.model.findings import Fault, Finding
from trainer_launch.model.value_parsers import parse_number
from trainer_launch.preflight.check import Subject, check

_FAMILIES = {"AF_INET": ".", "AF_INET6": ":"}  # what an address of it has in it


def nccl_interfaces(
    spec: str | None, interfaces: Sequence[Interface], family: str | None = None
) -> tuple[Interface, ...]:
    """What NCCL bootstraps and sends through; without a spec, first ib*, else all but docker* and lo."""
    mark = _FAMILIES.get(family or "", "")
    able = [found for found in interfaces if found.is_up and any(mark in address for address in found.addresses)]
    if spec is not None and len(spec) > 1:
        return _chosen(spec, able)
    for tried in ("ib", "^docker,lo,virbr", "docker", "lo"):
        chosen = _chosen(tried, able)
        if chosen:
            return chosen
    return ()


def gloo_interfaces(spec: str, interfaces: Sequence[Interface]) -> tuple[tuple[Interface, ...], tuple[str, ...]]:
    """What gloo takes, and the names that are not there."""
    by_name = {found.name: found for found in interfaces}
    words = [word for word in spec.split(",") if word]
    found = tuple(by_name[word] for word in words if word in by_name)
    return found, tuple(word for word in words if word not in by_name)


def nccl_adapters(spec: str | None, ports: Sequence[AdapterPort]) -> tuple[AdapterPort, ...]:
    """The active ports that NCCL takes."""
    active = tuple(port for port in ports if port.is_active)
    return tuple(port for port in active if _takes(spec, port.device, port.port)) if spec else active


def _chosen(spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    return tuple(found for found in interfaces if _takes(spec, found.name, None))


def _takes(spec: str, name: str, port: int | None) -> bool:
    """Whether the list means this one, or `^`, does not leave it out."""
    inverted = spec.startswith("^")
    rest = spec[inverted:]
    exact = rest.startswith("=")
    words = [word for word in rest[exact:].split(",") if word]
    return inverted != (not words or any(_fits(name, port, word, exact=exact) for word in words))


def _fits(name: str, port: int | None, word: str, *, exact: bool) -> bool:
    wanted, _, number = word.partition(":")
    fits = name == wanted if exact else name.startswith(wanted)
    told = parse_number(number, 0, 65535)
    return fits and (port is None or told is None or told == port)


@check("gloo-socket-ifname")
def gloo_socket_ifname(subject: Subject) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME names interfaces that are here: gloo wants exact names, and each of them."""
    spec = subject.env.get("GLOO_SOCKET_IFNAME")
    if spec is None or len(spec) < 2:  # torch passes over a single letter, too
        yield gloo_socket_ifname.skipped("it is not set; own-name tells what gloo does then")
        return
    if not subject.interfaces:
        yield gloo_socket_ifname.unknown("the kernel does not list the network interfaces")
        return
    found, missing = gloo_interfaces(spec, subject.interfaces)
    if missing:
        text = f"GLOO_SOCKET_IFNAME={spec} names {', '.join(missing)}, which is not here"
        if any(mark in spec for mark in "^=*:"):
            text += "; gloo knows no patterns"
        yield _bad_for_gloo(subject, text)
    elif subject.has_remote_peers and any(one.is_loopback for one in found):
        yield _bad_for_gloo(subject, f"GLOO_SOCKET_IFNAME={spec} takes loopback, which other nodes cannot reach")
    else:
        yield gloo_socket_ifname.passed(f"GLOO_SOCKET_IFNAME={spec} is here", measured=spec)


def _bad_for_gloo(subject: Subject, text: str) -> Finding:
    """A failure where gloo will be used; beside NCCL it may not be."""
    fails = subject.is_torch and not subject.may_use_gpus
    usable = subject.way_out
    action = f"set GLOO_SOCKET_IFNAME={usable}" if usable else "unset it"
    return gloo_socket_ifname.bad(Fault.JOB if fails else None, text, evidence=_here(subject), action=action)


@check("nccl-socket-ifname")
def nccl_socket_ifname(subject: Subject) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME, or what NCCL takes without it, leaves an interface that other nodes can reach."""
    spec = subject.env.get("NCCL_SOCKET_IFNAME")
    if spec is None and subject.host.gpus.cuda == 0:
        yield nccl_socket_ifname.skipped("it is not set, and no GPU is here")
        return
    if not subject.interfaces:
        yield nccl_socket_ifname.unknown("the kernel does not list the network interfaces")
        return
    chosen = nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY"))
    names = named(chosen)
    said = "NCCL_SOCKET_IFNAME is not set" if spec is None else f"NCCL_SOCKET_IFNAME={spec}"
    if not chosen:
        yield _bad_for_nccl(subject, f"{said} leaves no interface here")
    elif subject.has_remote_peers and all(found.is_loopback for found in chosen):
        yield _bad_for_nccl(subject, f"{said} leaves only {names}, which other nodes cannot reach")
    elif subject.has_remote_peers and any(found.is_local_only for found in chosen):
        yield _bad_for_nccl(
            subject, f"{said} takes {names}, not all of which lead to other nodes", is_certain=False
        )
    else:
        yield nccl_socket_ifname.passed(f"{said}: {names}", measured=names)


def _bad_for_nccl(subject: Subject, text: str, *, is_certain: bool = True) -> Finding:
    """A failure where there are GPUs; elsewhere NCCL is not used, unless this container only does not see them."""
    fails = is_certain and subject.host.gpus.cuda > 0
    usable = subject.way_out
    action = f"set NCCL_SOCKET_IFNAME=={usable} (= for an exact name)" if usable else "give the pod a network"
    return nccl_socket_ifname.bad(Fault.JOB if fails else None, text, evidence=_here(subject), action=action)


def _here(subject: Subject) -> tuple[str]:
    return (f"here are {named(subject.interfaces)}",)


@check("nccl-ib-hca")
def nccl_ib_hca(subject: Subject) -> Iterator[Finding]:
    """NCCL_IB_HCA leaves an adapter: otherwise NCCL goes on over plain sockets and says nothing."""
    spec = subject.env.get("NCCL_IB_HCA")
    if not subject.has_peers:
        yield nccl_ib_hca.skipped("there are no other nodes")
    elif subject.env.get("NCCL_IB_DISABLE") == "1":
        yield nccl_ib_hca.skipped("NCCL_IB_DISABLE=1")
    elif not (subject.adapters and subject.has_rdma) and not spec:
        yield nccl_ib_hca.skipped("this container was given no RDMA adapter")
    elif not (subject.adapters and subject.has_rdma):
        yield nccl_ib_hca.warned(
            f"NCCL_IB_HCA={spec}, but this container was given no RDMA adapter: NCCL will use plain sockets",
            action="request the RDMA device in the pod's resources, or unset NCCL_IB_HCA",
        )
    else:
        yield _adapters(subject, spec)


def _adapters(subject: Subject, spec: str | None) -> Finding:
    there = ", ".join(
        f"{port.device}:{port.port}{'' if port.is_active else ' (down)'}" for port in subject.adapters
    )
    chosen = nccl_adapters(spec, subject.adapters)
    said = f"NCCL_IB_HCA={spec}" if spec else "NCCL_IB_HCA is not set"
    if chosen:
        names = ", ".join(f"{port.device}:{port.port}" for port in chosen)
        return nccl_ib_hca.passed(f"{said}: {names}", measured=len(chosen), unit="ports")
    is_down = not any(port.is_active for port in subject.adapters)
    return nccl_ib_hca.failed(
        Fault.NODE if is_down else Fault.JOB,
        f"no port of an RDMA adapter is active: {there}" if is_down else f"{said} leaves none of {there}",
        measured=0,
        unit="ports",
        action="report this node" if is_down else f"set NCCL_IB_HCA to what is here: {there}",
    )


@check("ports")
def ports(subject: Subject) -> Iterator[Finding]:
    """The port that all nodes meet at is free on the node that opens it."""
    coordinator = subject.topology.coordinator
    if coordinator is None or not subject.has_peers or not subject.topology.is_coordinator:
        yield ports.skipped("this node opens no port that others know")
        return
    problem = subject.port_problem(coordinator.port)
    if problem is None:
        yield ports.passed(f"port {coordinator.port} is free")
        return
    number, holder = problem
    may_not = number in (errno.EACCES, errno.EPERM)
    yield ports.failed(
        Fault.JOB if may_not else Fault.NODE,
        f"port {coordinator.port} of node 0 cannot be opened here: {os.strerror(number)}"
        + (f", {holder} has it" if holder else ""),
        measured=coordinator.port,
        action="choose a port above 1023"
        if may_not
        else "end what has it, a sidecar or with hostNetwork another pod, or choose another port",
    )
