"""Where a job's wall time went: each second is of one kind. Pure.

A ledger is told what a node does (`enter`) and how far its workers are (`see`). While workers run, time is booked
up to their last sign of progress only: when a hang is noticed, what came after was spent on detecting it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.model.codec import Amount, Count, Real, Whole
from trainer_launch.model.units import duration
from trainer_launch.supervisor.run_observer import TimeKind

Seconds: TypeAlias = Annotated[Mapping[TimeKind, Amount], Meta(max_length=len(TimeKind))]
LONGEST_S = 1e9  # of a job; nobody is believed who tells of more
TRAINING = "training"  # the topic of what nodes tell each other of it
_IN_STEPS = TimeKind.TRAINING, TimeKind.REPEATING, TimeKind.CHECKPOINTING
UNSEEN_S = 600.0  # after which workers that show no step count as training


class Signs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The progress that the workers of a generation have shown so far; times are monotonic."""

    first_s: Real
    last_s: Real
    first_step: Whole | None = None
    step: Whole | None = None  # None: there is progress, but nobody tells steps
    saved_s: Real = 0.0  # in checkpoints that are done
    is_saving: bool = False  # since the last sign


class LedgerSummary(Struct, frozen=True, forbid_unknown_fields=True):
    """A ledger as another node takes it over."""

    spent_s: Seconds
    step: Count | None = None  # the highest so far


class Ledger(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ledger of a node; `at_s` is the monotonic second until which all is booked, `kind` the work since."""

    at_s: Real
    kind: TimeKind = TimeKind.STARTING  # TRAINING: workers run, whatever they do
    since_s: Real = 0.0  # when that began
    spent_s: Mapping[TimeKind, Real] = field(default_factory=lambda: MappingProxyType({}))
    unseen_s: Real = 0.0  # workers ran and showed nothing: training, if no step is ever seen
    top: Count | None = None  # the highest step of earlier generations
    has_trained: bool = False
    signs: Signs | None = None  # of the present workers
    is_behind: bool = False  # they have not reached `top` again
    keeps_state: bool = False  # ranks of the last generation go on with their state: no step is repeated
    is_suspect: bool = False  # a hang is suspected since their last sign


def enter(ledger: Ledger, kind: TimeKind, at_s: float, since_s: float | None = None) -> Ledger:
    """From now on the node does this; what ended the workers' training may have gone unnoticed since `since_s`."""
    at_s = max(at_s, ledger.at_s)
    if kind is ledger.kind:
        return ledger
    if since_s is not None and ledger.kind is TimeKind.TRAINING:
        ledger = _book(_close(ledger, min(at_s, max(since_s, ledger.at_s))), TimeKind.DETECTING, at_s)
    ledger = _close(ledger, at_s)
    signs, step, keeps_state = ledger.signs, _step(ledger), ledger.keeps_state
    if kind not in (TimeKind.WAITING, TimeKind.TRAINING):  # before and while workers run
        keeps_state = kind is TimeKind.REPLACING
    return replace(
        ledger,
        kind=kind,
        since_s=at_s,
        top=step,
        has_trained=ledger.has_trained or signs is not None,
        signs=None,
        is_behind=kind is TimeKind.TRAINING and step is not None and not keeps_state,
        keeps_state=keeps_state,
        is_suspect=False,
    )


def see(ledger: Ledger, signs: Signs | None, at_s: float) -> Ledger:
    """Take in what the workers have shown; None: nothing yet."""
    before = ledger.signs
    if ledger.kind is not TimeKind.TRAINING or signs is None or signs.last_s <= ledger.at_s:
        return ledger
    if before is None:
        ledger = _book(ledger, _until_first(ledger), min(signs.first_s, signs.last_s))
    elif before.step is not None and signs.step is not None and signs.step < before.step:
        ledger = replace(ledger, is_behind=False)  # steps are counted anew each epoch: none proves a repetition
    begun = ledger
    last_s = min(signs.last_s, max(at_s, ledger.at_s))
    if ledger.is_behind:
        caught_s = _caught_up_s(ledger, signs)
        ledger = _book(ledger, TimeKind.REPEATING, last_s if caught_s is None else min(caught_s, last_s))
        ledger = replace(ledger, is_behind=caught_s is None)
    ledger = _book(ledger, TimeKind.TRAINING, last_s)
    saved_s = signs.saved_s - (0.0 if before is None else before.saved_s)
    spent_s = _moved(begun.spent_s, ledger.spent_s, saved_s)
    return replace(ledger, signs=signs, is_suspect=False, spent_s=spent_s)


def suspect(ledger: Ledger) -> Ledger:
    """A hang is suspected: what has passed since the last sign was not training, unless there is another one."""
    return replace(ledger, is_suspect=_runs(ledger))


def reached(ledger: Ledger, step: int | None) -> Ledger:
    """Workers that have ended had reached this step."""
    return replace(ledger, top=max((each for each in (ledger.top, step) if each is not None), default=None))


def adopt(ledger: Ledger, others: LedgerSummary, at_s: float) -> Ledger:
    """Go on, on a node that is new to the job, with what others know of it, if that is more."""
    ledger = reached(ledger, others.step)
    if sum(others.spent_s.values()) <= sum(totals(ledger, at_s).values()):
        return ledger
    has_trained = ledger.has_trained or others.step is not None or TimeKind.TRAINING in others.spent_s
    return replace(ledger, at_s=at_s, spent_s=others.spent_s, unseen_s=0.0, has_trained=has_trained)


def totals(ledger: Ledger, at_s: float, *, has_succeeded: bool = False) -> dict[TimeKind, float]:
    """Seconds of each kind up to now; their sum is the wall time. Who has succeeded has trained, seen or not."""
    ledger = _close(ledger, max(at_s, ledger.at_s))
    return _resolved(ledger, has_succeeded=has_succeeded)


def certain(ledger: Ledger, at_s: float) -> dict[TimeKind, float]:
    """The same without what the next sign of progress decides: these seconds never become fewer of a kind."""
    is_open = ledger.kind is TimeKind.TRAINING and (ledger.has_trained or ledger.signs is not None)
    return _resolved(ledger) if is_open else totals(ledger, at_s)


def summary(ledger: Ledger, at_s: float) -> LedgerSummary:
    """The ledger as another node may go on with it."""
    return LedgerSummary(totals(ledger, at_s), _step(ledger))


def read(names: Mapping[str, float]) -> dict[TimeKind, float]:
    """Seconds by the names of their kinds."""
    return {TimeKind(name): spent_s for name, spent_s in names.items()}


def ratio(seconds: Mapping[TimeKind, float]) -> float:
    """The goodput: the share of the wall time that was spent on steps that were kept."""
    whole_s = sum(seconds.values())
    return seconds.get(TimeKind.TRAINING, 0.0) / whole_s if whole_s > 0 else 0.0


def sentence(seconds: Mapping[TimeKind, float]) -> str:
    """For people: 93.1 % of 2 h 5 min, where a step was seen; then what took how long, the longest first."""
    parts = sorted(((spent_s, kind) for kind, spent_s in seconds.items() if spent_s >= 0.05), reverse=True)
    spent = ", ".join(f"{kind.words} {time_words(spent_s)}" for spent_s, kind in parts)
    whole = time_words(sum(seconds.values()))
    if not any(seconds.get(kind) for kind in _IN_STEPS):
        return f"no step was seen in {whole}" + (f": {spent}" if spent else "")
    return f"{100 * ratio(seconds):.1f} % of {whole}: {spent}"


def time_words(seconds: float) -> str:
    """A time in words: 4.2 s, 3 min 20 s."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


class TrainingStatus(Struct, frozen=True, kw_only=True):
    """The job's training, as the node that hosts the coordinator sees it."""

    progress: Amount | None = None  # of rank 0
    progress_age_s: Amount | None = None
    goodput: Seconds | None = None  # since the job's oldest launcher started


def _runs(ledger: Ledger) -> bool:
    """Whether workers run that have shown something."""
    return ledger.kind is TimeKind.TRAINING and ledger.signs is not None


def _step(ledger: Ledger) -> int | None:
    now = None if ledger.signs is None else ledger.signs.step
    return max((step for step in (ledger.top, now) if step is not None), default=None)


def _until_first(ledger: Ledger) -> TimeKind:
    if not ledger.has_trained:
        return TimeKind.STARTING
    return TimeKind.REPLACING if ledger.keeps_state else TimeKind.RESTARTING


def _tail(ledger: Ledger) -> TimeKind:
    """The kind of the time since the last booking, as far as is clear now."""
    if not _runs(ledger) or ledger.signs is None:
        return ledger.kind
    if ledger.is_suspect:
        return TimeKind.DETECTING
    if ledger.signs.is_saving:
        return TimeKind.CHECKPOINTING
    return TimeKind.REPEATING if ledger.is_behind else TimeKind.TRAINING


def _close(ledger: Ledger, at_s: float) -> Ledger:
    if ledger.kind is TimeKind.TRAINING and ledger.signs is None and not ledger.has_trained:
        return replace(ledger, at_s=at_s, unseen_s=ledger.unseen_s + at_s - ledger.at_s)
    is_before_first = ledger.kind is TimeKind.TRAINING and ledger.signs is None
    return _book(ledger, _until_first(ledger) if is_before_first else _tail(ledger), at_s)


def _book(ledger: Ledger, kind: TimeKind, until_s: float) -> Ledger:
    more_s = until_s - ledger.at_s
    if more_s <= 0:
        return ledger
    seconds = {**ledger.spent_s, kind: ledger.spent_s.get(kind, 0.0) + more_s}
    return replace(ledger, at_s=until_s, spent_s=seconds)


def _moved(
    before: Mapping[TimeKind, float], now: Mapping[TimeKind, float], saved_s: float
) -> Mapping[TimeKind, float]:
    """The booked seconds, with so much of the new ones in checkpoints instead of steps."""
    moved = dict(now)
    for kind in (TimeKind.TRAINING, TimeKind.REPEATING):
        part_s = min(saved_s, now.get(kind, 0.0) - before.get(kind, 0.0))
        if part_s > 0:
            moved[kind] -= part_s
            moved[TimeKind.CHECKPOINTING] = moved.get(TimeKind.CHECKPOINTING, 0.0) + part_s
            saved_s -= part_s
    return moved


def _caught_up_s(ledger: Ledger, signs: Signs) -> float | None:
    """When the step was reached that earlier workers had reached; steps in between come at an even pace."""
    top, before = ledger.top, ledger.signs
    if top is None or signs.step is None:
        return ledger.at_s
    if signs.step < top:
        return None
    step, at_s = signs.first_step, signs.first_s
    if before is not None and before.step is not None:
        step, at_s = before.step, before.last_s
    if step is None or step >= top or signs.step <= step:
        return at_s if step is not None and step >= top else signs.last_s
    return at_s + (signs.last_s - at_s) * (top - step) / (signs.step - step)


def _resolved(ledger: Ledger, *, has_succeeded: bool = False) -> dict[TimeKind, float]:
    """With what nobody saw: the start-up of a job that shows steps, or training of one that never does."""
    if not ledger.unseen_s:
        return dict(ledger.spent_s)
    shows = ledger.has_trained or ledger.signs is not None
    kind = TimeKind.TRAINING if not shows and (has_succeeded or ledger.unseen_s >= UNSEEN_S) else TimeKind.STARTING
    return {**ledger.spent_s, kind: ledger.spent_s.get(kind, 0.0) + ledger.unseen_s}
