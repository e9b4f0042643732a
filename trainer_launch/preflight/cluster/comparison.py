"""What all nodes should have alike, compared with what most have: no node is the measure of the others. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_launch.model import units
from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import counted

FACTS = "facts"
CLOCK = "clock"
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
UNSET = "(unset)"
NCCL = "nccl loaded"
_SHOWN = 8
# A node that could not find them out is not another one for that.
_WHERE_KNOWN = frozenset((NCCL, "code"))
ENV = "env "  # how a variable's fact begins

# Each node may have its own: devices, interfaces and files of one machine, and how much it says.
_MAY_DIFFER = frozenset(
    f"{ENV}{name}"
    for name in (
        "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE",
        "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "UCX_LOG_LEVEL",
        "FI_LOG_LEVEL", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH",
        "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """What it means when a fact differs, and what to do."""

    word: str
    fault: Fault | None  # None: a warning
    action: str


_IMAGE = "start all nodes from the same image, by digest"
_ALWAYS = "python"  # where this is missing, so is all that is found out with it
_VERSIONS = frozenset((_ALWAYS, "arch", "kernel", "torch", "cuda", "nccl"))
_RULES: Mapping[str, Rule] = {
    "torch": Rule("torch", Fault.JOB, _IMAGE),
    "cuda": Rule("CUDA of torch", Fault.JOB, _IMAGE),
    "nccl": Rule("NCCL", Fault.JOB, _IMAGE),
    NCCL: Rule("the NCCL that is really loaded", Fault.JOB, f"{_IMAGE}; see LD_LIBRARY_PATH and LD_PRELOAD"),
    "arch": Rule("the architecture", Fault.JOB, "put all nodes on machines of one architecture (nodeSelector)"),
    "code": Rule("the program's code", Fault.JOB, "start all nodes from the same code: image, git-sync or volume"),
    "command": Rule("the command line", None, "give all nodes the same command, unless it is meant to differ"),
    "gpus": Rule("the GPUs", Fault.NODE, "see which devices that machine has lost (nvidia-smi -L), or drain it"),
    "adapters": Rule("the RDMA ports that are up", None, "see that machine's adapters and cables (ibstat)"),
    "nproc_per_node": Rule("the number of workers", None, "give all nodes the same nproc_per_node"),
    "image": Rule("the image", None, _IMAGE),
    "python": Rule("Python", None, _IMAGE),
    "driver": Rule("the GPU driver", None, "bring the machines to one driver version"),
    "pair tests": Rule("what can test pairs", None, "start all nodes with the same GPUs and the same torch"),
    "kernel": Rule("the kernel", None, "bring the machines to one kernel"),
}
_SET_ALIKE = "give it the same value in every pod of the job"
_SET_PERHAPS = "is it meant to differ? It is set by hand or by an image"


def differences(names: Sequence[str], facts: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each fact that is not the same on all nodes; `names` say whose facts they are."""
    differing = 0
    keys = dict.fromkeys(key for one in facts for key in sorted(one))
    is_told = any(_ALWAYS in one for one in facts)
    unread = [node for node, one in enumerate(facts) if is_told and _ALWAYS not in one]
    if unread:
        yield _unread([names[node] for node in unread])
    for key in keys:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for node, one in enumerate(facts):
            if key in one or not (key in _WHERE_KNOWN or (key in _VERSIONS and node in unread)):
                groups[one.get(key, UNSET)].append(node)
        if len(groups) > 1:
            differing += 1
            yield _difference(key, groups, names)
    if not differing and not unread:
        n_known = sum(all(key in one for one in facts) for key in keys)
        text = f"{counted(n_known, 'fact')} alike on all {len(names)} nodes"
        yield Finding(check=FACTS, status=Status.PASS, scope=Scope.JOB, text=text)


def _unread(names: Sequence[str]) -> Finding:
    """A machine that is too busy to start a Python in time has no other versions for that."""
    text = f"the versions of Python and torch could not be found out in time on {listed(names)}"
    return Finding(check=FACTS, status=Status.UNKNOWN, subject=listed(names), text=text)


def _difference(key: str, groups: Mapping[str, Sequence[int]], names: Sequence[str]) -> Finding:
    rule = _rule(key)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    most = ordered[0][1]
    has_majority = 2 * len(most) > sum(map(len, groups.values()))
    if has_majority:
        odd = [node for _, nodes in ordered[1:] for node in nodes]
        told = [f"{ordered[0][0]} on {counted(len(most), 'node')}"]
        told += [f"{value} on {listed([names[node] for node in nodes])}" for value, nodes in ordered[1:_SHOWN]]
    else:
        odd = []
        told = [f"{value} on {listed([names[node] for node in nodes])}" for value, nodes in ordered[:_SHOWN]]
        told.append("no value has a majority")
    return Finding(
        check=FACTS,
        status=Status.WARN if rule.fault is None else Status.FAIL,
        fault=rule.fault,
        scope=Scope.NODE if has_majority else Scope.JOB,
        subject=", ".join(names[node] for node in sorted(odd)),
        text=f"{rule.word} differs: {', '.join(told)}",
        measured=ordered[-1][0],
        expected=ordered[0][0] if has_majority else None,
        basis=Basis.PEER,
        action=rule.action,
    )


def _rule(key: str) -> Rule:
    if key in _RULES:
        return _RULES[key]
    name = key.removeprefix(ENV)
    return Rule(name, None, _SET_PERHAPS) if key in _MAY_DIFFER else Rule(name, Fault.JOB, _SET_ALIKE)


def clocks(names: Sequence[str], offsets: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """A finding for each clock that is off; `offsets` are from one clock, with their uncertainty."""
    middle = statistics.median(offset for offset, _ in offsets)
    worst = 0.0
    troubles: list[tuple[float, Finding]] = []
    for name, (offset, error) in zip(names, offsets, strict=True):
        # What is sure to be off; node 0's clock is ahead of this one's by `offset`.
        off_s = max(0.0, abs(middle - offset) - error)
        worst = max(worst, off_s)
        if off_s > CLOCK_WARN_S:
            troubles.append((off_s, _skewed(name, off_s, is_ahead=middle > offset)))
    ordered = [finding for _, finding in sorted(troubles, key=lambda trouble: -trouble[0])]
    yield from ordered[:_SHOWN]
    for status in (Status.FAIL, Status.WARN):
        rest = [finding for finding in ordered[_SHOWN:] if finding.status is status]
        if rest:
            text = f"{rest[0].text}, and {len(rest) - 1} more off by less"
            yield replace(rest[0], subject=", ".join(one.subject for one in rest), text=text)
    if not troubles:
        text = f"all clocks agree to {max(worst, 0.001):.3f} s"
        yield Finding(
            check=CLOCK, status=Status.PASS, scope=Scope.JOB, text=text, measured=round(worst, 3), unit="s"
        )


def _skewed(name: str, off_s: float, *, is_ahead: bool) -> Finding:
    fails = off_s > CLOCK_FAIL_S
    return Finding(
        check=CLOCK,
        status=Status.FAIL if fails else Status.WARN,
        fault=Fault.NODE if fails else None,
        subject=name,
        text=f"the clock of {name} is {off_s:.1f} s {'ahead of' if is_ahead else 'behind'} the others'",
        measured=round(off_s, 3),
        expected=CLOCK_FAIL_S if fails else CLOCK_WARN_S,
        unit="s",
        basis=Basis.PEER,
        action="check the time service of that machine (chrony, ntpd): tokens and certificates will be refused",
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return units.listed(names, _SHOWN)
