"""What happened in a rehearsal, in its order, and what each pod did all the time. Pure.

The report and the verdict are made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec import Struct, field
from msgspec.structs import replace


class What(str, Enum):
    """What can happen."""

    POD_STARTED = "pod started"  # a life of a pod begins; `attempt` counts its lives from 1
    POD_ENDED = "pod ended"  # `text` is its phase, such as Succeeded, Failed, Gone, Pending
    # `attempt` counts the starts of this container in this life from 1; `text` is "init" for one that ends first
    CONTAINER_STARTED = "container started"
    CONTAINER_ENDED = "container ended"  # `code` is its exit code
    STOP_ASKED = "stop asked"  # SIGTERM to a container; `text` says by whom: "fault", "controller" or "user"
    GENERATION = "generation"  # the pod's workers have met (again); `attempt` counts from 1
    STEP = "step"  # training has reached `step`; `text` is the line that says so, empty when the pod reports it
    PHASE = "phase"  # `text` is what the pod's launcher does from now on, as in its goodput ledger
    CHECKPOINT = "checkpoint"  # a checkpoint has taken `took_s`, as reported
    FAULT = "fault"  # `text` is the fault as it was written; `pod` None: of all
    FAULT_OVER = "fault over"  # one that lasts has ended, same `text`
    FAULT_MISSED = "fault missed"  # it could not be carried out when its time came, or its time never came
    CONDITION = "condition"  # the job has ended; `text` says how, `code` is the rehearsal's exit code


class Entry(Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at_s: float  # seconds since the rehearsal began
    what: What
    pod: str | None = None
    container: str | None = None
    attempt: int | None = None
    step: int | None = None
    code: int | None = None
    took_s: float | None = None
    text: str = ""


class History(Struct, frozen=True, kw_only=True):
    """A whole rehearsal; `ended_s` is None while it runs."""

    kind: str  # of the job, such as TrainJob
    name: str
    pods: tuple[str, ...]  # in the order people expect them: node 0 first
    entries: tuple[Entry, ...] = ()
    ended_s: float | None = None
    succeeded: bool | None = None
    seen: Mapping[str, str] | None = None  # the last line that each pod said
    words: Mapping[str, str] | None = None  # the first line of the termination message that each pod left


# -- what each pod did all the time, as one lane of segments -----------------------------------


INIT = "init"  # what the start of an init container says of itself
SUCCEEDED = "Succeeded"


class Doing(str, Enum):
    """What a pod is seen doing."""

    WAITING = "waiting"  # nothing of it runs yet
    INIT = "init"
    RUNNING = "running"
    STOPPING = "stopping"  # asked to end
    DOWN = "down"  # what ran has ended, and is to come again
    OVER = "over"  # as DOWN, for good: no part of a lane


class Segment(Struct, frozen=True, kw_only=True):
    """A stretch of time in which a pod did one thing."""

    begin_s: float
    end_s: float
    doing: Doing
    attempt: int  # how often its workers have begun, from 1; 0 before


class Lane(Struct, frozen=True, kw_only=True):
    """All that one pod did."""

    pod: str
    segments: tuple[Segment, ...]
    lives: int
    attempts: int
    code: int | None = None  # of the container that ended last, init containers aside


def lanes(history: History) -> tuple[Lane, ...]:
    """One lane for each pod, those that came later (`add node`) last; empty segments are left out."""
    end_s = end_of(history)
    walks = {pod: Walk() for pod in history.pods}
    for entry in history.entries:
        if entry.pod is not None:
            walks.setdefault(entry.pod, Walk(since_s=entry.at_s)).take(entry)
        elif entry.what is What.CONDITION:
            for walk in walks.values():
                walk.end(entry.at_s)
    return tuple(walk.lane(pod, end_s) for pod, walk in walks.items())


def end_of(history: History) -> float:
    """When the rehearsal ended, or as far as is known of one that runs."""
    last_s = max((one.at_s for one in history.entries), default=0.0)
    return last_s if history.ended_s is None else max(last_s, history.ended_s)


def away_s(lane: Lane, span: tuple[float, float], end_s: float) -> float:
    """For how long a pod was away, not running, from a first moment within the span until it ran again."""
    gone_s = None
    for segment in lane.segments:
        if segment.end_s <= span[0] or (gone_s is None and segment.begin_s >= span[1]):
            continue
        if segment.doing in (Doing.RUNNING, Doing.STOPPING):
            if gone_s is not None:
                return segment.begin_s - gone_s
        elif gone_s is None:
            gone_s = max(segment.begin_s, span[0])
    return 0.0 if gone_s is None else max(0.0, end_s - gone_s)


class Walk(Struct):
    """One pod followed through what happens to it: what it does now, and in `done` what it did before."""

    since_s: float = 0.0
    doing: Doing = Doing.WAITING
    life: int = 0
    attempt: int = 0
    code: int | None = None
    met: bool = False  # whether the workers of this start of the container have met
    ended: bool = False  # the job
    running: dict[str | None, bool] = field(default_factory=dict)  # by container: whether it is an init container
    stopping: set[str | None] = field(default_factory=set)
    done: list[Segment] = field(default_factory=list)

    def take(self, one: Entry) -> None:
        """One thing that happened to the pod."""
        if one.what is What.POD_STARTED:
            self.turn(one.at_s, Doing.WAITING)
            self.life = one.attempt or self.life + 1
            self.running.clear()
            self.stopping.clear()
        elif one.what is What.POD_ENDED:
            self.running.clear()
            is_over = self.ended or one.text == SUCCEEDED
            self.turn(one.at_s, Doing.OVER if is_over else Doing.DOWN)
        elif one.what is What.CONTAINER_STARTED:
            self._started(one)
        elif one.what is What.GENERATION:
            if self.met:
                self.turn(one.at_s, self.doing, begins=True)
            self.met = True
        elif one.what is What.STOP_ASKED:
            self.stopping.add(one.container)
            self.turn(one.at_s, self._now())
        elif one.what is What.CONTAINER_ENDED:
            self._ended(one)

    def end(self, at_s: float) -> None:
        """The job has ended: who is down will not come again."""
        self.ended = True
        if self.doing in (Doing.DOWN, Doing.WAITING):
            self.turn(at_s, Doing.OVER)

    def turn(self, at_s: float, doing: Doing, *, begins: bool = False) -> None:
        """From now on it does this; `begins`: its workers begin once more."""
        if doing is self.doing and not begins:
            return
        if at_s > self.since_s:
            self.done.append(self._segment(at_s))
        self.since_s, self.doing = at_s, doing
        self.attempt += begins

    def lane(self, pod: str, end_s: float) -> Lane:
        """All of it, up to the end."""
        last = [self._segment(end_s)] if end_s > self.since_s else []
        segments = tuple(one for one in (*self.done, *last) if one.doing is not Doing.OVER)
        return Lane(pod=pod, segments=segments, lives=self.life, attempts=self.attempt, code=self.code)

    def _started(self, one: Entry) -> None:
        is_init = one.text == INIT
        is_main = not is_init and False not in self.running.values()
        self.running[one.container] = is_init
        self.stopping.discard(one.container)
        if is_main:
            self.met = False
        self.turn(one.at_s, self._now(), begins=is_main)

    def _ended(self, one: Entry) -> None:
        is_init = self.running.pop(one.container, False)
        self.stopping.discard(one.container)
        if not is_init:
            self.code = one.code if one.code is not None else self.code
        nothing = Doing.WAITING if is_init and one.code == 0 else Doing.DOWN
        nothing = Doing.OVER if self.ended or (not is_init and one.code == 0) else nothing
        self.turn(one.at_s, self._now() if self.running else nothing)

    def _now(self) -> Doing:
        if not self.running:
            return self.doing
        if self.stopping & self.running.keys():
            return Doing.STOPPING
        return Doing.INIT if all(self.running.values()) else Doing.RUNNING

    def _segment(self, end_s: float) -> Segment:
        return Segment(begin_s=self.since_s, end_s=end_s, doing=self.doing, attempt=self.attempt)


# -- the history while the rehearsal runs ------------------------------------------------------


_LEAST_GAP_S = 0.05  # between two steps of a pod that are kept
_GAPS = 2_000  # and of a rehearsal's time: a long one keeps a few thousand of each pod


class Recorder:
    """What has happened so far."""

    def __init__(self, kind: str, name: str, pods: Iterable[str]) -> None:
        self._history = History(kind=kind, name=name, pods=tuple(pods))
        self._entries: list[Entry] = []
        self._held: dict[str, Entry] = {}  # by pod: its newest step, not kept yet
        self._kept: dict[str, Entry] = {}  # by pod: its last step that was

    def add(self, entry: Entry) -> None:
        """Take in what has happened; steps in their own way."""
        if entry.what is What.STEP and entry.pod is not None:
            self._step(entry.pod, entry)
            return
        for pod in list(self._held) if entry.pod is None else [entry.pod]:
            self._let_go(pod)
        if entry.what in (What.POD_STARTED, What.CONTAINER_STARTED, What.GENERATION) and entry.pod:
            self._kept.pop(entry.pod, None)  # the next step is the first of a beginning
        if entry.what is What.POD_STARTED and entry.pod not in self._history.pods:
            self._history = replace(self._history, pods=(*self._history.pods, entry.pod or ""))
        self._entries.append(entry)

    def finish(self, ended_s: float, *, succeeded: bool | None) -> None:
        """Nothing more comes; `succeeded` is None for a rehearsal that was stopped."""
        for pod in list(self._held):
            self._let_go(pod)
        self._history = replace(self._history, ended_s=ended_s, succeeded=succeeded)

    def history(self, seen: Mapping[str, str], words: Mapping[str, str]) -> History:
        """All of it, with the last line that each pod has said, and the termination message it has left."""
        ordered = tuple(sorted(self._entries, key=lambda one: one.at_s))  # reports are read a little later
        return replace(self._history, entries=ordered, seen=seen, words=words)

    def _step(self, pod: str, entry: Entry) -> None:
        last, held = self._kept.get(pod), self._held.get(pod)
        newest = held or last
        goes_back = newest is not None and (entry.step or 0) < (newest.step or 0)
        if goes_back:
            self._let_go(pod)
        gap_s = max(_LEAST_GAP_S, entry.at_s / _GAPS)
        if last is None or goes_back or entry.at_s - last.at_s >= gap_s:
            self._held.pop(pod, None)
            self._kept[pod] = entry
            self._entries.append(entry)
        elif newest is None or entry.step != newest.step:
            self._held[pod] = entry

    def _let_go(self, pod: str) -> None:
        entry = self._held.pop(pod, None)
        if entry is not None:
            self._kept[pod] = entry
            self._entries.append(entry)
