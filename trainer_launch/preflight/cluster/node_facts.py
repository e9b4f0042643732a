"""Which nodes differ from most in what they are: a table of rules over facts, and clocks. Pure.

No node is the measure of the others. What a node does not tell of itself is unknown: it does not differ for that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.findings import Basis, Fault, Finding, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight.check import Where, check
from trainer_launch.preflight.cluster.nodes import TOLD, Cluster, listed

FACTS, CLOCK = "facts", "clock"
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
UNSET = "(unset)"
NCCL = "nccl loaded"
ENV = "env "  # how a variable's fact begins
_SHOWN = 8
_VERSIONS = "python"  # where this is missing, so is all that is found out with it
_ALWAYS_TOLD = ("image", "nproc_per_node", "command", "adapters", "pair tests")  # or there is none
# Of the variables, these change what nodes send each other: where they differ, a collective hangs or fails.
_MUST_AGREE = frozenset(
    (
        "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE",
        "NCCL_NVLS_ENABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
        "GLOO_DEVICE_TRANSPORT", "UCX_TLS", "FI_PROVIDER",
    )
)  # fmt: skip


class PeerRule(Struct, frozen=True):
    """What it means when a fact is not the same on all nodes, and what to do."""

    text: str  # what differs
    fault: Fault | None  # None: a warning
    action: str


_LOST = "see which devices that machine has lost (nvidia-smi -L), or drain it"
_IMAGE = "start all nodes from the same image, by digest"
RULES: Mapping[str, PeerRule] = {
    "torch": PeerRule("torch", Fault.JOB, _IMAGE),
    "cuda": PeerRule("CUDA of torch", Fault.JOB, _IMAGE),
    "nccl": PeerRule("NCCL", Fault.JOB, _IMAGE),
    NCCL: PeerRule("the NCCL that is really loaded", Fault.JOB, f"{_IMAGE}; see LD_LIBRARY_PATH and LD_PRELOAD"),
    "arch": PeerRule("the architecture", Fault.JOB, "put all nodes on machines of one architecture (nodeSelector)"),
    "code": PeerRule("the program's code", None, "start all nodes from the same code: image, git-sync or volume"),
    "command": PeerRule("the command line", None, "give all nodes the same command, unless it is meant to differ"),
    "gpus": PeerRule("the GPUs", Fault.NODE, _LOST),
    "adapters": PeerRule("the RDMA ports that are up", None, "see that machine's adapters and cables (ibstat)"),
    "nproc_per_node": PeerRule("the number of workers", None, "give all nodes the same nproc_per_node"),
    "image": PeerRule("the image", None, _IMAGE),
    "python": PeerRule("Python", None, _IMAGE),
    "driver": PeerRule("the GPU driver", None, "bring the machines to one driver version"),
    "pair tests": PeerRule("what can test pairs", None, "start all nodes with the same GPUs and the same torch"),
    "kernel": PeerRule("the kernel", None, "bring the machines to one kernel"),
    **{
        f"{ENV}{name}": PeerRule(name, Fault.JOB, "give it the same value in every pod of the job")
        for name in _MUST_AGREE
    },
}


@check(FACTS, Where.CLUSTER)
def facts(cluster: Cluster) -> Iterator[Finding]:
    """All nodes have alike what should be: versions, GPUs, adapters, variables, command and code."""
    if cluster.nodes:
        yield from differences(cluster.names, [node.report.facts for node in cluster.nodes])


@check(CLOCK, Where.CLUSTER)
def clock(cluster: Cluster) -> Iterator[Finding]:
    """All clocks agree."""
    if cluster.nodes:
        yield from clocks(cluster.names, [(node.report.offset_s, node.report.error_s) for node in cluster.nodes])


def differences(names: Sequence[str], reports: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each fact that is not the same on all nodes; `names` say whose facts they are."""
    keys = dict.fromkeys(key for report in reports for key in sorted(report) if not key.startswith(TOLD))
    told = {key: dict(_told(key, names, reports)) for key in keys}
    differing = {key: values for key, values in told.items() if len(set(values.values())) > 1}
    unread = [name for name in names if _VERSIONS in told and name not in told[_VERSIONS]]
    if unread:  # a machine that is too busy to start a Python in time has no other versions for that
        text = f"the versions of Python and torch could not be found out in time on {listed(unread)}"
        yield facts.unknown(text, subject=listed(unread))
    for key, values in differing.items():
        yield _difference(key, grouped((value, name) for name, value in values.items()))
    if not differing and not unread:
        n_known = sum(all(key in report for report in reports) for key in keys)
        yield facts.passed(f"{counted(n_known, 'fact')} alike on all {len(names)} nodes", scope=Scope.JOB)


def _told(key: str, names: Sequence[str], reports: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """A fact by node; a node of which it is unknown is left out."""
    for name, report in zip(names, reports, strict=True):
        if key in report or key.startswith(ENV) or key in _ALWAYS_TOLD:
            yield name, report.get(key, UNSET)


def _difference(key: str, groups: Mapping[str, Sequence[str]]) -> Finding:
    name = key.removeprefix(ENV)
    rule = RULES.get(key, PeerRule(name, None, "is it meant to differ? It is set by hand or by an image"))
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    most, others = ordered[0], ordered[1:]
    has_majority = 2 * len(most[1]) > sum(map(len, groups.values()))
    values = [f"{value} on {listed(nodes)}" for value, nodes in ordered[:_SHOWN]]
    if has_majority:
        values[0] = f"{most[0]} on {counted(len(most[1]), 'node')}"
    else:
        values.append("no value has a majority")
    return facts.bad(
        rule.fault,
        f"{rule.text} differs: {', '.join(values)}",
        scope=Scope.NODE if has_majority else Scope.JOB,
        subject=", ".join(node for _, nodes in others for node in nodes) if has_majority else "",
        measured=ordered[-1][0],
        expected=most[0] if has_majority else None,
        basis=Basis.PEER,
        action=rule.action,
    )


def clocks(names: Sequence[str], offsets: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """A finding for each clock that is off; `offsets` are from one clock, with their uncertainty."""
    middle = statistics.median(offset for offset, _ in offsets)
    # By how much each is sure to be off; node 0's clock is ahead of this one's by `offset`.
    off = [
        (max(0.0, abs(middle - offset) - error), name, middle > offset)
        for name, (offset, error) in zip(names, offsets, strict=True)
    ]
    off.sort(key=lambda clock: -clock[0])
    skewed = [_skewed(name, off_s, is_ahead=is_ahead) for off_s, name, is_ahead in off if off_s > CLOCK_WARN_S]
    yield from skewed[:_SHOWN]
    for rest in grouped((finding.status, finding) for finding in skewed[_SHOWN:]).values():
        text = f"{rest[0].text}, and {len(rest) - 1} more off by less"
        yield replace(rest[0], subject=", ".join(finding.subject for finding in rest), text=text)
    if not skewed:
        text = f"all clocks agree to {max(off[0][0], 0.001):.3f} s"
        yield clock.passed(text, scope=Scope.JOB, measured=round(off[0][0], 3), unit="s")


def _skewed(name: str, off_s: float, *, is_ahead: bool) -> Finding:
    fails = off_s > CLOCK_FAIL_S
    return clock.bad(
        Fault.NODE if fails else None,
        f"the clock of {name} is {off_s:.1f} s {'ahead of' if is_ahead else 'behind'} the others'",
        subject=name,
        measured=round(off_s, 3),
        expected=CLOCK_FAIL_S if fails else CLOCK_WARN_S,
        unit="s",
        basis=Basis.PEER,
        action="check the time service of that machine (chrony, ntpd): tokens and certificates will be refused",
    )
