"""Which network interfaces and adapters NCCL and gloo take, by their own grammars. Pure.

NCCL (src/misc/socket.cc, src/misc/utils.cc): a list of prefixes, `=` before it makes them exact names, `^` in front
of all that leaves them out. A value of one letter is as good as none. NCCL_IB_HCA likewise, with `:port` behind.
gloo in torch (ProcessGroupGloo::createDefaultDevice): a list of exact names, each of which has to be there.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model.value_parsers import parse_number

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
    active = [port for port in ports if port.is_active]
    inverted, exact, words = _parts(spec or "")
    if spec is None or not spec:
        return tuple(active)
    return tuple(
        port
        for port in active
        if inverted != (not words or any(_fits(port.device, port.port, word, exact=exact) for word in words))
    )


def _chosen(spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    inverted, exact, words = _parts(spec)
    return tuple(
        found
        for found in interfaces
        if inverted != (not words or any(_fits(found.name, None, word, exact=exact) for word in words))
    )


def _parts(spec: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Whether the list leaves out, whether its words are exact, and the words."""
    inverted = spec.startswith("^")
    rest = spec[inverted:]
    exact = rest.startswith("=")
    return inverted, exact, tuple(word for word in rest[exact:].split(",") if word)


def _fits(name: str, port: int | None, word: str, *, exact: bool) -> bool:
    wanted, _, number = word.partition(":")
    fits = name == wanted if exact else name.startswith(wanted)
    told = parse_number(number, 0, 65535)
    return fits and (port is None or told is None or told == port)
