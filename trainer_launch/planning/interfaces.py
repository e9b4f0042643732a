"""The interfaces that gloo and NCCL take on this node, and whether other nodes can reach it by them. Pure.

NCCL (src/misc/socket.cc, src/misc/utils.cc): a list of prefixes, `=` before it makes them exact names, `^` in front
of all that leaves them out. A value of one letter is as good as none. NCCL_IB_HCA likewise, with `:port` behind.
gloo in torch (ProcessGroupGloo::createDefaultDevice): a list of exact names, each of which has to be there. Without
one the first own address that the host's own name leads to, else loopback.

Preflight makes findings of these problems, `run` errors, warnings, and variables for the workers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from trainer_launch.host.network import Interface, named
from trainer_launch.model import Endpoint, Topology
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import is_address, parse_number

OWN_NAME = "own-name"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_BY_NAME = (GLOO, "TP_SOCKET_IFNAME")  # what torch reads where an own name would not do: gloo, RPC
_NCCLS_OWN_WAYS = ("NCCL_COMM_ID", "NCCL_OOB_NET_IFNAME")  # with them it looks for interfaces otherwise
_FAMILIES = {"AF_INET": ".", "AF_INET6": ":"}  # what an address of it has in it


class NodeNetwork(Struct, frozen=True, kw_only=True):
    """The network of this node, as its workers will use it."""

    hostname: str
    addresses: tuple[str, ...] = ()  # of the host name, in the resolver's order
    why_none: str = ""  # why it has no address
    interfaces: tuple[Interface, ...] = ()  # (): the kernel does not list them
    route: str = ""  # of several usable interfaces the one on the route to node 0, else on the default route
    env: Mapping[str, str]
    has_remote_peers: bool  # other nodes may be on other machines
    is_home: bool = False  # node 0 is on this machine, as all others may be
    needs_gloo: bool = False  # the job cannot do without it
    needs_nccl: bool = False

    @property
    def usable(self) -> tuple[str, ...]:
        """The interfaces that may lead to other nodes."""
        return tuple(each.name for each in self.interfaces if each.is_up and not each.is_local_only)

    @property
    def way_out(self) -> str:
        """The interface that leads to other nodes: the only one, or that on the route; "": which one is unknown."""
        return self.usable[0] if len(self.usable) == 1 else self.route


class NetworkProblem(Struct, frozen=True, kw_only=True):
    """Why workers will not reach each other."""

    check: str  # preflight's
    text: str
    action: str
    is_fatal: bool  # the job cannot work; else it may
    evidence: tuple[str, ...] = ()


def meet_on_loopback(coordinator: Endpoint | None) -> bool:
    """Whether node 0's address means this machine on each machine."""
    host = "" if coordinator is None else coordinator.host.partition("%")[0]
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def has_remote_peers(topology: Topology) -> bool:
    """Whether other nodes may be on other machines."""
    return topology.pods != 1 and not meet_on_loopback(topology.coordinator)


def chooses_for_gloo(env: Mapping[str, str]) -> bool:
    """Whether a variable names gloo's interfaces: torch passes over a single letter."""
    return len(env.get(GLOO, "")) > 1


def of_own_name(node: NodeNetwork) -> NetworkProblem | None:
    """The host's own name leads to no address of its own, or to one that other nodes cannot reach."""
    shown, text = ", ".join(node.addresses), f"this host's own name {node.hostname}"
    taken = next((each for each in node.addresses if _is_here(each, node.interfaces)), None)
    if not node.addresses:
        text += f" does not resolve ({node.why_none})"
    elif taken is None:
        others = named([each for each in node.interfaces if not each.is_loopback])
        text += f" resolves to {shown}, but this host has " + (others or "none but loopback's")
    elif node.has_remote_peers and ipaddress.ip_address(taken).is_loopback:
        text += f" resolves to {shown}" + (f", first to {taken}" if node.addresses[1:] else "")
        text += ", which other nodes cannot reach"
    else:
        return None
    way = node.way_out
    mended = f"`trainer-launch run` gives torch workers {GLOO}={way}; elsewhere, set it or fix /etc/hosts"
    return NetworkProblem(
        check=OWN_NAME,
        text=text,
        action=mended if way else f"set {GLOO} to the exact name of the interface to node 0, or fix /etc/hosts",
        is_fatal=node.has_remote_peers and node.needs_gloo and not (way or chooses_for_gloo(node.env)),
        evidence=_here(node),
    )


def of_gloos_variable(node: NodeNetwork) -> NetworkProblem | None:
    """GLOO_SOCKET_IFNAME names what is not here, or what other nodes cannot reach."""
    spec = node.env.get(GLOO, "")
    if not (chooses_for_gloo(node.env) and node.interfaces):
        return None
    taken, missing = gloo_interfaces(spec, node.interfaces)
    if missing:
        problem = f"names {', '.join(map(_quoted, missing))}, which is not here"
        problem += "; gloo knows no patterns" if any(mark in spec for mark in "^=*:") else ""
    elif node.has_remote_peers and any(each.is_loopback for each in taken):
        problem = "takes loopback, which other nodes cannot reach"
    else:
        return None
    return NetworkProblem(
        check="gloo-socket-ifname",
        text=f"{GLOO}={spec} {problem}",
        action=f"set {GLOO}={node.way_out}" if node.way_out else "unset it",
        is_fatal=node.needs_gloo and (bool(missing) or not node.is_home),
        evidence=_here(node),
    )


def of_nccls_interfaces(node: NodeNetwork) -> NetworkProblem | None:
    """NCCL_SOCKET_IFNAME, or what NCCL takes without it, leaves nothing that other nodes can reach."""
    spec = node.env.get(NCCL)
    if not node.interfaces:
        return None
    taken, is_certain = nccl_interfaces(spec, node.interfaces, node.env.get("NCCL_SOCKET_FAMILY")), True
    if not taken:
        problem = "leaves no interface here"
    elif node.has_remote_peers and all(each.is_loopback for each in taken):
        problem = f"leaves only {named(taken)}, which other nodes cannot reach"
    elif node.has_remote_peers and any(each.is_local_only for each in taken):
        problem, is_certain = f"takes {named(taken)}, not all of which lead to other nodes", False
    else:
        return None
    way = node.way_out
    return NetworkProblem(
        check="nccl-socket-ifname",
        text=f"{set_to(NCCL, spec)} {problem}",
        action=f"set {NCCL}=={way} (= for an exact name)" if way else "give the pod a network",
        is_fatal=is_certain and node.needs_nccl and not any(name in node.env for name in _NCCLS_OWN_WAYS),
        evidence=_here(node),
    )


def settled(node: NodeNetwork) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The variables that torch workers need in this network, and what to tell the user.

    Raises:
        ContractError: they cannot reach each other, and nothing that is certain would mend it.
    """
    chosen: dict[str, str] = {}
    warnings = []
    for problem in problems(node):
        text = "; ".join((problem.text, *problem.evidence, problem.action))
        if problem.is_fatal:
            raise ContractError(text)
        if problem.check == OWN_NAME and node.way_out:
            chosen = {name: node.way_out for name in _BY_NAME if name == GLOO or name not in node.env}
            text = f"{problem.text}, so workers get {GLOO}={node.way_out}; to choose another one, set it in the pod"
        warnings.append(text)
    return chosen, tuple(warnings)


def problems(node: NodeNetwork) -> Iterator[NetworkProblem]:
    """The problems by which torch workers of this node would fail, with the variables that are set."""
    candidates = [of_gloos_variable(node)]
    if NCCL in node.env:
        candidates.append(of_nccls_interfaces(node))
    if node.has_remote_peers and node.interfaces and not chooses_for_gloo(node.env):
        candidates.append(of_own_name(node))
    yield from filter(None, candidates)


def _is_here(address: str, interfaces: Sequence[Interface]) -> bool:
    is_own = any(address in interface.addresses for interface in interfaces)
    return is_own or ipaddress.ip_address(address).is_loopback


def _here(node: NodeNetwork) -> tuple[str, ...]:
    return (f"here are {named(node.interfaces)}",) if node.interfaces else ()


def _quoted(word: str) -> str:
    return word if word == word.strip() and word.isprintable() else repr(word)


def set_to(name: str, value: str | None) -> str:
    """A variable as messages have it."""
    return f"{name} is not set" if value is None else f"{name}={value}"


def nccl_interfaces(
    spec: str | None, interfaces: Sequence[Interface], family: str | None = None
) -> tuple[Interface, ...]:
    """The interfaces that NCCL uses; without a spec, first ib*, else all but docker* and lo."""
    mark = _FAMILIES.get(family or "", "")
    able = [each for each in interfaces if each.is_up and any(mark in address for address in each.addresses)]
    if spec is not None and len(spec) > 1:
        return _chosen(spec, able)
    for tried in ("ib", "^docker,lo,virbr", "docker", "lo"):
        chosen = _chosen(tried, able)
        if chosen:
            return chosen
    return ()


def gloo_interfaces(spec: str, interfaces: Sequence[Interface]) -> tuple[tuple[Interface, ...], tuple[str, ...]]:
    """The interfaces that gloo takes, and the names that are not there."""
    by_name = {each.name: each for each in interfaces}
    words = [word for word in spec.split(",") if word]
    return tuple(by_name[word] for word in words if word in by_name), tuple(w for w in words if w not in by_name)


def _chosen(spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    return tuple(each for each in interfaces if takes(spec, each.name, None))


def takes(spec: str, name: str, port: int | None) -> bool:
    """Whether NCCL's list means this interface or adapter, or `^`, does not leave it out."""
    inverted = spec.startswith("^")
    rest = spec[inverted:]
    exact = rest.startswith("=")
    words = [word for word in rest[exact:].split(",") if word]
    return inverted != (not words or any(_fits(name, port, word, exact=exact) for word in words))


def _fits(name: str, port: int | None, word: str, *, exact: bool) -> bool:
    wanted, _, number = word.partition(":")
    fits = name == wanted if exact else name.startswith(wanted)
    wanted_port = parse_number(number, 0, 65535)
    return fits and (port is None or wanted_port is None or wanted_port == port)
