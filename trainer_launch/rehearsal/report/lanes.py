"""What each pod did all the time, as one lane of segments. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainer_launch.rehearsal.report.history import Chronicle, Happening, What

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of time in which a pod did one thing."""

    begin_s: float
    end_s: float
    doing: Doing
    life: int  # of the pod, from 1; 0 before the first
    attempt: int  # how often its workers have begun, from 1; 0 before


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """All that one pod did."""

    pod: str
    segments: tuple[Segment, ...]
    lives: int
    attempts: int
    code: int | None = None  # of the container that ended last, init containers aside


def lanes(chronicle: Chronicle) -> tuple[Lane, ...]:
    """One lane for each pod, those that came later (`add node`) last; empty segments are left out."""
    end_s = end_of(chronicle)
    walks = {pod: Walk() for pod in chronicle.pods}
    for happening in chronicle.happenings:
        if happening.pod is not None:
            walks.setdefault(happening.pod, Walk(since_s=happening.at_s)).take(happening)
        elif happening.what is What.CONDITION:
            for walk in walks.values():
                walk.end(happening.at_s)
    return tuple(walk.lane(pod, end_s) for pod, walk in walks.items())


def end_of(chronicle: Chronicle) -> float:
    """When the rehearsal ended, or as far as is known of one that runs."""
    last_s = max((one.at_s for one in chronicle.happenings), default=0.0)
    return last_s if chronicle.ended_s is None else max(last_s, chronicle.ended_s)


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


@dataclass
class Walk:
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

    def take(self, one: Happening) -> None:
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

    def _started(self, one: Happening) -> None:
        is_init = one.text == INIT
        is_main = not is_init and False not in self.running.values()
        self.running[one.container] = is_init
        self.stopping.discard(one.container)
        if is_main:
            self.met = False
        self.turn(one.at_s, self._now(), begins=is_main)

    def _ended(self, one: Happening) -> None:
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
        return Segment(begin_s=self.since_s, end_s=end_s, doing=self.doing, life=self.life, attempt=self.attempt)


def lane_of(pod: str, all_lanes: Sequence[Lane]) -> Lane | None:
    """The lane of a pod."""
    return next((one for one in all_lanes if one.pod == pod), None)
