"""The network of a pod: names, the interfaces and adapters that gloo and NCCL take, and its ports.

In an init container names resolve only if the Service publishes addresses of pods that are not ready. Kubeflow
Trainer v2 sees to that; the older operators do not, so there an init container cannot know.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import time
from collections.abc import Mapping, Sequence

from trainer_launch.host import dns as resolver
from trainer_launch.host.dns import Addresses, Answer
from trainer_launch.host.network import AdapterPort, named
from trainer_launch.model import value_parsers
from trainer_launch.model.findings import Fault, Finding
from trainer_launch.planning import interfaces
from trainer_launch.planning.interfaces import NetworkProblem, set_to, takes
from trainer_launch.preflight.check import Check, Subject, check

SETTLED_S = 60.0  # after which a name that its Service publishes is there: caches deny for up to 30 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_POLL_S = 12.0  # glibc's own patience with two servers that do not answer is 10 s
_LAST_LOOK_S = 1.5  # after the deadline, at most

# Whose Services name only pods that are ready; their main containers have names some seconds after they start.
HIDING = frozenset(("pytorchjob-v1", "pytorchjob-v1-elastic", "tfjob-v1", "xgboostjob-v1", "paddlejob-v1"))
HIDING |= {"jaxjob-v1", "mxjob-v1", "mpijob-v1", "mpijob-v2beta1", "flyte-elastic", "flyte-kfmpi"}
HIDDEN_S = 3.0  # how long to hope there

_BOTH_ABSENT = (
    "neither name is known: does the job's headless Service exist, with the pods' subdomain and with "
    "publishNotReadyAddresses: true (without it pods in init containers have no names)?"
)
_ABSENT = "node 0's pod is not there yet: see whether it is scheduled and has started"
_NO_DNS = "DNS does not work here: check the cluster's DNS pods, and network policies for port 53"


def _limit_s(subject: Subject) -> float:
    return max(subject.deadline_s, subject.left_s(_LAST_LOOK_S, _POLL_S)) + 1.0


@check("dns", limit_s=_limit_s)
def dns(subject: Subject) -> Finding:
    """Node 0's name resolves before the deadline: all workers connect to it by that name.

    Nobody connects to this node by its own name, so the own name only explains why node 0's is absent.
    """
    coordinator = subject.topology.coordinator
    home = "localhost" if coordinator is None else coordinator.host
    if not subject.has_peers or home == "localhost" or value_parsers.is_address(home):
        return dns.skipped("there is no name of another node to look up")
    began_s = time.monotonic()
    answers = _wait(subject, home)
    answer = answers[home]
    if isinstance(answer, Answer):
        return _absent(subject, home, answers, time.monotonic() - began_s)
    addresses = ", ".join(sorted(answer))
    return _of_another_family(subject, home, answer) or dns.passed(f"{home} resolves to {addresses}")


def _wait(subject: Subject, home: str) -> Mapping[str, Addresses | Answer]:
    """Node 0's addresses when there are some, or why there are none when the time is up; so for the own name."""
    hope_s = HIDDEN_S if subject.job.contract in HIDING else subject.deadline_s
    began_s = time.monotonic()
    until_s = began_s + min(hope_s, subject.deadline_s)
    end_s = max(until_s, began_s + subject.left_s(_LAST_LOOK_S, _POLL_S))
    names = list(dict.fromkeys([home, _own(subject) or home]))
    pause_s = _FIRST_PAUSE_S
    while True:
        patience_s = min(_POLL_S, max(_LAST_LOOK_S, end_s - time.monotonic()))
        answers = resolver.lookup_all(names, patience_s, subject.lookup)
        if not isinstance(answers[home], Answer) or time.monotonic() >= until_s:
            return answers
        time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        pause_s *= 2


def _own(subject: Subject) -> str | None:
    """This node's own name among the job's."""
    rank, members = subject.topology.node_rank, subject.job.members or ()
    return members[rank].host if rank is not None and rank < len(members) else None


def _absent(subject: Subject, home: str, answers: Mapping[str, Addresses | Answer], waited_s: float) -> Finding:
    denied = [name for name, answer in answers.items() if answer in (Answer.NXDOMAIN, Answer.NO_DATA)]
    if home in denied and subject.job.contract in HIDING:
        return dns.unknown(
            f"{home}: not in DNS yet; Services of {subject.job.contract} name only pods that are "
            f"ready, which pods in init containers are not",
            action="nothing: `run` waits for the names it needs; --skip dns saves these seconds",
        )
    are_both = len(denied) == len(answers)
    is_settled = are_both and waited_s >= SETTLED_S and _own(subject) in denied
    reasons = "; ".join(f"{name}: {answer.value}" for name, answer in answers.items() if isinstance(answer, Answer))
    return dns.failed(
        Fault.JOB if is_settled else Fault.NODE,
        f"node 0's name does not resolve after {waited_s:.0f} s: {reasons}",
        action=_BOTH_ABSENT if are_both else _ABSENT if home in denied else _NO_DNS,
    )


def _of_another_family(subject: Subject, home: str, addresses: Addresses) -> Finding | None:
    up = (address for interface in subject.interfaces if interface.is_up for address in interface.addresses)
    here = {":" in address for address in up if _leads_on(address)}
    if not here or not here.isdisjoint(":" in address for address in addresses):
        return None
    theirs, ours = ("IPv6", "IPv4") if False in here else ("IPv4", "IPv6")
    return dns.failed(
        Fault.NODE,
        f"{home}: only {theirs} addresses ({', '.join(sorted(addresses))}), and this node has only {ours}",
        action="give all pods of the job the same IP family (ipFamilyPolicy of the Service, the CNI)",
    )


def _leads_on(address: str) -> bool:
    """Every interface has a link-local address of IPv6, and nobody in the cluster is reached by it."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


@check("own-name")
def own_name(subject: Subject) -> Finding:
    """This host's own name leads to an address of its own: elsewhere gloo listens on loopback or nowhere."""
    node = subject.network
    if node.addresses and not node.interfaces:
        return own_name.unknown("the kernel does not list the network interfaces")
    shown = ", ".join(node.addresses)
    passed = own_name.passed(f"{node.hostname} resolves to {shown}", measured=shown)
    return _finding(own_name, interfaces.of_own_name(node), measured=shown or "nothing") or passed


def _finding(check: Check[Subject], problem: NetworkProblem | None, **more: str) -> Finding | None:
    if problem is None:
        return None
    fault = Fault.JOB if problem.is_fatal else None  # beside NCCL, gloo may not be used
    return check.bad(fault, problem.text, evidence=problem.evidence, action=problem.action, **more)


def nccl_adapters(spec: str | None, ports: Sequence[AdapterPort]) -> tuple[AdapterPort, ...]:
    """The active ports that NCCL takes."""
    active = tuple(port for port in ports if port.is_active)
    return tuple(port for port in active if takes(spec, port.device, port.port)) if spec else active


@check("gloo-socket-ifname")
def gloo_socket_ifname(subject: Subject) -> Finding:
    """GLOO_SOCKET_IFNAME names interfaces that are here: gloo wants exact names, and each of them."""
    spec = subject.env.get(interfaces.GLOO)
    if not interfaces.chooses_for_gloo(subject.env):
        return gloo_socket_ifname.skipped("it is not set; own-name tells what gloo does then")
    if not subject.interfaces:
        return gloo_socket_ifname.unknown("the kernel does not list the network interfaces")
    passed = gloo_socket_ifname.passed(f"{interfaces.GLOO}={spec} is here", measured=spec)
    return _finding(gloo_socket_ifname, interfaces.of_gloos_variable(subject.network)) or passed


@check("nccl-socket-ifname")
def nccl_socket_ifname(subject: Subject) -> Finding:
    """NCCL_SOCKET_IFNAME, or what NCCL takes without it, leaves an interface that other nodes can reach."""
    spec = subject.env.get(interfaces.NCCL)
    if spec is None and subject.host.gpus.cuda == 0:
        return nccl_socket_ifname.skipped("it is not set, and no GPU is here")
    if not subject.interfaces:
        return nccl_socket_ifname.unknown("the kernel does not list the network interfaces")
    names = named(interfaces.nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY")))
    passed = nccl_socket_ifname.passed(f"{set_to(interfaces.NCCL, spec)}: {names}", measured=names)
    return _finding(nccl_socket_ifname, interfaces.of_nccls_interfaces(subject.network)) or passed


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
    chosen, setting = nccl_adapters(spec, subject.adapters), set_to("NCCL_IB_HCA", spec)
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
