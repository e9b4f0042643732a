"""What each fault cost: time without a new step, and steps done twice; and a rehearsal as a whole. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.units import grouped
from trainer_launch.rehearsal.report.history import INIT, Entry, History, Lane, What, away_s, end_of, lanes
from trainer_launch.rehearsal.report.wall_time import Span, spans


class Cost(Struct, frozen=True, kw_only=True):
    """One fault, and what came of it."""

    fault: Entry
    number: int  # from 1, in order of time; 0 for one that was missed
    over_s: float | None = None  # when one that lasts was over
    is_open: bool = False  # there was no new step any more, and the job did not succeed
    reached: int | None = None  # the job's highest step when training stood still
    resumed: int | None = None  # the last step that needed not be done again, where workers began again
    stands_s: float | None = None  # from when on there was no new step
    goes_on_s: float | None = None  # when there was one again
    downtime_s: float | None = None  # None: there are no steps to tell by
    lost: int | None = None
    away_s: float | None = None  # for how long the pod that it was aimed at did not run

    @property
    def is_missed(self) -> bool:
        """Whether it was not carried out."""
        return self.fault.what is What.FAULT_MISSED


class Totals(Struct, frozen=True, kw_only=True):
    """The same for the whole rehearsal."""

    took_s: float
    faults: int
    missed: int
    attempts: int  # how often the workers began, of the pod where it was most often
    top: int | None  # the highest step
    downtime_s: float | None
    lost: int | None


class Stretch(Struct, frozen=True, kw_only=True):
    """The job's steps in one of its attempts: the highest of all pods, over time."""

    attempt: int
    points: tuple[tuple[float, int], ...]


def costs(
    history: History, lanes: Sequence[Lane], reached: Sequence[Reached], resumed: Sequence[Resume]
) -> tuple[Cost, ...]:
    """One for each fault, in order of time, those that were missed among them."""
    found, number = [], 0
    overs = [one for one in history.entries if one.what is What.FAULT_OVER]
    stretches, end_s = curve(reached, resumed), _end_of_job_s(history)
    times = [one.at_s for one in history.entries if one.what is What.FAULT]
    for fault in history.entries:
        if fault.what is What.FAULT_MISSED:
            found.append(Cost(fault=fault, number=0))
        if fault.what is not What.FAULT:
            continue
        number += 1
        is_its = [(one.text, one.pod) == (fault.text, fault.pod) and one.at_s >= fault.at_s for one in overs]
        over_s = next((one.at_s for one, its in zip(overs, is_its, strict=True) if its), None)
        lane = next((one for one in lanes if one.pod == fault.pod), None)
        span = (fault.at_s, next((at_s for at_s in times if at_s > fault.at_s), float("inf")))
        away = None if lane is None else away_s(lane, span, end_s)
        cost = Cost(fault=fault, number=number, over_s=over_s, away_s=away)
        found.append(_standstill(cost, history, [one for one in resumed if one.fault is fault], stretches))
    return tuple(found)


def totals(history: History, lanes: Sequence[Lane], found: Sequence[Cost], resumed: Sequence[Resume]) -> Totals:
    """Sums; time that two faults share counts once, and so do steps that several pods do twice together."""
    spans = [
        (one.stands_s, one.goes_on_s) for one in found if one.stands_s is not None and one.goes_on_s is not None
    ]
    down_s, until_s = 0.0, 0.0
    for begin_s, end_s in sorted(spans):
        down_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    top = max((one.step for one in history.entries if one.what is What.STEP and one.step is not None), default=None)
    return Totals(
        took_s=end_of(history),
        faults=sum(not one.is_missed for one in found),
        missed=sum(one.is_missed for one in found),
        attempts=max((lane.attempts for lane in lanes), default=0),
        top=top,
        downtime_s=None if top is None else down_s,
        lost=None if top is None else sum(max(one.lost for one in group) for group in _together(resumed)),
    )


def curve(reached: Sequence[Reached], resumed: Sequence[Resume]) -> tuple[Stretch, ...]:
    """The job's steps over time; a new stretch wherever the job, not only a pod of it, began again."""
    again = {(one.pod, one.at_s) for one in resumed if not one.is_apart}
    stretches: list[list[tuple[float, int]]] = [[]]
    joined: set[str] = set()  # pods that have begun in this attempt: the first begins it, the others follow
    for one in reached:
        if (one.pod, one.at_s) in again and one.is_again and one.pod in joined:
            stretches.append([])
            joined.clear()
        joined.add(one.pod)
        if not stretches[-1] or one.step > stretches[-1][-1][1]:
            stretches[-1].append((one.at_s, one.step))
    return tuple(
        Stretch(attempt=number, points=tuple(points)) for number, points in enumerate(stretches, 1) if points
    )


_LATE_STEPS = 2  # steps that workers still print after a fault has stopped them


def _standstill(cost: Cost, history: History, mine: Sequence[Resume], stretches: Sequence[Stretch]) -> Cost:
    """With its time without a new step, counted from the last one that still came to the first beyond it."""
    fault, over_s = cost.fault, cost.over_s
    points = [point for stretch in stretches for point in stretch.points]
    if not points:
        return cost
    job = [one for one in mine if not one.is_apart]
    turn_s = min((one.at_s for one in job), default=None)  # when training went on, though it may repeat steps
    late = sum(at_s > fault.at_s for at_s, _ in points)
    if turn_s is None and not history.succeeded and late <= _LATE_STEPS:
        turn_s = _end_of_job_s(history)  # training never went on
    before = _before(stretches, fault.at_s, turn_s)
    reached = before[-1][1] if before else None
    worst = max(job, key=lambda one: one.lost, default=None)
    if turn_s is None:
        stands_s, goes_on_s = _widest(points, fault.at_s, fault.at_s if over_s is None else over_s)
    else:
        stands_s = max(fault.at_s, before[-1][0]) if before else fault.at_s
        goes_on_s = next((at_s for at_s, step in points if at_s >= turn_s and step > (reached or -1)), None)
        if goes_on_s is None and history.succeeded:  # it had no further step to do
            goes_on_s = next((at_s for at_s, step in points if at_s >= turn_s and step == reached), turn_s)
    is_open = goes_on_s is None and not history.succeeded
    if goes_on_s is None:
        goes_on_s = max(stands_s, _end_of_job_s(history)) if is_open else stands_s
    return replace(
        cost,
        reached=reached,
        resumed=None if worst is None else worst.last,
        stands_s=stands_s,
        goes_on_s=goes_on_s,
        downtime_s=goes_on_s - stands_s,
        lost=0 if worst is None else worst.lost,
        is_open=is_open,
    )


def _before(stretches: Sequence[Stretch], fault_s: float, turn_s: float | None) -> list[tuple[float, int]]:
    """What the attempt that a fault hit had reached, lines that were still on their way included."""
    is_before = [
        [point for point in one.points if point[0] <= fault_s or (turn_s is not None and point[0] < turn_s)]
        for one in stretches
    ]
    return next((points for points in reversed(is_before) if points), [])


def _widest(points: Sequence[tuple[float, int]], from_s: float, to_s: float) -> tuple[float, float | None]:
    """The longest time without a new step from a fault to the first step after it was over."""
    times = [at_s for at_s, _ in points if at_s > from_s]
    last = next((at for at, at_s in enumerate(times) if at_s > to_s), None)
    if last is None:
        return max([from_s, *times]), None
    return max(pairwise([from_s, *times[: last + 1]]), key=lambda pair: pair[1] - pair[0])


def _together(resumed: Sequence[Resume]) -> list[list[Resume]]:
    """Groups of pods that began again together: for one fault, or one after the other for none."""
    groups: dict[int, list[Resume]] = {}
    number = 0
    for one in resumed:
        if one.is_apart:
            continue
        if one.fault is not None:
            groups.setdefault(id(one.fault), []).append(one)
            continue
        if any(other.pod == one.pod for other in groups.get(number, ())):
            number += 1
        groups.setdefault(number, []).append(one)
    return list(groups.values())


def _end_of_job_s(history: History) -> float:
    """When its condition came, which is before its last pods have ended."""
    ended = (one.at_s for one in history.entries if one.what is What.CONDITION)
    return next(ended, end_of(history))


# -- a rehearsal as a whole --------------------------------------------------------------------


class Analysis(Struct, frozen=True, kw_only=True):
    """What a history comes to."""

    history: History
    lanes: tuple[Lane, ...]
    curve: tuple[Stretch, ...]
    resumes: tuple[Resume, ...]
    costs: tuple[Cost, ...]
    totals: Totals
    spans: tuple[Span, ...] = ()  # the wall time by what it was spent on; empty: no launcher has told


def analyse(history: History) -> Analysis:
    """Make the analysis of a rehearsal, also of one that has not ended."""
    all_lanes, reached = lanes(history), steps(history)
    resumed = resumes(history, reached)
    found = costs(history, all_lanes, reached, resumed)
    return Analysis(
        history=history,
        lanes=all_lanes,
        curve=curve(reached, resumed),
        resumes=resumed,
        costs=found,
        totals=totals(history, all_lanes, found, resumed),
        spans=spans(history),
    )


# -- steps that pods reached, counted on over epochs -------------------------------------------


_CLIMB, _FALLS = 3, 3  # distinct rising values, or falls, below the highest: a count that begins anew
_SKEW = 1  # workers of one pod may say their steps in another order
_IN_FLIGHT = 3  # lines that may still come after a fault
_RESUMES = re.compile(r"resum|restor|load|continu|checkpoint", re.IGNORECASE)
_HARMLESS = ("slow link", "delay dns")  # faults after which no worker should have to begin again


class Reached(Struct, frozen=True, kw_only=True):
    """A pod has reached a step."""

    at_s: float
    pod: str
    step: int  # counted on over epochs
    said: int  # as the pod said it
    resumes: bool = False  # the line tells where training goes on: this step is done already
    begun_s: float | None = None  # when the pod's workers last began, as far as was told
    is_again: bool = False  # the first one after the pod's workers began again
    is_anew: bool = False  # by now the steps have been seen to begin anew each epoch


def steps(history: History) -> tuple[Reached, ...]:
    """Every step in order of time; a count that begins anew in workers that were not started again counts on."""
    counts: dict[str, _Count] = {}
    fault_s: float | None = None
    for one in history.entries:
        if is_restarting(one):
            fault_s = one.at_s
        if one.pod is None:
            continue
        count = counts.setdefault(one.pod, _Count(one.pod))
        if one.what is What.STEP and one.step is not None:
            count.take(one, fault_s)
        elif _begins(one, count.container):
            count.begin_again(one.at_s)
    return tuple(sorted((made for count in counts.values() for made in count.made), key=lambda made: made.at_s))


def is_restarting(one: Entry) -> bool:
    """Whether this is a fault after which workers may have to begin again."""
    return one.what is What.FAULT and not one.text.strip().startswith(_HARMLESS)


def _begins(one: Entry, container: str | None) -> bool:
    """Whether this tells that the workers of its pod begin; `container`: the one that says the steps."""
    if one.what is What.CONTAINER_STARTED:
        return one.text != INIT and (container is None or one.container in (None, container))
    return one.what in (What.GENERATION, What.POD_STARTED)


class _Count:
    """One pod's steps; a fall that stays is a new epoch, unless the workers began again."""

    def __init__(self, pod: str) -> None:
        self.made: list[Reached] = []
        self.container: str | None = None  # which says the steps
        self._pod = pod
        self._recent_s: deque[float] = deque(maxlen=_IN_FLIGHT)
        self._has_begun = False
        self._begun_s: float | None = None
        self._offset = self._top = 0
        self._low: int | None = None  # the newest value below the highest
        self._climb = self._falls = self._fell = 0  # `fell`: where in `made` the fall began
        self._is_anew = False
        self._stride = 1  # between the last two steps that rose
        self._excursion: tuple[int, int, int, bool] | None = None  # _top, _fell, _offset, _is_anew before a fall

    def begin_again(self, at_s: float) -> None:
        """The workers begin: what comes now is no new epoch."""
        self._has_begun, self._begun_s = True, at_s
        self._forget()

    def take(self, one: Entry, fault_s: float | None) -> None:
        """The next step; `fault_s` is when the last fault came."""
        said = one.step or 0
        self.container = one.container or self.container
        is_again = bool(self.made) and (self._has_begun or self._falls_after(said, fault_s))
        if is_again:
            self._forget()
        self._has_begun = False
        self._come_back(said)
        self._recent_s.append(one.at_s)
        resumes = bool(_RESUMES.search(one.text))
        self.made.append(
            Reached(
                at_s=one.at_s, pod=self._pod, step=said + self._offset, said=said, resumes=resumes,
                begun_s=self._begun_s, is_again=is_again, is_anew=self._is_anew,
            )
        )  # fmt: skip
        self._follow(said)
        if self._climb >= _CLIMB or self._falls >= _FALLS:
            self._count_on()

    def _forget(self) -> None:
        self._top, self._low, self._climb, self._falls, self._excursion = 0, None, 0, 0, None

    def _come_back(self, said: int) -> None:
        """Steps go on where they were before the fall: in between was another count, such as a validation's."""
        if self._excursion is None:
            return
        top, fell, offset, is_anew = self._excursion
        if self._top < top < said <= top + 2 * self._stride:
            del self.made[fell:]
            self._forget()
            self._top, self._offset, self._is_anew = top, offset, is_anew

    def _falls_after(self, said: int, fault_s: float | None) -> bool:
        """Whether its workers began again unseen: steps go back right after a fault, and did not do so before."""
        is_recent = fault_s is not None and bool(self._recent_s) and fault_s >= self._recent_s[0]
        return is_recent and not self._is_anew and said < self._top - _SKEW

    def _follow(self, said: int) -> None:
        if said > self._top:
            self._stride = said - self._top if self._top and self._excursion is None else self._stride
            self._top, self._low, self._climb, self._falls = said, None, 0, 0
        elif said < self._top and self._low is None:
            self._fell, self._low, self._climb, self._falls = len(self.made) - 1, said, 1, 1
        elif self._low is not None and said < self._low:
            self._low, self._climb, self._falls = said, 1, self._falls + 1
        elif self._low is not None and said > self._low:
            self._low, self._climb = said, self._climb + 1

    def _count_on(self) -> None:
        """It was a new epoch: what came since the fall comes after the highest."""
        top, before = self._top, (self._top, self._fell, self._offset, self._is_anew)
        self._offset, self._is_anew = self._offset + top, True
        later = [replace(one, step=one.step + top, is_anew=True) for one in self.made[self._fell :]]
        self.made[self._fell :] = later
        self._forget()
        self._top, self._excursion = max(one.said for one in later), before


# -- resumed after a restart -------------------------------------------------------------------


_MUCH_LATER_S = 30.0  # of training after a fault: what comes then has another cause


class Resume(Struct, frozen=True, kw_only=True):
    """The first step of a pod after its workers began again."""

    at_s: float
    pod: str
    since_s: float  # of its last step before
    before: int  # the highest step that it had reached
    sure: int  # of these, what it had reached when the fault came
    last: int  # the last step that it need not do again
    first: int  # the first step that the pod ever said
    fault: Entry | None  # what it is put down to
    tells: bool = False  # the line itself says where training goes on
    is_apart: bool = False  # the other pods went on meanwhile: their steps are their own
    is_counted: bool = True  # False: steps begin anew each epoch, so that nothing follows from it

    @property
    def lost(self) -> int:
        """Steps done twice."""
        return 0 if self.is_apart else max(0, self.before - self.last)

    @property
    def begins_anew(self) -> bool:
        """Whether it does all steps once more."""
        return self.last <= 0 if self.tells else self.last < self.first


def resumes(history: History, reached: Sequence[Reached]) -> tuple[Resume, ...]:
    """Every first step after a beginning that was not the first, in order of time."""
    pods = grouped((one.pod, one) for one in reached)
    faults = [one for one in history.entries if is_restarting(one)]
    found = [one for mine in pods.values() for one in _of_pod(mine, faults, reached)]
    again = grouped((one.pod, one.at_s) for one in found)
    times = {pod: [one.at_s for one in mine] for pod, mine in pods.items()}
    judged = [replace(one, is_apart=_is_apart(one, again, pods, times)) for one in found]
    return tuple(sorted(judged, key=lambda one: one.at_s))


def _of_pod(mine: Sequence[Reached], faults: Sequence[Entry], reached: Sequence[Reached]) -> Iterator[Resume]:
    if (new := _newcomer(mine[0], faults, reached)) is not None:
        yield new
    used: set[int] = set()
    begun = 0  # where in `mine` its workers last began
    for number, one in enumerate(mine):
        if not one.is_again:
            continue
        stretch = mine[begun:number]
        fault = _cause(faults, used, stretch[-1].at_s, one.at_s)
        yield _resume(one, stretch, fault, mine[0])
        used |= {id(fault)}
        begun = number


def _resume(one: Reached, stretch: Sequence[Reached], fault: Entry | None, first: Reached) -> Resume:
    """`stretch`: what the pod had said since its workers began before."""
    before = max(earlier.step for earlier in stretch)
    sure = [earlier.step for earlier in stretch if fault is None or earlier.at_s <= fault.at_s]
    return Resume(
        at_s=one.at_s,
        pod=one.pod,
        since_s=stretch[-1].at_s,
        before=before,
        sure=max(sure, default=0),
        last=one.step if one.resumes else one.step - 1,
        first=first.step,
        fault=fault,
        tells=one.resumes,
        is_counted=not one.is_anew,
    )


def _newcomer(first: Reached, faults: Sequence[Entry], reached: Sequence[Reached]) -> Resume | None:
    """A pod that says its first step after a fault takes up the steps of others, such as a new rank 0."""
    earlier = [fault for fault in faults if first.begun_s is not None and fault.at_s <= first.begun_s]
    others = [one for one in reached if one.pod != first.pod and one.at_s <= first.at_s] if earlier else []
    if not others or others[0].at_s > earlier[-1].at_s:
        return None
    return replace(
        _resume(first, others, earlier[-1], others[0]), is_counted=not (first.is_anew or others[-1].is_anew)
    )


def _cause(faults: Sequence[Entry], used: set[int], since_s: float, at_s: float) -> Entry | None:
    """The newest fault up to then that no other beginning of this pod is put down to."""
    earlier = [fault for fault in faults if fault.at_s <= at_s and id(fault) not in used]
    return earlier[-1] if earlier and since_s < earlier[-1].at_s + _MUCH_LATER_S else None


def _is_apart(
    resume: Resume,
    again: Mapping[str, Sequence[float]],
    pods: Mapping[str, Sequence[Reached]],
    times: Mapping[str, Sequence[float]],
) -> bool:
    """Whether another pod went on all the time, as the workers of parameter servers do."""
    since_s = resume.since_s if resume.fault is None else min(resume.since_s, resume.fault.at_s)
    for pod, mine in pods.items():
        begun = again.get(pod, ())
        if any(since_s < at_s <= resume.at_s for at_s in begun[bisect_right(begun, since_s) :][:1]):
            continue  # it began again itself
        begin, end = bisect_right(times[pod], since_s), bisect_right(times[pod], resume.at_s)
        if pod == resume.pod or not begin:
            continue
        following = mine[begin : end + 1]  # with its next one
        went_on = any(one.step > mine[begin - 1].step for one in following)
        until_s = following[-1].at_s if following else resume.at_s
        if went_on and not any(since_s < at_s <= until_s for at_s in begun):
            return True
    return False
