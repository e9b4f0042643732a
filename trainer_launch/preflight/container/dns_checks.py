"""The DNS checks: all nodes' names resolve, and where not, what DNS says; this pod's own name.

In an init container names resolve only if the Service publishes addresses of pods that are not ready. Kubeflow
Trainer v2 sees to that; the older operators do not, so there an init container cannot know.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainer_launch.host import dns as resolver
from trainer_launch.host.dns import Addresses, Answer
from trainer_launch.host.network import named
from trainer_launch.model import value_parsers
from trainer_launch.model.findings import Fault, Finding
from trainer_launch.model.units import grouped, listed
from trainer_launch.preflight.check import Needs, Subject, check

SETTLED_S = 60.0  # after which a name that its Service publishes is there: caches deny for up to 30 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_POLL_S = 12.0  # glibc's own patience with two servers that do not answer is 10 s
_LAST_LOOK_S = 1.5  # after the deadline, at most
_SHOWN = 5
# In a larger job each node looks up only some of the names, and the others the rest: thousands of pods that each
# ask for thousands of names at once would be the end of the cluster's DNS.
ALL_UP_TO, SOME = 64, 16

# Whose Services name only pods that are ready; their main containers have names some seconds after they start.
HIDING = frozenset(("pytorchjob-v1", "pytorchjob-v1-elastic", "tfjob-v1", "xgboostjob-v1", "paddlejob-v1"))
HIDING |= {"jaxjob-v1", "mxjob-v1", "mpijob-v1", "mpijob-v2beta1", "flyte-elastic", "flyte-kfmpi"}
HIDDEN_S = 3.0  # how long to hope there

_ALL_ABSENT = (
    "none of the job's names is known: does its headless Service exist, with the pods' subdomain and with "
    "publishNotReadyAddresses: true (without it pods in init containers have no names)?"
)
_SOME_ABSENT = "their pods are not there yet: see whether they are scheduled and have started"
_NO_DNS = "DNS does not work here: check the cluster's DNS pods, and network policies for port 53"


def _limit_s(subject: Subject) -> float:
    return max(subject.deadline_s, subject.left_s(_LAST_LOOK_S, _POLL_S)) + 1.0


@check("dns", needs=Needs.NAMES, limit_s=_limit_s)
def dns(subject: Subject) -> Finding:
    """All nodes' names resolve before the deadline."""
    peers = _peers(subject)
    if not peers:
        return dns.skipped("there are no names of other nodes to look up")
    began_s = time.monotonic()
    addresses, absent = _wait(subject, peers)
    if absent and not _is_enough(subject, peers, addresses):
        return _absent(subject, peers, absent, time.monotonic() - began_s)
    return _of_another_family(subject, addresses) or _resolved(peers, addresses)


def _peers(subject: Subject) -> list[str]:
    """Names of all nodes, this one's too; addresses need no DNS."""
    job, coordinator = subject.job, subject.topology.coordinator
    told = [member.host for member in job.members or ()]
    told += [coordinator.host] if coordinator is not None and not told else []
    if len(told) > ALL_UP_TO:
        rank = subject.topology.node_rank or 0
        told = [told[0], *(told[(rank + ahead) % len(told)] for ahead in range(SOME - 1))]
    names = (name for name in told if name != "localhost" and not value_parsers.is_address(name))
    return list(dict.fromkeys(names)) if subject.has_peers else []


def _is_enough(subject: Subject, peers: Sequence[str], found: Collection[str]) -> bool:
    """Whether the job may start with the names that there are: an elastic one may, if node 0 is among them."""
    nodes, coordinator = subject.topology.nodes, subject.topology.coordinator
    lead = coordinator.host if coordinator is not None and coordinator.host in peers else peers[0]
    if nodes is None or (nodes.fixed is not None and not subject.topology.spares):
        return len(found) == len(peers)
    least = nodes.min if len(peers) == subject.topology.pods else 1  # of some of the names, nobody can say how many
    return lead in found and len(found) >= least


def _wait(subject: Subject, peers: Sequence[str]) -> tuple[Mapping[str, Addresses], Mapping[str, Answer]]:
    """The addresses of each name, in order, when there are enough or the time is up; why others have none."""
    hope_s = HIDDEN_S if subject.job.contract in HIDING else subject.deadline_s
    began_s = time.monotonic()
    until_s = began_s + min(hope_s, subject.deadline_s)
    end_s = max(until_s, began_s + subject.left_s(_LAST_LOOK_S, _POLL_S))
    pause_s = _FIRST_PAUSE_S
    addresses: dict[str, Addresses] = {}
    while True:
        pending = [name for name in peers if name not in addresses]
        patience_s = min(_POLL_S, max(_LAST_LOOK_S, end_s - time.monotonic()))
        answers = resolver.lookup_all(pending, patience_s, subject.lookup)
        absent = {name: answer for name, answer in answers.items() if isinstance(answer, Answer)}
        addresses |= {name: answer for name, answer in answers.items() if not isinstance(answer, Answer)}
        if _is_enough(subject, peers, addresses) or time.monotonic() >= until_s:
            return {name: addresses[name] for name in peers if name in addresses}, absent
        time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        pause_s *= 2


def _leads_on(address: str) -> bool:
    """Every interface has a link-local address of IPv6, and nobody in the cluster is reached by it."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def _of_another_family(subject: Subject, by_name: Mapping[str, Addresses]) -> Finding | None:
    up = (address for one in subject.interfaces if one.is_up for address in one.addresses)
    here = {":" in address for address in up if _leads_on(address)}
    apart = [
        name for name, addresses in by_name.items() if here.isdisjoint(":" in address for address in addresses)
    ]
    if not here or not apart:
        return None
    theirs, ours = ("IPv6", "IPv4") if False in here else ("IPv4", "IPv6")
    return dns.failed(
        Fault.NODE,
        f"{listed(apart)}: only {theirs} addresses, and this node has only {ours}",
        evidence=_evidence(apart, by_name),
        action="give all pods of the job the same IP family (ipFamilyPolicy of the Service, the CNI)",
    )


def _resolved(peers: Sequence[str], by_name: Mapping[str, Addresses]) -> Finding:
    count = str(len(by_name)) if len(by_name) == len(peers) else f"{len(by_name)} of {len(peers)}, enough to start"
    more = {"measured": len(by_name), "expected": len(peers), "unit": "names"}
    return dns.passed(f"names that resolve: {count}", evidence=_evidence([*by_name], by_name), **more)


def _absent(subject: Subject, peers: Sequence[str], absent: Mapping[str, Answer], waited_s: float) -> Finding:
    by_answer = grouped((absent[name], name) for name in _telling(subject, absent))
    is_denied = by_answer.keys() <= {Answer.NXDOMAIN, Answer.NO_DATA}
    if is_denied and subject.job.contract in HIDING:
        return dns.unknown(
            f"{listed([*absent])}: not in DNS yet; Services of {subject.job.contract} name only pods that are "
            f"ready, which pods in init containers are not",
            action="nothing: `run` waits for the names it needs; --skip dns saves these seconds",
        )
    is_all = len(absent) == len(peers) and is_denied
    fault = Fault.JOB if is_all and waited_s >= SETTLED_S and _own(subject) in absent else Fault.NODE
    more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    said = "; ".join(f"{', '.join(names)}: {answer.value}" for answer, names in by_answer.items())
    return dns.failed(
        fault,
        f"{len(absent)} of {len(peers)} names do not resolve after {waited_s:.0f} s: {said}{more}",
        measured=len(peers) - len(absent),
        expected=len(peers),
        unit="names",
        action=_ALL_ABSENT if is_all else _SOME_ABSENT if is_denied else _NO_DNS,
    )


def _telling(subject: Subject, absent: Iterable[str]) -> list[str]:
    """The names that are shown: this node's own says most, the first few stand for the others."""
    own = [name for name in absent if name == _own(subject)]
    return list(dict.fromkeys([*own, *absent]))[:_SHOWN]


def _own(subject: Subject) -> str | None:
    """This node's own name among the job's."""
    rank, members = subject.topology.node_rank, subject.job.members or ()
    return members[rank].host if rank is not None and rank < len(members) else None


def _evidence(names: Sequence[str], by_name: Mapping[str, Addresses]) -> tuple[str, ...]:
    return tuple(f"{name}: {', '.join(sorted(by_name[name]))}" for name in names[:_SHOWN])


@check("own-name")
def own_name(subject: Subject) -> Finding:
    """This host's own name leads to an address of its own: elsewhere gloo listens on loopback or nowhere."""
    name = subject.host.hostname
    try:
        addresses = subject.lookup(name)
    except OSError as problem:
        why = problem.strerror or problem
        return _bad_name(subject, f"this host's own name {name} does not resolve ({why})", "nothing")
    if not subject.interfaces:
        return own_name.unknown("the kernel does not list the network interfaces")
    shown = ", ".join(sorted(addresses))
    text = f"this host's own name {name} resolves to {shown}"
    if subject.has_remote_peers and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return _bad_name(subject, f"{text}, which other nodes cannot reach", shown)
    if addresses.isdisjoint(address for interface in subject.interfaces for address in interface.addresses):
        has = (
            named([interface for interface in subject.interfaces if not interface.is_loopback])
            or "none but loopback's"
        )
        return _bad_name(subject, f"{text}, but this host has {has}", shown)
    return own_name.passed(f"{name} resolves to {shown}", measured=shown)


def _bad_name(subject: Subject, text: str, measured: str) -> Finding:
    """A failure where gloo will be used and was not told better."""
    told = bool(subject.env.get("GLOO_SOCKET_IFNAME"))
    certain = subject.has_remote_peers and subject.is_torch and not told and not subject.may_use_gpus
    return own_name.bad(
        Fault.JOB if certain else None,
        text,
        measured=measured,
        expected="an address of an interface here, not loopback",
        action=f"set GLOO_SOCKET_IFNAME={subject.way_out or 'INTERFACE'} (an exact name), or fix /etc/hosts",
    )
