"""What each fault cost: time without a new step, and steps done twice; and a rehearsal as a whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trainer_launch.rehearsal.report.history import Entry, History, Lane, What, away_s, end_of, lane_of, lanes
from trainer_launch.rehearsal.resume_check import Reached, Resume, resumes, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The same for the whole rehearsal."""

    took_s: float
    faults: int
    missed: int
    attempts: int  # how often the workers began, of the pod where it was most often
    top: int | None  # the highest step
    downtime_s: float | None
    lost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
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
        lane = None if fault.pod is None else lane_of(fault.pod, lanes)
        span = (fault.at_s, next((at_s for at_s in times if at_s > fault.at_s), float("inf")))
        found.append(
            replace(
                _cost(history, fault, over_s, [one for one in resumed if one.fault is fault], stretches),
                number=number,
                over_s=over_s,
                away_s=None if lane is None else away_s(lane, span, end_s),
            )
        )
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


def _cost(
    history: History,
    fault: Entry,
    over_s: float | None,
    mine: Sequence[Resume],
    stretches: Sequence[Stretch],
) -> Cost:
    """Time without a new step is counted from the last one that still came to the first beyond it."""
    points = [point for stretch in stretches for point in stretch.points]
    if not points:
        return Cost(fault=fault, number=0)
    job = [one for one in mine if not one.is_apart]
    turn_s = min((one.at_s for one in job), default=None)  # when training went on, though it may repeat steps
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
    return Cost(
        fault=fault,
        number=0,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What a history comes to."""

    history: History
    lanes: tuple[Lane, ...]
    curve: tuple[Stretch, ...]
    resumes: tuple[Resume, ...]
    costs: tuple[Cost, ...]
    totals: Totals


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
    )
