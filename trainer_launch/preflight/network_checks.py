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

from trainer_launch.host import network as resolver
from trainer_launch.host.network import AdapterPort, Addresses, Answer, named
from trainer_launch.model import value_parsers
from trainer_launch.model.units import counted
from trainer_launch.planning import interfaces
from trainer_launch.planning.interfaces import NetworkProblem, set_to, takes
from trainer_launch.preflight.check import Subject, check
from trainer_launch.preflight.rules import Observed

SETTLED_S = 60.0  # after which a name that its Service publishes is there: caches deny for up to 30 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_POLL_S = 12.0  # glibc's own patience with two servers that do not answer is 10 s
_LAST_LOOK_S = 1.5  # after the deadline, at most
_SLOW_S = 2.0  # of a look-up that is answered; a lost packet costs glibc 5 s

# Whose Services name only pods that are ready; their main containers have names some seconds after they start.
HIDING = frozenset(("pytorchjob-v1", "pytorchjob-v1-elastic", "tfjob-v1", "xgboostjob-v1", "paddlejob-v1"))
HIDING |= {"jaxjob-v1", "mpijob-v1", "mpijob-v2beta1", "flyte-elastic", "flyte-kfmpi"}
HIDDEN_S = 3.0  # how long to hope there

_BOTH_ABSENT = (
    "neither name is known: does the job's headless Service exist, with the pods' subdomain and with "
    "publishNotReadyAddresses: true (without it pods in init containers have no names)?"
)
_ABSENT = "node 0's pod is not there yet: check whether it is scheduled and has started"
_NO_DNS = "DNS does not work here: check the cluster's DNS pods, and network policies for port 53"
_SLOW = (
    "check the cluster's DNS pods and their CPU limits; ndots and search domains multiply each look-up (dnsConfig)"
)


def _limit_s(subject: Subject) -> float:
    return max(subject.deadline_s, subject.left_s(_LAST_LOOK_S, _POLL_S)) + 1.0


@check("dns", limit_s=_limit_s, is_late=True)
def dns(subject: Subject) -> Observed:
    """Node 0's name resolves before the deadline: all workers connect to it by that name.

    Nobody connects to this node by its own name, so the own name only explains why node 0's is absent.
    """
    coordinator = subject.topology.coordinator
    home = "localhost" if coordinator is None else coordinator.host
    if not subject.has_peers or home == "localhost" or value_parsers.is_address(home):
        return Observed(skipped="there is no name of another node to look up")
    began_s = time.monotonic()
    answers, look_s = _wait(subject, home)
    answer = answers[home]
    if isinstance(answer, Answer):
        return _absent(subject, home, answers, time.monotonic() - began_s)
    good = f"{home} resolves to {', '.join(sorted(answer))}"
    slow = f"{good}, but a look-up takes {look_s:.1f} s" if look_s > _SLOW_S else ""
    facts = {"other family": _of_another_family(subject, home, answer), "slow": slow, "action": _SLOW}
    return Observed(facts=facts, good=good)


def _wait(subject: Subject, home: str) -> tuple[Mapping[str, Addresses | Answer], float]:
    """Node 0's addresses when there are some, or why there are none when the time is up; so for the own name.

    Behind them are the seconds that the last look-up took.
    """
    hope_s = HIDDEN_S if subject.job.contract in HIDING else subject.deadline_s
    began_s = time.monotonic()
    until_s = began_s + min(hope_s, subject.deadline_s)
    end_s = max(until_s, began_s + subject.left_s(_LAST_LOOK_S, _POLL_S))
    names = list(dict.fromkeys([home, _own(subject) or home]))
    pause_s = _FIRST_PAUSE_S
    while True:
        patience_s = min(_POLL_S, max(_LAST_LOOK_S, end_s - time.monotonic()))
        asked_s = time.monotonic()
        answers = resolver.lookup_all(names, patience_s, subject.lookup)
        if not isinstance(answers[home], Answer) or time.monotonic() >= until_s:
            return answers, round(time.monotonic() - asked_s, 1)
        time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        pause_s *= 2


def _own(subject: Subject) -> str | None:
    """The name of this node among the job's."""
    rank, members = subject.topology.node_rank, subject.job.members or ()
    return members[rank].host if rank is not None and rank < len(members) else None


def _absent(subject: Subject, home: str, answers: Mapping[str, Addresses | Answer], waited_s: float) -> Observed:
    denied = [name for name, answer in answers.items() if answer in (Answer.NXDOMAIN, Answer.NO_DATA)]
    if home in denied and subject.job.contract in HIDING:
        text = f"{home}: not in DNS yet; Services of {subject.job.contract} name only pods that are ready, which "
        action = "nothing: `run` waits for the names it needs; --policy dns=off saves these seconds"
        return Observed(unknown=f"{text}pods in init containers are not", more={"action": action})
    are_both = len(denied) == len(answers)
    is_settled = are_both and waited_s >= SETTLED_S and _own(subject) in denied
    reasons = "; ".join(f"{name}: {answer.value}" for name, answer in answers.items() if isinstance(answer, Answer))
    text = f"node 0's name does not resolve after {waited_s:.0f} s: {reasons}"
    action = _BOTH_ABSENT if are_both else _ABSENT if home in denied else _NO_DNS
    return Observed(facts={"never there" if is_settled else "absent": text, "action": action})


def _of_another_family(subject: Subject, home: str, addresses: Addresses) -> str:
    """Why this node cannot connect to these addresses; empty: it can."""
    up = (address for interface in subject.interfaces if interface.is_up for address in interface.addresses)
    here = {":" in address for address in up if _leads_on(address)}
    if not here or not here.isdisjoint(":" in address for address in addresses):
        return ""
    theirs, ours = ("IPv6", "IPv4") if False in here else ("IPv4", "IPv6")
    return f"{home}: only {theirs} addresses ({', '.join(sorted(addresses))}), and this node has only {ours}"


def _leads_on(address: str) -> bool:
    """Every interface has a link-local address of IPv6, and nobody in the cluster is reached by it."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


@check("own-name")
def own_name(subject: Subject) -> Observed:
    """The host name resolves to an address of this host other than loopback: gloo listens there."""
    node = subject.network
    if node.addresses and not node.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    shown = ", ".join(node.addresses)
    return _observed(interfaces.of_own_name(node), f"{node.hostname} resolves to {shown}", shown or "nothing")


def _observed(problem: NetworkProblem | None, good: str, measured: str) -> Observed:
    if problem is None:
        return Observed(good=good, more={"measured": measured})
    facts = {"wrong" if problem.is_fatal else "doubtful": problem.text, "action": problem.action}
    return Observed(facts=facts, more={"measured": measured, "evidence": problem.evidence})


def nccl_adapters(spec: str | None, ports: Sequence[AdapterPort]) -> tuple[AdapterPort, ...]:
    """The active ports that NCCL takes."""
    active = tuple(port for port in ports if port.is_active)
    return tuple(port for port in active if takes(spec, port.device, port.port)) if spec else active


@check("gloo-socket-ifname")
def gloo_socket_ifname(subject: Subject) -> Observed:
    """All interfaces that GLOO_SOCKET_IFNAME names exist: gloo needs exact names."""
    spec = subject.env.get(interfaces.GLOO)
    if spec is None or not interfaces.chooses_for_gloo(subject.env):
        return Observed(skipped="it is not set; own-name checks what gloo uses then")
    if not subject.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    return _observed(interfaces.of_gloos_variable(subject.network), f"{interfaces.GLOO}={spec} is here", spec)


@check("nccl-socket-ifname")
def nccl_socket_ifname(subject: Subject) -> Observed:
    """NCCL_SOCKET_IFNAME, or NCCL's default, leaves an interface that other nodes can reach."""
    spec = subject.env.get(interfaces.NCCL)
    if spec is None and subject.host.gpus.cuda == 0:
        return Observed(skipped="it is not set, and no GPU is here")
    if not subject.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    names = named(interfaces.nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY")))
    good = f"{set_to(interfaces.NCCL, spec)}: {names}"
    return _observed(interfaces.of_nccls_interfaces(subject.network), good, names)


def used_adapters(subject: Subject) -> tuple[AdapterPort, ...]:
    """The ports that NCCL would take if all were active; none where this job does without RDMA."""
    without = subject.env.get("NCCL_IB_DISABLE") == "1" or subject.env.get("NCCL_NET") == "Socket"
    if without or not subject.has_rdma or not subject.may_use_gpus:
        return ()
    spec = subject.env.get("NCCL_IB_HCA", "")
    return tuple(port for port in subject.adapters if takes(spec, port.device, port.port))


@check("nccl-ib-hca")
def nccl_ib_hca(subject: Subject) -> Observed:
    """NCCL_IB_HCA leaves an adapter for each GPU: with fewer, NCCL is slower, without a warning."""
    spec = subject.env.get("NCCL_IB_HCA") or None
    if not subject.has_peers:
        return Observed(skipped="there are no other nodes")
    if subject.env.get("NCCL_IB_DISABLE") == "1":
        return Observed(skipped="NCCL_IB_DISABLE=1")
    if not (subject.adapters and subject.has_rdma):
        if not spec:
            return Observed(skipped="this container was given no RDMA adapter")
        text = f"NCCL_IB_HCA={spec}, but this container was given no RDMA adapter: NCCL will use plain sockets"
        return Observed(facts={"not given": text})
    chosen, setting, there = (
        nccl_adapters(spec, subject.adapters),
        set_to("NCCL_IB_HCA", spec),
        _shown(subject.adapters),
    )
    if not chosen:
        if not any(port.is_active for port in subject.adapters):
            return Observed(facts={"all down": there})
        return Observed(facts={"left out": f"{setting} leaves none of {there}", "there": there})
    taken, n_gpus = used_adapters(subject), subject.host.gpus.cuda
    down = [port for port in taken if not port.is_active]
    # A port without a cable is no fault where each GPU has another one, and where a machine has few of them.
    is_short = len(chosen) < n_gpus <= len(taken)
    text = f"{len(chosen)} of {len(taken)} RDMA ports are up for {n_gpus} GPUs; {_shown(down)}" if is_short else ""
    return Observed(
        facts={"some down": text},
        good=f"{setting}: {_shown(chosen)}",
        more={"measured": len(chosen), "unit": "ports"},
    )


def _shown(ports: Sequence[AdapterPort]) -> str:
    return ", ".join(f"{port.device}:{port.port}{'' if port.is_active else ' (down)'}" for port in ports)


@check("rdma-errors", is_late=True)
def rdma_errors(subject: Subject) -> Observed:
    """No RDMA port counted errors while pairs of nodes were tested."""
    before, taken = subject.port_errors, {(port.device, port.port) for port in used_adapters(subject)}
    if before is None or not taken:
        return Observed(skipped="no pairs were tested over RDMA adapters here")
    now = subject.count_errors()
    grown = [(at, now[at] - before.get(at, 0)) for at in sorted(now) if at[:2] in taken]
    text = ", ".join(f"{device}:{port} {name} +{more}" for (device, port, name), more in grown if more > 0)
    return Observed(facts={"errors": text}, good=f"no new errors on {counted(len(taken), 'port')}")


@check("ports")
def ports(subject: Subject) -> Observed:
    """The port where the nodes meet is free on the node that opens it."""
    coordinator = subject.topology.coordinator
    if coordinator is None or not subject.has_peers or not subject.topology.is_coordinator:
        return Observed(skipped="this node opens no port that others know")
    problem = subject.port_problem(coordinator.port)
    if problem is None:
        return Observed(good=f"port {coordinator.port} is free")
    number, holder = problem
    text = f"port {coordinator.port} of node 0 cannot be opened here: {os.strerror(number)}"
    text += f", {holder} has it" if holder else ""
    fact = "may not" if number in (errno.EACCES, errno.EPERM) else "taken"
    return Observed(facts={fact: text}, more={"measured": coordinator.port})
