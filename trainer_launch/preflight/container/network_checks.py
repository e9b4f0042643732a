"""The network of a pod: the interfaces and adapters that gloo and NCCL take, and its ports.

NCCL (src/misc/socket.cc, src/misc/utils.cc): a list of prefixes, `=` before it makes them exact names, `^` in front
of all that leaves them out. A value of one letter is as good as none. NCCL_IB_HCA likewise, with `:port` behind.
gloo in torch (ProcessGroupGloo::createDefaultDevice): a list of exact names, each of which has to be there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

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
def gloo_socket_ifname(subject: Subject) -> Finding:
    """GLOO_SOCKET_IFNAME names interfaces that are here: gloo wants exact names, and each of them."""
    spec = subject.env.get("GLOO_SOCKET_IFNAME")
    if spec is None or len(spec) < 2:  # torch passes over a single letter, too
        return gloo_socket_ifname.skipped("it is not set; own-name tells what gloo does then")
    if not subject.interfaces:
        return gloo_socket_ifname.unknown("the kernel does not list the network interfaces")
    found, missing = gloo_interfaces(spec, subject.interfaces)
    if missing:
        problem = f"names {', '.join(missing)}, which is not here"
        problem += "; gloo knows no patterns" if any(mark in spec for mark in "^=*:") else ""
    elif subject.has_remote_peers and any(one.is_loopback for one in found):
        problem = "takes loopback, which other nodes cannot reach"
    else:
        return gloo_socket_ifname.passed(f"GLOO_SOCKET_IFNAME={spec} is here", measured=spec)
    return gloo_socket_ifname.bad(
        Fault.JOB if subject.is_torch and not subject.may_use_gpus else None,  # beside NCCL it may not be used
        f"GLOO_SOCKET_IFNAME={spec} {problem}",
        evidence=_here(subject),
        action=f"set GLOO_SOCKET_IFNAME={subject.way_out}" if subject.way_out else "unset it",
    )


@check("nccl-socket-ifname")
def nccl_socket_ifname(subject: Subject) -> Finding:
    """NCCL_SOCKET_IFNAME, or what NCCL takes without it, leaves an interface that other nodes can reach."""
    spec = subject.env.get("NCCL_SOCKET_IFNAME")
    if spec is None and subject.host.gpus.cuda == 0:
        return nccl_socket_ifname.skipped("it is not set, and no GPU is here")
    if not subject.interfaces:
        return nccl_socket_ifname.unknown("the kernel does not list the network interfaces")
    chosen = nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY"))
    names, is_certain = named(chosen), True
    if not chosen:
        problem = "leaves no interface here"
    elif subject.has_remote_peers and all(found.is_loopback for found in chosen):
        problem = f"leaves only {names}, which other nodes cannot reach"
    elif subject.has_remote_peers and any(found.is_local_only for found in chosen):
        problem, is_certain = f"takes {names}, not all of which lead to other nodes", False
    else:
        return nccl_socket_ifname.passed(f"{_set_to('NCCL_SOCKET_IFNAME', spec)}: {names}", measured=names)
    usable = subject.way_out
    return nccl_socket_ifname.bad(
        # Without GPUs NCCL is not used, unless this container only does not see them.
        Fault.JOB if is_certain and subject.host.gpus.cuda > 0 else None,
        f"{_set_to('NCCL_SOCKET_IFNAME', spec)} {problem}",
        evidence=_here(subject),
        action=f"set NCCL_SOCKET_IFNAME=={usable} (= for an exact name)" if usable else "give the pod a network",
    )


def _set_to(name: str, value: str | None) -> str:
    return f"{name} is not set" if value is None else f"{name}={value}"


def _here(subject: Subject) -> tuple[str]:
    return (f"here are {named(subject.interfaces)}",)


@check("nccl-ib-hca")
def nccl_ib_hca(subject: Subject) -> Finding:
    """NCCL_IB_HCA leaves an adapter: otherwise NCCL goes on over plain sockets and says nothing."""
    spec = subject.env.get("NCCL_IB_HCA") or None
    if not subject.has_peers:
        return nccl_ib_hca.skipped("there are no other nodes")
    if subject.env.get("NCCL_IB_DISABLE") == "1":
        return nccl_ib_hca.skipped("NCCL_IB_DISABLE=1")
    if not (subject.adapters and subject.has_rdma):
        if not spec:
            return nccl_ib_hca.skipped("this container was given no RDMA adapter")
        return nccl_ib_hca.warned(
            f"NCCL_IB_HCA={spec}, but this container was given no RDMA adapter: NCCL will use plain sockets",
            action="request the RDMA device in the pod's resources, or unset NCCL_IB_HCA",
        )
    chosen, setting = nccl_adapters(spec, subject.adapters), _set_to("NCCL_IB_HCA", spec)
    if chosen:
        names = ", ".join(f"{port.device}:{port.port}" for port in chosen)
        return nccl_ib_hca.passed(f"{setting}: {names}", measured=len(chosen), unit="ports")
    downs = ("" if port.is_active else " (down)" for port in subject.adapters)
    there = ", ".join(
        f"{port.device}:{port.port}{down}" for port, down in zip(subject.adapters, downs, strict=True)
    )
    is_down = not any(port.is_active for port in subject.adapters)
    return nccl_ib_hca.failed(
        Fault.NODE if is_down else Fault.JOB,
        f"no port of an RDMA adapter is active: {there}" if is_down else f"{setting} leaves none of {there}",
        measured=0,
        unit="ports",
        action="report this node" if is_down else f"set NCCL_IB_HCA to what is here: {there}",
    )


@check("ports")
def ports(subject: Subject) -> Finding:
    """The port that all nodes meet at is free on the node that opens it."""
    coordinator = subject.topology.coordinator
    if coordinator is None or not subject.has_peers or not subject.topology.is_coordinator:
        return ports.skipped("this node opens no port that others know")
    problem = subject.port_problem(coordinator.port)
    if problem is None:
        return ports.passed(f"port {coordinator.port} is free")
    number, holder = problem
    may_not = number in (errno.EACCES, errno.EPERM)
    ending = "end what has it, a sidecar or with hostNetwork another pod, or choose another port"
    return ports.failed(
        Fault.JOB if may_not else Fault.NODE,
        f"port {coordinator.port} of node 0 cannot be opened here: {os.strerror(number)}"
        + (f", {holder} has it" if holder else ""),
        measured=coordinator.port,
        action="choose a port above 1023" if may_not else ending,
    )
