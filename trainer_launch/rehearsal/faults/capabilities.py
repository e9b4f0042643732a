"""Which faults this machine can carry out: what each needs, what is there, and what to do about the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.faults.fault import Fault

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "umount", "hostname", "sh")
_PACKAGES = {"ip": "iproute2", "nft": "nftables", "hostname": "hostname"}  # Debian's; all else is of util-linux
# What has to work in a network of the pods' own, by the word that the try-out says; in the order of trying.
GROUND = {
    "lo": "a network namespace cannot be brought up",
    "name": "the host name cannot be set",
    "veth": "the kernel has no veth devices, which connect pods",
    "forward": "/proc/sys/net is read-only, so packets between pods cannot be forwarded",
    "rule": "the kernel has no routing rules, which drop the packets",
    "hosts": "/etc/hosts cannot be mounted over",
    "shm": "tmpfs cannot be mounted at /dev/shm",
}
OWN_NETWORK = ("partition", "slow link", "delay dns", "fill shm")
_PRIVILEGED = "run it as root, or in a --privileged container"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found out here by trying."""

    missing: frozenset[str] = frozenset()  # programs, of PROGRAMS and nft
    namespaces: bool = False  # whether they can be made
    as_user: bool = False  # only with a namespace of users around them
    works: frozenset[str] = frozenset()  # of GROUND, and "limit": nft takes a limit of bytes
    why: str = ""  # what was said when namespaces could not be made
    memory: bool = False  # whether memory cgroups can be made
    why_no_memory: str = ""


def wants_own_network(faults: Iterable[Fault]) -> bool:
    """Whether one of these needs pods with a network, names and /dev/shm of their own."""
    return any(fault.kind in OWN_NETWORK for fault in faults)


def wants_names(faults: Iterable[Fault]) -> bool:
    """Whether node 0 is lost for good: the survivors look for each other by their pods' names."""
    return any(
        fault.kind in ("kill pod", "term pod") and fault.back_s is None and fault.node == 0 for fault in faults
    )


def wants_memory_groups(faults: Iterable[Fault]) -> bool:
    """Whether one of these needs pods with a memory limit of their own."""
    return any(fault.kind == "oom" for fault in faults)


def cannot(faults: Iterable[Fault], machine: Machine) -> tuple[str, ...]:
    """A sentence for each fault that cannot be carried out here: why, and what to do. Of one kind once."""
    firsts = {fault.kind: fault for fault in reversed(tuple(faults))}
    found = ((fault, why) for fault in firsts.values() if (why := _why_not(fault.kind, machine)))
    return tuple(f"--fault {shown(fault.text)} is not possible on this machine: {why}" for fault, why in found)


def _why_not(kind: str, machine: Machine) -> str:
    if kind == "oom":
        return "" if machine.memory else machine.why_no_memory
    if kind not in OWN_NETWORK:
        return ""
    return why_no_network(machine) or (_why_no_limit(machine) if kind == "slow link" else "")


def why_no_network(machine: Machine) -> str:
    """Why pods cannot have a network of their own here, and what to do; "" when they can."""
    missing = [program for program in PROGRAMS if program in machine.missing]
    if missing:
        return f"{' and '.join(missing)} not found in PATH; install {_packages(missing)}"
    if not machine.namespaces:
        said = f" ({machine.why})" if machine.why else ""
        return f"network namespaces are not permitted here{said}; {_PRIVILEGED}"
    broken = next((why for word, why in GROUND.items() if word not in machine.works), None)
    return f"{broken}; {_PRIVILEGED}" if broken else ""


def _why_no_limit(machine: Machine) -> str:
    if "nft" in machine.missing:
        return f"nft not found in PATH; install {_packages(['nft'])}"
    return "" if "limit" in machine.works else "the kernel's nftables have no byte limit; use partition instead"


def _packages(programs: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(_PACKAGES.get(program, "util-linux") for program in programs))
