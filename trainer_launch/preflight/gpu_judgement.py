"""Whether what GPUs deliver is enough: against a reference, against their peers, and bit by bit. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch.model.findings import Basis, Checksum, Fault, Finding, Measure, Scope, Status
from trainer_launch.model.units import all_of, counted, grouped, listed
from trainer_launch.preflight.check import Check, Where, check
from trainer_launch.preflight.cluster.nodes import Cluster
from trainer_launch.preflight.thresholds import KINDS, Reference, SpeedKind, Table, kind_of

_MAD_TO_SIGMA = 1.4826
SIGMAS = 4.0  # a spread that the job has anyway accuses nobody
_SHOWN = 6
_MANY = 64
_JOB_ACTION = (
    "the same everywhere: see power limits and clock policy; where this is what your machines give, save it with "
    "--report FILE.json and pass that as --reference"
)


class _Card(Struct, frozen=True):
    node: int
    measure: Measure
    of_reference: float | None  # its share; None: nobody knows what it should be
    of_peers: float | None  # None: it has none
    is_short: bool  # below what the reference allows
    is_behind: bool  # its peers


class _Group(Struct, frozen=True):
    """Cards that can be compared: of one model, by one measure in one unit."""

    kind: SpeedKind
    model: str
    reference: Reference | None
    cards: Sequence[_Card]

    def finding(self, status: Status, text: str, value: float, **more: Any) -> Finding:
        """`value` is what was measured."""
        expected = None if self.reference is None else round(self.reference.value, 2)
        more |= {"measured": round(value, 2), "expected": expected, "unit": self.cards[0].measure.unit}
        fault = Fault.NODE if status is Status.FAIL else None
        return Finding(check=self.kind.name, status=status, fault=fault, text=text, **more)


def _slow_gpus(cluster: Cluster) -> list[Finding]:
    measures = [node.report.measures for node in cluster.nodes]
    return findings(cluster.names, measures, cluster.settings.table, cluster.settings.kinds)


SPEED = tuple(
    Check(id=kind.name, title=kind.title, run=_slow_gpus, where=Where.CLUSTER, needs_load=True) for kind in KINDS
)


@check("gpu-checksum", Where.CLUSTER, needs_load=True)
def gpu_checksum(cluster: Cluster) -> Iterator[Finding]:
    """The same numbers through the same kernels come to the same bits on all GPUs of a kind."""
    yield from differing({node.name: node.report.checksums for node in cluster.nodes})


def findings(
    names: Sequence[str], measures: Sequence[Sequence[Measure]], table: Table, kinds: Sequence[SpeedKind] = KINDS
) -> list[Finding]:
    """What all nodes' measures come to; `names` say whose they are."""
    pairs = ((node, measure) for node, its in enumerate(measures) for measure in its)
    groups = grouped(((measure.name, measure.model, measure.unit), (node, measure)) for node, measure in pairs)
    judged: list[Finding] = []
    for (name, model, _), members in groups.items():
        kind, reference = kind_of(name, kinds), table.of(members[0][1])
        if kind is not None:
            group = _Group(kind, model, reference, _cards(kind, members, reference))
            judged += _judged(group, names, is_known=table.knows(model))
    return judged


def _cards(kind: SpeedKind, members: Sequence[tuple[int, Measure]], reference: Reference | None) -> list[_Card]:
    """Each card beside the reference, and beside its peers: the others that are no shorter than it allows."""
    floor = 0.0 if reference is None else kind.share * reference.value
    values = [measure.value for _, measure in members]
    good = [value for value in values if value >= floor] or values
    of_all = _middle(good)

    @functools.cache
    def of_others(value: float) -> tuple[float | None, float]:
        """Their median, and how far they lie from it; one among many moves neither."""
        if len(good) > _MANY or value not in good:
            return of_all
        at = good.index(value)
        return _middle([*good[:at], *good[at + 1 :]])

    cards = []
    for node, measure in members:
        middle, spread = of_others(measure.value)
        enough = 0.0 if middle is None else min(kind.peers * middle, middle - SIGMAS * spread)
        of_reference = None if reference is None else measure.value / reference.value
        of_peers = measure.value / middle if middle else None
        cards.append(_Card(node, measure, of_reference, of_peers, measure.value < floor, measure.value < enough))
    return cards


def _middle(values: Sequence[float]) -> tuple[float | None, float]:
    middle = statistics.median(values) if values else None
    return middle, 0.0 if middle is None else deviation(values, middle)


def deviation(values: Iterable[float], middle: float) -> float:
    """How far values lie from their median, as a standard deviation."""
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _judged(group: _Group, names: Sequence[str], *, is_known: bool) -> Iterator[Finding]:
    """Cards that both the reference and their peers accuse, by node; then those of one accuser, which warn."""
    faulty = [card for card in group.cards if card.is_short and card.is_behind]
    behind = [card for card in group.cards if card.is_behind and not card.is_short]
    short = [card for card in group.cards if card.is_short and not card.is_behind]
    on_node = grouped((card.node, card) for card in group.cards)
    for status, some in ((Status.FAIL, faulty), (Status.WARN, behind)):
        for node, its in sorted(grouped((card.node, card) for card in some).items()):
            yield _of_node(group, status, names[node], its, is_whole=1 < len(on_node[node]) == len(its))
    if short and group.reference is not None:
        yield _short(group, group.reference, short, names)
    if not (faulty or behind or short):
        yield _well(group, is_known=is_known)


def _of_node(group: _Group, status: Status, name: str, cards: Sequence[_Card], *, is_whole: bool) -> Finding:
    worst = min(cards, key=lambda card: card.measure.value)
    measure = worst.measure
    where = name if is_whole else f"{name}, GPU {', '.join(str(card.measure.gpu) for card in cards)}"
    parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
    if worst.of_reference is not None and group.reference is not None:
        parts.insert(0, f"{worst.of_reference:.0%} of the reference {group.reference.value:g}")
    return group.finding(
        status,
        f"{where} delivers {measure.value:.4g} {measure.unit} "
        f"({measure.name}, {measure.model or 'unknown model'}): {' and '.join(parts)}",
        measure.value,
        scope=Scope.NODE if is_whole else Scope.GPU,
        subject=where,
        basis=Basis.BOTH if status is Status.FAIL else Basis.PEER,
        evidence=tuple(_evidence(card, name) for card in cards[:_SHOWN]) if len(cards) > 1 else (),
        action=group.kind.action,
    )


def _short(group: _Group, reference: Reference, short: Sequence[_Card], names: Sequence[str]) -> Finding:
    n_cards, middle = len(group.cards), statistics.median(card.measure.value for card in short)
    which = all_of(n_cards, "GPU") if len(short) == n_cards else f"{len(short)} of {n_cards} GPUs"
    text = f"{group.model}: less {short[0].measure.name} than expected on {which}, {middle:.4g} "
    text += f"{reference.unit} in the median, {middle / reference.value:.0%} of the reference "
    text += f"{reference.value:g}, while they hardly differ from the others"
    evidence = tuple(_evidence(card, names[card.node]) for card in short) if n_cards <= _SHOWN else ()
    more = {"scope": Scope.JOB, "basis": Basis.ABSOLUTE, "action": _JOB_ACTION, "evidence": evidence}
    return group.finding(Status.WARN, text, middle, **more)


def _well(group: _Group, *, is_known: bool) -> Finding:
    values, measure = [card.measure.value for card in group.cards], group.cards[0].measure
    text = f"{counted(len(values), 'GPU')} ({group.model or 'unknown model'}): "
    text += f"{min(values):.4g} to {max(values):.4g} {measure.unit} of {measure.name}"
    has_peers, basis = len(values) > 1, Basis.BOTH if len(values) > 1 else Basis.ABSOLUTE
    if group.reference is None:
        text += f"; no reference tells {'this of it' if is_known else 'of this model'}"
        text += ", so they were only compared with each other" if has_peers else ""
        basis = Basis.PEER
    status = Status.PASS if group.reference is not None or (is_known and has_peers) else Status.UNKNOWN
    return group.finding(status, text, min(values), scope=Scope.JOB, basis=basis)


def _evidence(card: _Card, name: str) -> str:
    return f"{name}, GPU {card.measure.gpu}: {card.measure.value:.4g} {card.measure.unit}"


# -- the same numbers through the same kernels must come to the same bits ----------------------


_GPUS_SHOWN = 8
_ACTION = "do not train on it: have the card tested (dcgmi diag -r 3) or replaced"


def differing(nodes: Mapping[str, Sequence[Checksum]]) -> Iterator[Finding]:
    """A finding for each GPU that the majority of its kind contradicts; `nodes` by name, "" for this checksum."""
    kinds = grouped((checksum.kind, (node, checksum)) for node, its in nodes.items() for checksum in its)
    differing = [finding for kind, members in kinds.items() for finding in _of_kind(kind, members)]
    yield from differing
    count = sum(map(len, kinds.values()))
    if count and not differing:
        text = "one GPU: there is nothing to compare it with"
        text = f"{count} GPUs compute identical results" if count > 1 else text
        text += f", in {len(kinds)} kinds of card and libraries" if len(kinds) > 1 else ""
        yield gpu_checksum.passed(text, scope=Scope.JOB, measured=count, unit="GPUs")


def _of_kind(kind: str, members: Sequence[tuple[str, Checksum]]) -> Iterator[Finding]:
    most, *others = sorted(grouped((member[1].value, member) for member in members).values(), key=len, reverse=True)
    if not others:
        return
    more = {"basis": Basis.PEER, "action": _ACTION}
    if 2 * len(most) <= len(members):
        cards = [f"GPU {card.gpu}{f' of {node}' if node else ''} ({card.value[:8]})" for node, card in members]
        text = f"the same product differs between GPUs of one kind ({kind}), and no value has a majority: one of "
        text += f"{listed(cards, _GPUS_SHOWN)} computes wrong results"
        yield gpu_checksum.failed(Fault.NODE, text, scope=Scope.JOB, **more)
        return
    for node, its in grouped(member for group in others for member in group).items():
        where, gpus = f" of {node}" if node else "", ", ".join(f"GPU {card.gpu}" for card in its)
        cards = [f"GPU {card.gpu}{where}{f' ({card.uuid})' if card.uuid else ''}" for card in its]
        text = f"{', '.join(cards)} computes wrong results: {len(most)} others of its kind ({kind}) agree"
        subject = f"{node}, {gpus}" if node else gpus
        more |= {"scope": Scope.GPU, "subject": subject, "measured": its[0].value}
        yield gpu_checksum.failed(Fault.NODE, f"{text} on another result", **more)
