"""Checks that compare what is known of each GPU with a bound, as a table; and how many there are.

One finding tells of all GPUs of a node, with the bad ones named; what a card does not tell is unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainer_launch.host.deadline_subprocess import REAP_S
from trainer_launch.model.findings import Fault, Finding, Status, Value
from trainer_launch.model.units import counted, in_units
from trainer_launch.preflight.check import Check, Needs, Subject, Where, check
from trainer_launch.preflight.gpu.devices import FACTS_S, MOST_HELD_BYTES, SETTLE_S, STUCK, Load
from trainer_launch.preflight.gpu.facts import DRAIN, Fact, Facts, Gpu, State, Trouble, Watched, summed, visible

_FACTS_LIMIT_S = FACTS_S + REAP_S + 2.0  # the library may hang, and its child is killed then
_NEAR_C = 5
_MANY_REPLAYS = 80


def facts_limit_s(subject: Subject) -> float:
    """What a check may take that asks NVIDIA's library."""
    return _FACTS_LIMIT_S


def load_limit_s(subject: Subject) -> float:
    """What a check may take that needs the load: until the last child was killed."""
    return _FACTS_LIMIT_S if subject.cards is None else subject.cards.load_limit_s


def gpus(subject: Subject) -> tuple[Gpu, ...]:
    """Those that the job sees and that answer; none where nothing is known, which gpu-count says."""
    cards = subject.cards
    return () if cards is None else tuple(gpu for gpu in cards.gpus if not gpu.lost)


def load(subject: Subject) -> Load | None:
    """What was seen under load; None where there is none."""
    return None if subject.cards is None else subject.cards.load()


def watched(subject: Subject) -> tuple[Watched, ...]:
    """Those that the job sees, as they were under load."""
    found = load(subject)
    if found is None or subject.cards is None:
        return ()
    return tuple(found.watched[gpu.index] for gpu in subject.cards.gpus if gpu.index in found.watched)


# -- the table --------------------------------------------------------------------------------


Cards: TypeAlias = "Sequence[Card]"
Row: TypeAlias = Callable[[str, Subject], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU to compare: the fact without which nothing is known, and all values by name."""

    index: int
    fact: Fact
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """A card whose `value` is beyond `bound` is bad; `text` says it, and `action` what to do, with its values."""

    value: str
    text: str
    action: str = DRAIN
    bound: float | str = 0  # or the name of another value
    is_beyond: Callable[[Any, Any], bool] = operator.gt
    status: Status = Status.FAIL
    measured: Value = None  # in place of value and bound, which the finding has otherwise
    is_told: bool = True  # whether it has the value
    is_bound_told: bool = True
    unit: str = ""

    def broken(self, card: Card) -> Trouble | None:
        """What is wrong with this card, if it is; what is not known is not beyond anything."""
        value = card.values.get(self.value)
        bound = card.values.get(self.bound) if isinstance(self.bound, str) else self.bound
        if value is None or bound is None or not self.is_beyond(value, bound):
            return None
        is_told = self.is_told and self.measured is None
        return Trouble(
            gpu=card.index,
            text=self.text.format_map(card.values),
            status=self.status,
            measured=value if is_told else self.measured,
            expected=bound if is_told and self.is_bound_told else None,
            unit=self.unit,
            action=self.action.format_map(card.values),
        )


def _row(cards: Callable[[Subject], Cards], good: str | Callable[[Cards], str], *bounds: Bound) -> Row:
    """One comparison of all cards: the first bound that a card breaks is told of it."""

    def findings(name: str, subject: Subject) -> Iterator[Finding]:
        found = cards(subject)
        broken = (next(filter(None, (bound.broken(card) for bound in bounds)), None) for card in found)
        asked = [(card.index, card.fact) for card in found]
        yield from summed(name, asked, broken, good if isinstance(good, str) else good(found))

    return findings


def _table(
    name: str,
    title: str,
    *rows: Row,
    needs: Needs = Needs.NOTHING,
    limit_s: Callable[[Subject], float] = facts_limit_s,
) -> Check[Subject]:
    def run(subject: Subject) -> Iterator[Finding]:
        for row in rows:
            yield from row(name, subject)

    return Check(id=name, title=title, run=run, where=Where.GPU, needs=needs, limit_s=limit_s)


def _at_rest(fact: str, found: Iterable[Gpu]) -> list[Card]:
    return [Card(gpu.index, gpu.fact(fact), _values(gpu)) for gpu in found]


def _values(gpu: Gpu) -> dict[str, Any]:
    known = {name: fact.value for name, fact in gpu.facts.items() if fact.is_known}
    _, replaced, pending, failed = known.get("remapped", (0, 0, None, None))
    recovery = known.get("recovery", 0)
    return known | {
        "uuid": gpu.uuid,
        "rows_replaced": replaced,
        "rows_pending": pending,
        "rows_failed": failed,
        "used": in_units(known.get("memory_used", 0)),
        "total": in_units(known.get("memory_total", 0)),
        "recovery_words": _RECOVERY.get(recovery, f"recovery action {recovery}"),
    }


def _under_load(subject: Subject) -> list[Card]:
    """By the greatest values that were seen, and by how much counters grew."""
    return [
        Card(
            one.index,
            one.fact("pcie_width"),
            {name: one.most(name) for name in one.facts} | {"pcie_replays": one.growth("pcie_replays")},
        )
        for one in watched(subject)
    ]


def _total(cards: Cards, name: str) -> int:
    return sum(int(card.values.get(name, 0)) for card in cards)


def _all_gpus(subject: Subject) -> list[Card]:
    """Also those that do not answer."""
    found = () if subject.cards is None else subject.cards.gpus
    return [
        Card(gpu.index, Fact(State.KNOWN, 0), {"lost": gpu.lost})
        if gpu.lost
        else Card(gpu.index, gpu.fact("recovery"), _values(gpu))
        for gpu in found
    ]


# As nvmlGpuRecoveryAction has them.
_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "that peer-to-peer traffic be drained",
    4: "to be drained, then reset",
    5: "that its IMEX domain be recovered",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"


def _has_rows(gpu: Gpu) -> bool:
    """Remapped rows from A100 on, retired pages on older cards."""
    return gpu.fact("remapped").state is not State.UNSUPPORTED


def _settled(subject: Subject) -> list[Card]:
    """Before any context of ours; a container does not see others' processes, but their memory."""
    cards = subject.cards
    found = () if cards is None else visible(cards.settled().gpus, cards.shown)
    return _at_rest("memory_used", [gpu for gpu in found if not gpu.lost])


def _most_used(cards: Cards) -> str:
    return f"at most {in_units(max((card.values.get('memory_used', 0) for card in cards), default=0))} in use"


def _margins(subject: Subject) -> list[Card]:
    """A card's own margin where it tells that, else what is left to its slowdown threshold."""
    seen = {one.index: one for one in watched(subject)}
    when = "under load" if seen else "at rest"
    cards = []
    for gpu in gpus(subject):
        margin = _margin(gpu, seen.get(gpu.index))
        unknown = Fact(State.UNKNOWN, why="neither margin nor threshold is told")
        fact = unknown if margin is None else Fact(State.KNOWN, margin)
        cards.append(Card(gpu.index, fact, {"margin_c": margin, "when": when}))
    return cards


def _margin(gpu: Gpu, seen: Watched | None) -> float | None:
    margin = seen.least("margin_c") if seen is not None else gpu.value("margin_c")
    if margin is not None:
        return float(margin)
    hottest = seen.most("temperature_c") if seen is not None else gpu.value("temperature_c")
    threshold = gpu.value("slowdown_c")
    return None if hottest is None or threshold is None else float(threshold - hottest)


def _coolest(cards: Cards) -> str:
    least = min((card.fact.value for card in cards if card.fact.is_known), default=0)
    return f"at least {least:g} \u00b0C to go {cards[0].values['when'] if cards else ''} until they slow down"


def _is_less(value: float, most: float) -> bool:
    """Than it could be; 0 is no value."""
    return 0 < value < most


RECOVERY = _table(
    "gpu-recovery",
    "The driver asks for no reset of a GPU, and none is gone.",
    _row(
        _all_gpus,
        "the driver asks for no recovery",
        Bound("lost", "does not answer: {lost}", is_beyond=operator.ne, is_bound_told=False),
        Bound(
            "recovery",
            "needs {recovery_words}, says the driver ({uuid})",
            "drain this node: it needs {recovery_words}",
        ),
    ),
)
ECC = _table(
    "gpu-ecc",
    "GPU memory had no error that could not be corrected since the driver was loaded.",
    _row(
        lambda subject: _at_rest("ecc_uncorrected", gpus(subject)),
        lambda cards: (
            "no uncorrected memory error since the driver was loaded "
            f"({_total(cards, 'ecc_uncorrected_ever')} in their lives)"
        ),
        Bound(
            "ecc_uncorrected",
            "had {ecc_uncorrected} uncorrected memory errors since the driver was loaded ({uuid})",
            "have the GPU reset before it is used; if the errors come back, have the card replaced",
            unit="errors",
        ),
    ),
)
REMAP = _table(
    "gpu-remap",
    "No bad row of GPU memory waits for a spare one, which takes a reset, and there are spare ones left.",
    _row(
        lambda subject: _at_rest("remapped", filter(_has_rows, gpus(subject))),
        lambda cards: (
            f"no row of memory waits for a spare one ({_total(cards, 'rows_replaced')} were replaced for errors)"
        ),
        Bound(
            "rows_failed",
            "has a bad row of memory and no spare one for it: remapping failed ({uuid})",
            "drain this node for good: replace the card",
            measured="failed",
        ),
        Bound(
            "rows_pending",
            "has a bad row of memory whose remapping waits for a reset ({rows_replaced} so far, {uuid})",
            _RESET,
            measured="pending",
        ),
    ),
    _row(
        lambda subject: _at_rest("retired_pending", (gpu for gpu in gpus(subject) if not _has_rows(gpu))),
        "no page of memory waits for its retirement",
        Bound(
            "retired_pending",
            "has a bad page of memory whose retirement waits for a reset ({uuid})",
            _RESET,
            measured="pending",
        ),
    ),
)
PERSISTENCE = _table(
    "gpu-persistence",
    "The driver stays loaded (persistence mode): without it starts take seconds more, and counters are lost.",
    _row(
        lambda subject: _at_rest("persistence", gpus(subject)),
        "the driver stays loaded (persistence mode)",
        Bound(
            "persistence",
            "is not in persistence mode",
            "run nvidia-persistenced on that machine; starts are slower without it",
            bound=1,
            is_beyond=operator.lt,
            status=Status.WARN,
            is_told=False,
        ),
    ),
)
MEMORY = _table(
    "gpu-memory",
    "GPU memory is free: somebody who died a moment ago may hold it for a while, others for ever.",
    _row(
        _settled,
        _most_used,
        Bound(
            "memory_used",
            "has {used} of its {total} in use before the job starts",
            "see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod",
            bound=MOST_HELD_BYTES,
            unit="bytes",
        ),
    ),
    limit_s=lambda subject: _FACTS_LIMIT_S + SETTLE_S + FACTS_S,
)
TEMPERATURE = _table(
    "gpu-temperature",
    "Under load each GPU stays clear of the temperature at which it slows itself down.",
    _row(
        _margins,
        _coolest,
        Bound(
            "margin_c",
            "is {margin_c:g} \u00b0C {when} from the temperature at which it slows down",
            "see the cooling of that machine",
            bound=_NEAR_C,
            is_beyond=operator.lt,
            status=Status.WARN,
            unit="\u00b0C",
        ),
    ),
    needs=Needs.LOAD,
    limit_s=load_limit_s,
)
PCIE = _table(
    "gpu-pcie",
    "The way from the processor to each GPU is as wide and as fast under load as card and slot allow.",
    _row(
        _under_load,
        "PCIe as wide and as fast as it can be",
        Bound(
            "pcie_width",
            "has {pcie_width:g} of {pcie_width_max:g} PCIe lanes under load",
            "drain this node: have the card, its slot and its riser seen to",
            bound="pcie_width_max",
            is_beyond=_is_less,
            unit="lanes",
        ),
        Bound(
            "pcie_gen",
            "is at PCIe generation {pcie_gen:g} under load, and could be at {pcie_gen_max:g}",
            "see the BIOS of that machine, and the card's slot",
            bound="pcie_gen_max",
            is_beyond=_is_less,
            status=Status.WARN,
        ),
        Bound(
            "pcie_replays",
            "had to send {pcie_replays:g} PCIe packets again during our tests",
            bound=_MANY_REPLAYS,
            status=Status.WARN,
            unit="replays",
        ),
    ),
    needs=Needs.LOAD,
    limit_s=load_limit_s,
)


# -- what is more than a bound ----------------------------------------------------------------


@check("gpu-count", Where.GPU, limit_s=facts_limit_s)
def gpu_count(subject: Subject) -> Iterator[Finding]:
    """All GPUs are there, the same number by /dev, by the driver and by what the workers need."""
    if subject.host.gpus.count == 0:
        yield _none(subject)
    elif subject.cards is None:
        yield gpu_count.skipped(f"{subject.host.gpus.reason}: only NVIDIA's GPUs are checked")
    else:
        are_parts = "MIG-" in (subject.cards.shown or "")  # of which one card may have several
        seen = subject.host.gpus.count if are_parts else len(subject.cards.gpus)
        yield _counted(subject, subject.cards.facts(), seen)


def _none(subject: Subject) -> Finding:
    """This line stands for all checks of GPUs."""
    if not subject.may_use_gpus:
        return gpu_count.skipped("no GPU here: GPU checks are skipped")
    return gpu_count.skipped(
        "this container was given no GPU, though the job may have some: GPU checks are skipped",
        action="request the GPUs for the init container as well (resources.limits); the pod is given them once",
    )


def _counted(subject: Subject, facts: Facts, seen: int) -> Finding:
    host, workers = subject.host.gpus, subject.topology.local_world_size
    there = counted(host.count, "GPU")

    def failed(fault: Fault, text: str, measured: int, expected: int, action: str) -> Finding:
        more = {"measured": measured, "expected": expected, "unit": "GPUs", "action": action}
        return gpu_count.failed(fault, text, **more)

    if facts.trouble.startswith(STUCK):
        return failed(Fault.NODE, f"{host.reason}; {facts.trouble}", 0, host.count, DRAIN)
    if facts.trouble:
        action = "pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else ""
        text = f"{there} ({host.reason}), but their state is unknown: {facts.trouble}"
        return gpu_count.unknown(text, action=action)
    if seen < host.count:
        text = f"the driver shows {seen} of {there} ({host.reason})"
        action = "report this node: a card may have fallen off its bus"
        return failed(Fault.NODE, text, seen, host.count, action)
    if workers is not None and workers > seen and subject.is_torch:
        text = f"{counted(workers, 'worker')} on this node, and {counted(seen, 'GPU')} ({host.reason})"
        action = "request a GPU for each worker, or set nproc_per_node to them"
        return failed(Fault.JOB, text, seen, workers, action)
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model}))
    text = f"{counted(seen, 'GPU')}: {models or 'of unknown model'}, driver {facts.driver or 'of unknown version'}"
    if workers is not None and workers < seen and subject.is_torch:
        text += f"; {seen - workers} of them will be idle, with {counted(workers, 'worker')}"
        return gpu_count.warned(text, measured=workers, expected=seen, unit="GPUs")
    return gpu_count.passed(text, measured=seen, unit="GPUs")


@check("gpu-mig", Where.GPU, limit_s=facts_limit_s)
def gpu_mig(subject: Subject) -> Iterator[Finding]:
    """No GPU is cut into parts (MIG), one of which serves one process, and none together with other GPUs.

    MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere.
    """
    found, workers = gpus(subject), subject.workers
    shown = " ".join(subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    wished = "MIG-" in shown
    text = f"is in MIG mode, in which {workers} workers of one job cannot work together"
    action = "request whole GPUs" if wished else "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"
    bad = [
        Trouble(gpu=gpu.index, text=text, measured=True, expected=False, action=action)
        for gpu in found
        if gpu.value("mig") and not (wished and workers == 1)
    ]
    asked = [(gpu.index, gpu.fact("mig")) for gpu in found]
    yield from summed(gpu_mig.id, asked, bad, "whole", Fault.JOB if wished else Fault.NODE)
