"""Whether what GPUs deliver is enough: against a reference, against their peers, and bit by bit. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch.model.findings import Basis, Checksum, Fault, Finding, Measure, Scope, Status
from trainer_launch.model.units import all_of, counted, grouped, listed
from trainer_launch.preflight.check import Check, Needs, Where, check
from trainer_launch.preflight.cluster.nodes import Cluster
from trainer_launch.preflight.thresholds import KINDS, Kind, Reference, Shares, Table, kind_of

_MAD_TO_SIGMA = 1.4826
SIGMAS = 4.0  # a spread that the job has anyway accuses nobody
_SHOWN = 6
_MANY = 64

SHARE_OF_PAIRS = 0.75
_PAIR = Kind("pairs", "", ("pair",), SHARE_OF_PAIRS, 0.0, "")  # peers are compared by who tests pairs
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


def _slow_gpus(cluster: Cluster) -> list[Finding]:
    measures = [node.report.measures for node in cluster.nodes]
    return findings(cluster.names, measures, cluster.settings.table, cluster.settings.shares)


SPEED = tuple(
    Check(id=kind.name, title=kind.title, run=_slow_gpus, where=Where.CLUSTER, needs=Needs.LOAD) for kind in KINDS
)


@check("gpu-checksum", Where.CLUSTER, needs=Needs.LOAD)
def gpu_checksum(cluster: Cluster) -> Iterator[Finding]:
    """The same numbers through the same kernels come to the same bits on all GPUs of a kind."""
    yield from differing({node.name: node.report.checksums for node in cluster.nodes})


def findings(
    names: Sequence[str], measures: Sequence[Sequence[Measure]], table: Table, shares: Shares | None = None
) -> list[Finding]:
    """What all nodes' measures come to; `names` say whose they are."""
    judged: list[Finding] = []
    for kind, model, cards in _groups(measures, table, shares or Shares()):
        judged += _judged(kind, model, cards, names, table)
    return judged


def of_pairs(rates: Sequence[float], model: str, table: Table) -> list[Finding]:
    """What pairs of nodes deliver in GB/s for each GPU, against a model's reference: a finding about the job."""
    measures = [Measure("pair", rate, "GB/s", model, None) for rate in rates]
    reference = table.of(measures[0]) if measures else None
    if reference is None or statistics.median(rates) >= SHARE_OF_PAIRS * reference.value:
        return []
    text = f"{model}: a pair of nodes delivers {_median(measures):.3g} GB/s for each GPU in the median, "
    text += f"{_median(measures) / reference.value:.0%} of the reference {reference.value:g}"
    action = (
        "is NCCL on plain sockets, or is there less than one NIC for each GPU? Where that is meant, save it with"
    )
    action += " --report FILE.json and pass that as --reference"
    return [_of_job(_PAIR, text, measures, reference, action=action)]


def _groups(
    measures: Sequence[Sequence[Measure]], table: Table, shares: Shares
) -> Iterator[tuple[Kind, str, list[_Card]]]:
    """Cards that can be compared: of one model, by one measure in one unit."""
    pairs = ((node, measure) for node, its in enumerate(measures) for measure in its)
    groups = grouped(((measure.name, measure.model, measure.unit), (node, measure)) for node, measure in pairs)
    for (name, model, _), members in groups.items():
        kind = kind_of(name)
        if kind is not None:
            yield kind, model, _cards(kind, members, table.of(members[0][1]), shares)


def _cards(
    kind: Kind, members: Sequence[tuple[int, Measure]], reference: Reference | None, shares: Shares
) -> list[_Card]:
    """Each card beside the reference, and beside its peers: the others that are no shorter than it allows."""
    floor = 0.0 if reference is None else shares.share(kind) * reference.value
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
        enough = 0.0 if middle is None else min(shares.peers(kind) * middle, middle - SIGMAS * spread)
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


def _judged(
    kind: Kind, model: str, cards: Sequence[_Card], names: Sequence[str], table: Table
) -> Iterator[Finding]:
    reference = table.of(cards[0].measure)
    faulty = [card for card in cards if card.is_short and card.is_behind]
    behind = [card for card in cards if card.is_behind and not card.is_short]
    short = [card for card in cards if card.is_short and not card.is_behind]
    for status, some in ((Status.FAIL, faulty), (Status.WARN, behind)):
        for node in sorted({card.node for card in some}):
            its = [card for card in some if card.node == node]
            n_cards = sum(card.node == node for card in cards)
            yield _of_node(kind, status, names[node], its, is_whole=1 < n_cards == len(its), reference=reference)
    if short and reference is not None:
        yield _short(kind, model, short, len(cards), names, reference)
    if not (faulty or behind or short):
        yield _well(kind, model, cards, reference, is_known=table.knows(model))


def _of_node(
    kind: Kind, status: Status, name: str, cards: Sequence[_Card], *, is_whole: bool, reference: Reference | None
) -> Finding:
    worst = min(cards, key=lambda card: card.measure.value)
    measure = worst.measure
    where = name if is_whole else f"{name}, GPU {', '.join(str(card.measure.gpu) for card in cards)}"
    parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
    if worst.of_reference is not None and reference is not None:
        parts.insert(0, f"{worst.of_reference:.0%} of the reference {reference.value:g}")
    return _finding(
        kind,
        status,
        f"{where} delivers {measure.value:.4g} {measure.unit} "
        f"({measure.name}, {measure.model or 'unknown model'}): {' and '.join(parts)}",
        (measure.value, measure.unit, reference),
        scope=Scope.NODE if is_whole else Scope.GPU,
        subject=where,
        basis=Basis.BOTH if status is Status.FAIL else Basis.PEER,
        evidence=tuple(_evidence(card, name) for card in cards[:_SHOWN]) if len(cards) > 1 else (),
        action=kind.action,
    )


def _short(
    kind: Kind, model: str, short: Sequence[_Card], n_cards: int, names: Sequence[str], reference: Reference
) -> Finding:
    measures = [card.measure for card in short]
    which = all_of(n_cards, "GPU") if len(short) == n_cards else f"{len(short)} of {n_cards} GPUs"
    text = f"{model}: less {measures[0].name} than expected on {which}, {_median(measures):.4g} "
    text += f"{reference.unit} in the median, {_median(measures) / reference.value:.0%} of the reference "
    text += f"{reference.value:g}, while they hardly differ from the others"
    shown = tuple(_evidence(card, names[card.node]) for card in short) if n_cards <= _SHOWN else ()
    return _of_job(kind, text, measures, reference, action=_JOB_ACTION, evidence=shown)


def _of_job(kind: Kind, text: str, measures: Sequence[Measure], reference: Reference, **more: Any) -> Finding:
    figures = (_median(measures), reference.unit, reference)
    return _finding(kind, Status.WARN, text, figures, scope=Scope.JOB, basis=Basis.ABSOLUTE, **more)


def _well(
    kind: Kind, model: str, cards: Sequence[_Card], reference: Reference | None, *, is_known: bool
) -> Finding:
    values = [card.measure.value for card in cards]
    measure = cards[0].measure
    text = f"{counted(len(cards), 'GPU')} ({model or 'unknown model'}): "
    text += f"{min(values):.4g} to {max(values):.4g} {measure.unit} "
    text += f"of {measure.name}"
    has_peers = len(cards) > 1
    if reference is None:
        text += f"; no reference tells {'this of it' if is_known else 'of this model'}"
        text += ", so they were only compared with each other" if has_peers else ""
    return _finding(
        kind,
        Status.PASS if reference is not None or (is_known and has_peers) else Status.UNKNOWN,
        text,
        (min(values), measure.unit, reference),
        scope=Scope.JOB,
        basis=Basis.PEER if reference is None else Basis.BOTH if has_peers else Basis.ABSOLUTE,
    )


def _finding(
    kind: Kind, status: Status, text: str, figures: tuple[float, str, Reference | None], **more: Any
) -> Finding:
    """`figures` are what was measured, its unit, and what it should be."""
    measured, unit, reference = figures
    more |= {"measured": round(measured, 2), "expected": None if reference is None else round(reference.value, 2)}
    fault = Fault.NODE if status is Status.FAIL else None
    return Finding(check=kind.name, status=status, fault=fault, text=text, unit=unit, **more)


def _evidence(card: _Card, name: str) -> str:
    return f"{name}, GPU {card.measure.gpu}: {card.measure.value:.4g} {card.measure.unit}"


def _median(measures: Iterable[Measure]) -> float:
    return statistics.median(measure.value for measure in measures)


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
    groups = grouped((checksum.value, (node, checksum)) for node, checksum in members)
    if len(groups) < 2:
        return
    ordered = sorted(groups.values(), key=len, reverse=True)
    if 2 * len(ordered[0]) <= len(members):
        yield _undecided(kind, members)
        return
    for node, its in grouped(pair for group in ordered[1:] for pair in group).items():
        yield _odd(kind, node, its, len(ordered[0]))


def _odd(kind: str, node: str, its: Sequence[Checksum], most: int) -> Finding:
    where, gpus = f" of {node}" if node else "", ", ".join(f"GPU {checksum.gpu}" for checksum in its)
    cards = ", ".join(
        f"GPU {checksum.gpu}{where} ({checksum.uuid})" if checksum.uuid else f"GPU {checksum.gpu}{where}"
        for checksum in its
    )
    return gpu_checksum.failed(
        Fault.NODE,
        f"{cards} computes wrong results: {most} others of its kind ({kind}) agree on another result",
        scope=Scope.GPU,
        subject=f"{node}, {gpus}" if node else gpus,
        measured=its[0].value,
        basis=Basis.PEER,
        action=_ACTION,
    )


def _undecided(kind: str, members: Sequence[tuple[str, Checksum]]) -> Finding:
    cards = [
        f"GPU {checksum.gpu}{f' of {node}' if node else ''} ({checksum.value[:8]})" for node, checksum in members
    ]
    return gpu_checksum.failed(
        Fault.NODE,
        f"the same product differs between GPUs of one kind ({kind}), and no value has a majority: one of "
        f"{listed(cards, _GPUS_SHOWN)} computes wrong results",
        scope=Scope.JOB,
        basis=Basis.PEER,
        action=_ACTION,
    )
