"""What a collective of all nodes at once came to: some faults show at that scale only. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight.cluster.comparison import listed
from trainer_launch.preflight.cluster.protocol import Seen

NAME = "full-job"
_SHOWN = 6
_GBYTE = 1e9


def finding(names: Sequence[str], way: str | None, rails: int, seen: Sequence[Seen] | None) -> Finding:
    """One sentence; without a result, why there is none."""
    if seen is None:
        why = "pairs of nodes fail already" if way is not None else "not all nodes have torch with gloo or NCCL"
        text = f"all nodes were not tested together, since {why}"
        return Finding(check=NAME, status=Status.SKIPPED, scope=Scope.JOB, text=text)
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for name, one in zip(names, seen, strict=True):
        if one.why:
            failed[one.why].append(name)
    together = f"{len(names)} nodes together ({way}{f', {rails} GPUs each' if rails > 1 else ''})"
    if not failed:
        rate = statistics.median(one.rate for one in seen) / _GBYTE
        text = f"all {together} reduce correctly, at {rate:.3g} GB/s"
        return Finding(
            check=NAME, status=Status.PASS, scope=Scope.JOB, text=text, measured=round(rate, 3), unit="GB/s"
        )
    n_failed = sum(map(len, failed.values()))
    ordered = sorted(failed.items(), key=lambda group: (len(group[1]), group[0]))  # who differs tells most
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        scope=Scope.JOB,
        text=f"all pairs pass, yet all {together} fail, as {n_failed} of them say: this shows at full scale only",
        measured=n_failed,
        expected=0,
        unit="nodes",
        evidence=tuple(f"{listed(who)}: {why}" for why, who in ordered[:_SHOWN]),
        action="see limits of open files and connections, tables of switches and network cards, and NCCL's "
        "topology and tuning files; try with half of the nodes",
    )
