"""Whether what GPUs deliver is enough: against a reference and against their peers. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch.model.findings import Basis, Fault, Finding, Measure, Scope, Status
from trainer_launch.model.units import all_of, counted, grouped
from trainer_launch.preflight.check import Check, Where
from trainer_launch.preflight.cluster.nodes import Cluster
from trainer_launch.preflight.rules import DRAIN
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
    """The measure of a card, or of all cards of a node together."""

    node: int
    measure: Measure
    of_reference: float | None  # its share; None: nobody knows what it should be
    of_peers: float | None  # None: it has none
    is_short: bool  # below what the reference allows
    is_behind: bool  # its peers


def _slow_gpus(cluster: Cluster) -> list[Finding]:
    measures = [node.report.measures for node in cluster.nodes]
    return findings(cluster.names, measures, cluster.settings.table)


SPEED = tuple(
    Check(id=kind.name, title=kind.title, run=_slow_gpus, where=Where.CLUSTER, needs_load=True) for kind in KINDS
)


def findings(names: Sequence[str], measures: Sequence[Sequence[Measure]], table: Table) -> list[Finding]:
    """The findings about all nodes' measures; `names` say whose they are."""
    pairs = ((node, measure) for node, its in enumerate(measures) for measure in its)
    groups = grouped(((measure.name, measure.model, measure.unit), (node, measure)) for node, measure in pairs)
    results: list[Finding] = []
    for (name, model, _), members in groups.items():
        kind, reference = kind_of(name), table.of(members[0][1])
        if kind is not None:
            cards = _cards(kind, members, reference)
            results += _judged(kind, cards, reference, names, has_references=table.has(model))
    return results


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


def _judged(
    kind: SpeedKind,
    cards: Sequence[_Card],
    reference: Reference | None,
    names: Sequence[str],
    *,
    has_references: bool,
) -> Iterator[Finding]:
    """Cards that both the reference and their peers accuse, by node; then those of one accuser, which warn."""
    measure, n_cards, has_peers = cards[0].measure, len(cards), len(cards) > 1
    noun, model = "GPU" if measure.gpu is not None else "node", measure.model or "unknown model"
    expected = None if reference is None else round(reference.value, 2)

    def finding(status: Status, text: str, value: float, **more: Any) -> Finding:
        fault, remedy = (Fault.NODE, DRAIN) if status is Status.FAIL else (None, "")
        more |= {"measured": round(value, 2), "expected": expected, "unit": measure.unit, "remedy": remedy}
        return Finding(check=kind.name, status=status, fault=fault, text=text, **more)

    def evidence(some: Sequence[_Card]) -> tuple[str, ...]:
        return tuple(f"{_name(card, names)}: {card.measure.value:.4g} {measure.unit}" for card in some[:_SHOWN])

    behind = grouped(((not card.is_short, card.node), card) for card in cards if card.is_behind)
    for (is_enough, node), its in sorted(behind.items()):
        worst = min(its, key=lambda card: card.measure.value)
        is_whole = measure.gpu is None or 1 < sum(card.node == node for card in cards) == len(its)
        where = (
            names[node] if is_whole else f"{names[node]}, GPU {', '.join(str(card.measure.gpu) for card in its)}"
        )
        parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
        if worst.of_reference is not None and reference is not None:
            parts.insert(0, f"{worst.of_reference:.0%} of the reference {reference.value:g}")
        text = f"{where} delivers {worst.measure.value:.4g} {measure.unit} ({measure.name}, {model}): "
        about: dict[str, Any] = {"scope": Scope.NODE if is_whole else Scope.GPU, "subject": where}
        about |= {"evidence": evidence(its) if len(its) > 1 else (), "action": kind.action}
        status, basis = (Status.WARN, Basis.PEER) if is_enough else (Status.FAIL, Basis.BOTH)
        yield finding(status, text + " and ".join(parts), worst.measure.value, basis=basis, **about)
    short = [card for card in cards if card.is_short and not card.is_behind]
    if short and reference is not None:
        middle = statistics.median(card.measure.value for card in short)
        some = f"{len(short)} of {counted(n_cards, noun)}" if len(short) < n_cards else all_of(n_cards, noun)
        text = (
            f"{model}: less {measure.name} than expected on {some}, {middle:.4g} {reference.unit} in the median, "
        )
        text += (
            f"{middle / reference.value:.0%} of the reference {reference.value:g}, while they hardly differ from "
        )
        about = {"scope": Scope.JOB, "basis": Basis.ABSOLUTE, "action": _JOB_ACTION}
        about["evidence"] = evidence(short) if n_cards <= _SHOWN else ()
        yield finding(Status.WARN, f"{text}the others", middle, **about)
    if not behind and not short:
        least, most = (limit(card.measure.value for card in cards) for limit in (min, max))
        text = f"{counted(n_cards, noun)} ({model}): {least:.4g} to {most:.4g} {measure.unit} of {measure.name}"
        status, basis = Status.PASS, Basis.BOTH if has_peers else Basis.ABSOLUTE
        if reference is None:
            text += f"; no reference tells {'this of it' if has_references else 'of this model'}"
            text += ", so they were only compared with each other" if has_peers else ""
            # Of a node that is alone, gpu-peers tells the speed.
            lone = Status.SKIPPED if measure.gpu is None else Status.UNKNOWN
            status, basis = (status if has_references else Status.UNKNOWN) if has_peers else lone, Basis.PEER
        yield finding(status, text, least, scope=Scope.JOB, basis=basis)


def _name(card: _Card, names: Sequence[str]) -> str:
    return names[card.node] if card.measure.gpu is None else f"{names[card.node]}, GPU {card.measure.gpu}"
