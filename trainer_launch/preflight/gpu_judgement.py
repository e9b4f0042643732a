"""Whether what GPUs deliver is enough: against a reference, and against their peers in the job. Pure.

Both fail: the card is named, and the job does not start. Only the reference fails: the whole job is below it, which
is one finding about the job (a power limit, a clock policy, a reference of another cooling), not one about each
card. Only the peers fail: a warning. A model that no reference knows is judged by its peers alone.

A card's peers are those of its model in the job that reach their reference, or all where none does or none is
known; it is not among its own peers, so that of two cards the slow one stands out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import all_of, counted
from trainer_launch.preflight.measurements import Measure
from trainer_launch.preflight.reference_values import Reference, Table

_MAD_TO_SIGMA = 1.4826
_SIGMAS = 4.0  # a spread that the job has anyway accuses nobody
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Kind:
    """Measures that are judged alike, and by what name."""

    name: str  # the check's, and that of its threshold
    measures: tuple[str, ...]  # what their names begin with
    share: float  # of the reference
    peers: float  # of the peers' median
    action: str


_CARD = (
    "see that card's clocks, power limit and temperature (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE), or drain it"
)
KINDS = (
    Kind("gemm", ("gemm",), 0.85, 0.93, _CARD),
    Kind(
        "hbm", ("hbm",), 0.90, 0.93, "see that card's memory: ECC errors and remapped rows (nvidia-smi -q -d ECC)"
    ),
    Kind("pcie", ("h2d", "d2h", "pcie"), 0.85, 0.90, "see that card's PCIe generation and width under load"),
    Kind("nccl", ("nccl",), 0.85, 0.90, "see that card's NVLink state (nvidia-smi nvlink -s) and what NCCL chose"),
)
_OTHER = Kind("measures", ("",), 0.85, 0.90, _CARD)
SHARE_OF_PAIRS = 0.75
_PAIR = Kind("pairs", ("pair",), SHARE_OF_PAIRS, 0.0, "")  # peers are compared by who tests pairs
CHECKS = tuple(kind.name for kind in KINDS)
_JOB_ACTION = (
    "the same everywhere: see power limits and clock policy; where this is what your machines give, pin it with "
    "--write-reference and --reference"
)


@dataclass(frozen=True, slots=True)
class Shares:
    """What is enough, where it was said otherwise than in KINDS."""

    of_reference: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by a kind's name
    of_peers: float | None = None

    def share(self, kind: Kind) -> float:
        """The share of the reference that is enough."""
        return self.of_reference.get(kind.name, kind.share)

    def peers(self, kind: Kind) -> float:
        """The share of the peers' median that is enough."""
        return kind.peers if self.of_peers is None else self.of_peers


@dataclass(frozen=True, slots=True)
class _Card:
    """One measure of one card, and how it stands."""

    node: int
    measure: Measure
    of_reference: float | None  # its share; None: nobody knows what it should be
    of_peers: float | None  # None: it has none
    is_short: bool  # below what the reference allows
    is_behind: bool  # its peers


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
        "is NCCL on plain sockets, or is there less than one NIC for each GPU? Where that is meant, pin it with"
    )
    return [_of_job(_PAIR, text, measures, reference, f"{action} --write-reference and --reference")]


def kind_of(name: str) -> Kind:
    """How a measure of this name is judged."""
    return next((kind for kind in KINDS if name.startswith(kind.measures)), _OTHER)


def _groups(
    measures: Sequence[Sequence[Measure]], table: Table, shares: Shares
) -> Iterator[tuple[Kind, str, list[_Card]]]:
    """Cards that can be compared: of one model, by one measure in one unit."""
    groups: dict[tuple[str, str, str], list[tuple[int, Measure]]] = {}
    for node, its in enumerate(measures):
        for one in its:
            groups.setdefault((one.name, one.model, one.unit), []).append((node, one))
    for (name, model, _), members in groups.items():
        kind = kind_of(name)
        yield kind, model, _cards(kind, members, table.of(members[0][1]), shares)


def _cards(
    kind: Kind, members: Sequence[tuple[int, Measure]], reference: Reference | None, shares: Shares
) -> list[_Card]:
    floor = 0.0 if reference is None else shares.share(kind) * reference.value
    good = sorted(one.value for _, one in members if one.value >= floor)
    ordered = good if reference is not None and good else sorted(one.value for _, one in members)
    whole = _Spread(ordered)
    cards = []
    for node, one in members:
        is_among = one.value >= floor or len(ordered) == len(members)
        middle, spread = whole.without(one.value) if is_among else whole.all()
        share = shares.peers(kind)
        is_behind = middle is not None and one.value < min(share * middle, middle - _SIGMAS * spread)
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


class _Spread:
    """The median of some sorted values and how far they lie from it, with and without one of them."""

    def __init__(self, ordered: list[float]) -> None:
        self._ordered = ordered
        self._known: dict[float | None, tuple[float | None, float]] = {}

    def all(self) -> tuple[float | None, float]:
        return self.without(None)

    def without(self, value: float | None) -> tuple[float | None, float]:
        """Equal values give the same answer; most of many cards differ a little, and theirs is that of all."""
        if len(self._ordered) > 64:
            value = None  # one among so many moves no median
        if value not in self._known:
            rest = list(self._ordered)
            if value is not None:
                rest.remove(value)
            self._known[value] = _spread(rest)
        return self._known[value]


def _spread(values: Sequence[float]) -> tuple[float | None, float]:
    if not values:
        return None, 0.0
    middle = statistics.median(values)
    return middle, _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _judged(
    kind: Kind, model: str, cards: Sequence[_Card], names: Sequence[str], table: Table
) -> Iterator[Finding]:
    reference = table.of(cards[0].measure)
    guilty = [card for card in cards if card.is_short and card.is_behind]
    behind = [card for card in cards if card.is_behind and not card.is_short]
    short = [card for card in cards if card.is_short and not card.is_behind]
    for status, some in ((Status.FAIL, guilty), (Status.WARN, behind)):
        for node in sorted({card.node for card in some}):
            its = [card for card in some if card.node == node]
            n_cards = sum(card.node == node for card in cards)
            yield _of_node(kind, status, names[node], its, is_whole=1 < n_cards == len(its), reference=reference)
    if short and reference is not None:
        yield _short(kind, model, short, len(cards), names, reference)
    if not (guilty or behind or short):
        yield _well(kind, model, cards, reference, is_known=table.knows(model))


def _of_node(
    kind: Kind, status: Status, name: str, cards: Sequence[_Card], *, is_whole: bool, reference: Reference | None
) -> Finding:
    worst = min(cards, key=lambda card: card.measure.value)
    one = worst.measure
    gpus = [card.measure.gpu for card in cards if card.measure.gpu is not None]
    where = f"{name}, GPU {', '.join(map(str, gpus))}" if gpus and not is_whole else name
    parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
    if worst.of_reference is not None and reference is not None:
        parts.insert(0, f"{worst.of_reference:.0%} of the reference {reference.value:g}")
    return Finding(
        check=kind.name,
        status=status,
        fault=Fault.NODE if status is Status.FAIL else None,
        scope=Scope.NODE if is_whole or not gpus else Scope.GPU,
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
    gpu = "" if card.measure.gpu is None else f", GPU {card.measure.gpu}"
    return f"{name}{gpu}: {card.measure.value:.4g} {card.measure.unit}"


def _median(measures: Iterable[Measure]) -> float:
    return statistics.median(one.value for one in measures)
