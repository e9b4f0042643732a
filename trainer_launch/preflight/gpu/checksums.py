"""The same numbers through the same kernels must come to the same bits: which GPU's do not. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import listed
from trainer_launch.preflight.measurements import Checksum

NAME = "gpu-checksum"
_SHOWN = 8
_ACTION = "do not train on it: have the card tested (dcgmi diag -r 3) or replaced"


def differing(nodes: Mapping[str, Sequence[Checksum]]) -> Iterator[Finding]:
    """A finding for each GPU that the majority of its kind contradicts; `nodes` by name, "" for this one."""
    kinds: defaultdict[str, list[tuple[str, Checksum]]] = defaultdict(list)
    for node, its in nodes.items():
        for one in its:
            kinds[one.kind].append((node, one))
    found = [finding for kind, members in kinds.items() for finding in _of_kind(kind, members)]
    yield from found
    count = sum(map(len, kinds.values()))
    if count and not found:
        text = (
            f"{count} GPUs compute identical results"
            if count > 1
            else "one GPU: there is nothing to compare it with"
        )
        text += f", in {len(kinds)} kinds of card and libraries" if len(kinds) > 1 else ""
        yield Finding(check=NAME, status=Status.PASS, scope=Scope.JOB, text=text, measured=count, unit="GPUs")


def _of_kind(kind: str, members: Sequence[tuple[str, Checksum]]) -> Iterator[Finding]:
    groups: defaultdict[str, list[tuple[str, Checksum]]] = defaultdict(list)
    for node, one in members:
        groups[one.value].append((node, one))
    if len(groups) < 2:
        return
    ordered = sorted(groups.values(), key=len, reverse=True)
    if 2 * len(ordered[0]) <= len(members):
        yield _undecided(kind, members)
        return
    odd: defaultdict[str, list[Checksum]] = defaultdict(list)
    for group in ordered[1:]:
        for node, one in group:
            odd[node].append(one)
    for node, its in odd.items():
        yield _odd(kind, node, its, len(ordered[0]))


def _odd(kind: str, node: str, its: Sequence[Checksum], most: int) -> Finding:
    where, gpus = f" of {node}" if node else "", ", ".join(f"GPU {one.gpu}" for one in its)
    cards = ", ".join(f"GPU {one.gpu}{where} ({one.uuid})" if one.uuid else f"GPU {one.gpu}{where}" for one in its)
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        scope=Scope.GPU,
        subject=f"{node}, {gpus}" if node else gpus,
        text=f"{cards} computes wrong results: {most} others of its kind ({kind}) agree on another result",
        measured=its[0].value,
        basis=Basis.PEER,
        action=_ACTION,
    )


def _undecided(kind: str, members: Sequence[tuple[str, Checksum]]) -> Finding:
    told = [f"GPU {one.gpu}{f' of {node}' if node else ''} ({one.value[:8]})" for node, one in members]
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        scope=Scope.JOB,
        text=f"the same product differs between GPUs of one kind ({kind}), and no value has a majority: one of "
        f"{listed(told, _SHOWN)} computes wrong results",
        basis=Basis.PEER,
        action=_ACTION,
    )
