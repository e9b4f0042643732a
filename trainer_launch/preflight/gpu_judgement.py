"""Whether what GPUs deliver is enough: against a reference, against their peers, and bit by bit. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

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
    measures = [node.record.measures for node in cluster.nodes]
    return findings(cluster.names, measures, cluster.settings.table, cluster.settings.shares)


SPEED = tuple(
    Check(id=kind.name, title=kind.title, run=_slow_gpus, where=Where.CLUSTER, needs=Needs.LOAD) for kind in KINDS
)


@check("gpu-checksum", Where.CLUSTER, needs=Needs.LOAD)
def gpu_checksum(cluster: Cluster) -> Iterator[Finding]:
    """The same numbers through the same kernels come to the same bits on all GPUs of a kind."""
    yield from differing({node.name: node.record.checksums for node in cluster.nodes})


def findings(
    names: Sequence[str], measures: Sequence[Sequence[Measure]], table: Table, shares: Shares | None = None
) -> list[Finding]:
    """What all nodes' measures come to; `names` say whose they are."""
    found: list[Finding] = []
    for kind, model, cards in _groups(measures, table, shares or Shares()):
        found += _judged(kind, model, cards, names, table)
    return found


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
    return [_of_job(_PAIR, text, measures, reference, f"{action} --report FILE.json and pass that as --reference")]


def _groups(
    measures: Sequence[Sequence[Measure]], table: Table, shares: Shares
) -> Iterator[tuple[Kind, str, list[_Card]]]:
    """Cards that can be compared: of one model, by one measure in one unit."""
    pairs = ((node, one) for node, its in enumerate(measures) for one in its)
    groups = grouped(((one.name, one.model, one.unit), (node, one)) for node, one in pairs)
    for (name, model, _), members in groups.items():
        kind = kind_of(name)
        if kind is not None:
            yield kind, model, _cards(kind, members, table.of(members[0][1]), shares)


def _cards(
    kind: Kind, members: Sequence[tuple[int, Measure]], reference: Reference | None, shares: Shares
) -> list[_Card]:
    floor = 0.0 if reference is None else shares.share(kind) * reference.value
    good = sorted(one.value for _, one in members if one.value >= floor)
    ordered = good if reference is not None and good else sorted(one.value for _, one in members)
    cards = []

    @functools.cache
    def others(value: float | None) -> tuple[float | None, float]:
        """The median without one of these values, and how far the rest lie from it."""
        rest = list(ordered)
        if value is not None:
            rest.remove(value)
        return _spread(rest)

    for node, one in members:
        is_among = one.value >= floor or len(ordered) == len(members)
        # One among many moves no median.
        middle, spread = others(one.value if is_among and len(ordered) <= _MANY else None)
        share = shares.peers(kind)
        is_behind = middle is not None and one.value < min(share * middle, middle - SIGMAS * spread)
        cards.append(
            _Card(
                node=node,
                measure=one,
                of_reference=None if reference is None else one.value / reference.value,
                of_peers=one.value / middle if middle else None,
                is_short=reference is not None and one.value < floor,
                is_behind=is_behind,
            )
        )
    return cards


def _spread(values: Sequence[float]) -> tuple[float | None, float]:
    if not values:
        return None, 0.0
    middle = statistics.median(values)
    return middle, deviation(values, middle)


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
    one = worst.measure
    where = name if is_whole else f"{name}, GPU {', '.join(str(card.measure.gpu) for card in cards)}"
    parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
    if worst.of_reference is not None and reference is not None:
        parts.insert(0, f"{worst.of_reference:.0%} of the reference {reference.value:g}")
    return Finding(
        check=kind.name,
        status=status,
        fault=Fault.NODE if status is Status.FAIL else None,
        scope=Scope.NODE if is_whole else Scope.GPU,
        subject=where,
        text=f"{where} delivers {one.value:.4g} {one.unit} ({one.name}, {one.model or 'unknown model'}): "
        f"{' and '.join(parts)}",
        measured=round(one.value, 2),
        expected=None if reference is None else round(reference.value, 2),
        unit=one.unit,
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
    found = _of_job(kind, text, measures, reference, _JOB_ACTION)
    if n_cards > _SHOWN:
        return found
    shown = tuple(_evidence(card, names[card.node]) for card in short)
    return replace(found, evidence=shown)


def _of_job(kind: Kind, text: str, measures: Sequence[Measure], reference: Reference, action: str) -> Finding:
    return Finding(
        check=kind.name,
        status=Status.WARN,
        scope=Scope.JOB,
        text=text,
        measured=round(_median(measures), 2),
        expected=round(reference.value, 2),
        unit=reference.unit,
        basis=Basis.ABSOLUTE,
        action=action,
    )


def _well(
    kind: Kind, model: str, cards: Sequence[_Card], reference: Reference | None, *, is_known: bool
) -> Finding:
    values = [card.measure.value for card in cards]
    one = cards[0].measure
    text = f"{counted(len(cards), 'GPU')} ({model or 'unknown model'}): "
    text += f"{min(values):.4g} to {max(values):.4g} {one.unit} "
    text += f"of {one.name}"
    has_peers = len(cards) > 1
    if reference is None:
        text += f"; no reference tells {'this of it' if is_known else 'of this model'}"
        text += ", so they were only compared with each other" if has_peers else ""
    return Finding(
        check=kind.name,
        status=Status.PASS if reference is not None or (is_known and has_peers) else Status.UNKNOWN,
        scope=Scope.JOB,
        text=text,
        measured=round(min(values), 2),
        expected=None if reference is None else round(reference.value, 2),
        unit=one.unit,
        basis=Basis.PEER if reference is None else Basis.BOTH if has_peers else Basis.ABSOLUTE,
    )


def _evidence(card: _Card, name: str) -> str:
    return f"{name}, GPU {card.measure.gpu}: {card.measure.value:.4g} {card.measure.unit}"


def _median(measures: Iterable[Measure]) -> float:
    return statistics.median(one.value for one in measures)


# -- the same numbers through the same kernels must come to the same bits ----------------------


_GPUS_SHOWN = 8
_ACTION = "do not train on it: have the card tested (dcgmi diag -r 3) or replaced"


def differing(nodes: Mapping[str, Sequence[Checksum]]) -> Iterator[Finding]:
    """A finding for each GPU that the majority of its kind contradicts; `nodes` by name, "" for this one."""
    kinds = grouped((one.kind, (node, one)) for node, its in nodes.items() for one in its)
    found = [finding for kind, members in kinds.items() for finding in _of_kind(kind, members)]
    yield from found
    count = sum(map(len, kinds.values()))
    if count and not found:
        text = "one GPU: there is nothing to compare it with"
        text = f"{count} GPUs compute identical results" if count > 1 else text
        text += f", in {len(kinds)} kinds of card and libraries" if len(kinds) > 1 else ""
        yield gpu_checksum.passed(text, scope=Scope.JOB, measured=count, unit="GPUs")


def _of_kind(kind: str, members: Sequence[tuple[str, Checksum]]) -> Iterator[Finding]:
    groups = grouped((one.value, (node, one)) for node, one in members)
    if len(groups) < 2:
        return
    ordered = sorted(groups.values(), key=len, reverse=True)
    if 2 * len(ordered[0]) <= len(members):
        yield _undecided(kind, members)
        return
    for node, its in grouped(pair for group in ordered[1:] for pair in group).items():
        yield _odd(kind, node, its, len(ordered[0]))


def _odd(kind: str, node: str, its: Sequence[Checksum], most: int) -> Finding:
    where, gpus = f" of {node}" if node else "", ", ".join(f"GPU {one.gpu}" for one in its)
    cards = ", ".join(f"GPU {one.gpu}{where} ({one.uuid})" if one.uuid else f"GPU {one.gpu}{where}" for one in its)
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
    told = [f"GPU {one.gpu}{f' of {node}' if node else ''} ({one.value[:8]})" for node, one in members]
    return gpu_checksum.failed(
        Fault.NODE,
        f"the same product differs between GPUs of one kind ({kind}), and no value has a majority: one of "
        f"{listed(told, _GPUS_SHOWN)} computes wrong results",
        scope=Scope.JOB,
        basis=Basis.PEER,
        action=_ACTION,
    )
