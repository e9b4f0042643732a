"""What a rehearsed job's wall time was spent on: one goodput ledger made of its pods' phases and steps. Pure.

Who waits for a pod that was killed has the job's phase, not the new pod. Steps are as exact as the pods say them,
and the time of a fault is known: until somebody reacts to it, it was being detected.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import goodput
from trainer_launch.model.goodput import Kind, Ledger, Signs
from trainer_launch.rehearsal.report.history import INIT, Entry, History, What, end_of

# Of what is booked at once, in its order.
_ORDER = (
    *(Kind.PREFLIGHT, Kind.STARTING, Kind.WAITING, Kind.MEETING, Kind.STOPPING, Kind.RESTARTING),
    *(Kind.REPEATING, Kind.CHECKPOINTING, Kind.TRAINING, Kind.DETECTING, Kind.ENDING),
)
_KINDS = {kind.value: kind for kind in Kind}
_FOR_PEOPLE_S = 0.05  # less is not told


class Span(Struct, frozen=True, kw_only=True):
    """A stretch of the job's time."""

    begin_s: float
    end_s: float
    kind: Kind


def spans(history: History) -> tuple[Span, ...]:
    """All of the rehearsal, without a gap; none where no launcher has told its phases."""
    if all(one.what is not What.PHASE for one in history.entries):
        return ()
    books = _Books(history.pods)
    for entry in history.entries:
        books.take(entry)
    books.close(end_of(history))
    unseen = Kind.TRAINING if history.succeeded and not books.ledger.has_trained else Kind.STARTING
    return tuple(Span(begin_s=begin_s, end_s=end_s, kind=kind or unseen) for begin_s, end_s, kind in books.spans)


def spent(found: Sequence[Span], begin_s: float = 0.0, end_s: float = float("inf")) -> dict[Kind, float]:
    """Seconds by kind between two moments."""
    by_kind: dict[Kind, float] = {}
    for one in found:
        within_s = min(one.end_s, end_s) - max(one.begin_s, begin_s)
        if within_s > 0:
            by_kind[one.kind] = by_kind.get(one.kind, 0.0) + within_s
    return by_kind


def lost(found: Sequence[Span], begin_s: float, end_s: float) -> str:
    """What the time between two moments went into that was no training, for people; "": nothing worth telling."""
    seconds = spent(found, begin_s, end_s)
    parts = [(kind, one_s) for kind in _ORDER if (one_s := seconds.get(kind, 0.0)) >= _FOR_PEOPLE_S]
    kept = [f"{kind.words} {goodput.time_words(one_s)}" for kind, one_s in parts if kind is not Kind.TRAINING]
    return ", ".join(kept)


class _Books:
    def __init__(self, pods: Sequence[str]) -> None:
        self.ledger = goodput.begin(0.0)
        self.spans: list[tuple[float, float, Kind | None]] = []  # None: workers ran and showed nothing
        self._order = {pod: number for number, pod in enumerate(pods)}
        self._phases: dict[str, Kind] = {}  # of pods whose container runs
        self._veterans: set[str] = set()  # whose workers have run before
        self._speaker: str | None = None  # of the pods whose steps count the first that says one
        self._saved_s = 0.0  # by the present workers
        self._fault_s: float | None = None
        self._is_over = False

    def take(self, one: Entry) -> None:
        """One thing that happened."""
        if one.what is What.FAULT:
            self._fault_s = one.at_s
        elif one.what is What.CONDITION:
            self._is_over = True
        elif one.pod is None:
            return
        elif one.what in (What.STEP, What.CHECKPOINT):
            self._sign(one, one.pod)
        else:
            self._note(one, one.pod)
        self._enter(self._kind(), one.at_s)

    def close(self, at_s: float) -> None:
        """Nothing more happens."""
        self._enter(Kind.ENDING if self.ledger.kind is not Kind.ENDING else Kind.STOPPING, at_s)

    def _note(self, one: Entry, pod: str) -> None:
        if one.what is What.CONTAINER_STARTED:
            self._phases[pod] = Kind.PREFLIGHT if one.text == INIT else Kind.STARTING
        elif one.what is What.PHASE:
            self._phases[pod] = _KINDS.get(one.text, Kind.STARTING)
            if self._phases[pod] is Kind.TRAINING:
                self._veterans.add(pod)
        elif one.what in (What.CONTAINER_ENDED, What.POD_ENDED):
            self._phases.pop(pod, None)
            self._veterans.discard(pod)

    def _kind(self) -> Kind:
        """The job's: that of the first pod that was in it before, else of the first pod."""
        running = [pod for pod, kind in self._phases.items() if kind is not Kind.ENDING]
        last = len(self._order)
        lead = min(running, key=lambda pod: (pod not in self._veterans, self._order.get(pod, last)), default=None)
        if self._is_over or (lead is None and self._phases):
            return Kind.ENDING
        if lead is None:
            return Kind.WAITING if self.ledger.has_trained else Kind.STARTING
        kind = self._phases[lead]
        return Kind.RESTARTING if kind is Kind.STARTING and self.ledger.has_trained else kind

    def _enter(self, kind: Kind, at_s: float) -> None:
        if kind is self.ledger.kind:
            return
        is_hit = self._fault_s is not None and self._fault_s >= self.ledger.since_s and kind is not Kind.ENDING
        self._book(goodput.enter(self.ledger, kind, at_s, self._fault_s if is_hit else None))
        self._speaker, self._saved_s = None, 0.0

    def _sign(self, one: Entry, pod: str) -> None:
        if self.ledger.kind is not Kind.TRAINING or (one.step is not None and self._speaker not in (None, pod)):
            return
        before = self.ledger.signs or Signs(first_s=one.at_s, last_s=one.at_s, first_step=one.step)
        if one.step is not None:
            self._speaker = pod
        step = before.step if one.step is None else one.step
        self._saved_s += one.took_s or 0.0
        signs = replace(before, last_s=one.at_s, step=step, saved_s=self._saved_s)
        self._book(goodput.see(self.ledger, signs, one.at_s))

    def _book(self, ledger: Ledger) -> None:
        for kind in (None, *_ORDER):
            more_s = _booked(ledger, kind) - _booked(self.ledger, kind)
            if more_s > 0:
                self._add(kind, more_s)
        self.ledger = ledger

    def _add(self, kind: Kind | None, more_s: float) -> None:
        begin_s, at_s, before = self.spans[-1] if self.spans else (0.0, 0.0, kind)
        if self.spans and before is kind:
            self.spans[-1] = begin_s, at_s + more_s, kind
        else:
            self.spans.append((at_s, at_s + more_s, kind))


def _booked(ledger: Ledger, kind: Kind | None) -> float:
    """None: workers ran and showed nothing."""
    return ledger.unseen_s if kind is None else ledger.spent_s.get(kind, 0.0)
