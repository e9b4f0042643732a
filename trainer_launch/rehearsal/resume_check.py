"""Where training went on after its workers began again, and from which step. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_launch.rehearsal.report.history import Chronicle, Happening
from trainer_launch.rehearsal.step_counter import Reached, by_pod, is_restarting

_MUCH_LATER_S = 30.0  # of training after a fault: what comes then has another cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The first step of a pod after its workers began again."""

    at_s: float
    pod: str
    since_s: float  # of its last step before
    before: int  # the highest step that it had reached
    sure: int  # of these, what it had reached when the fault came
    last: int  # the last step that it need not do again
    first: int  # the first step that the pod ever said
    fault: Happening | None  # what it is put down to
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


def resumes(chronicle: Chronicle, reached: Sequence[Reached]) -> tuple[Resume, ...]:
    """Every first step after a beginning that was not the first, in order of time."""
    pods = by_pod(reached)
    faults = [one for one in chronicle.happenings if is_restarting(one)]
    found = [one for mine in pods.values() for one in _of_pod(mine, faults, reached)]
    again: dict[str, list[float]] = {}
    for one in found:
        again.setdefault(one.pod, []).append(one.at_s)
    times = {pod: [one.at_s for one in mine] for pod, mine in pods.items()}
    judged = [replace(one, is_apart=_is_apart(one, again, pods, times)) for one in found]
    return tuple(sorted(judged, key=lambda one: one.at_s))


def _of_pod(mine: Sequence[Reached], faults: Sequence[Happening], reached: Sequence[Reached]) -> Iterator[Resume]:
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


def _resume(one: Reached, stretch: Sequence[Reached], fault: Happening | None, first: Reached) -> Resume:
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


def _newcomer(first: Reached, faults: Sequence[Happening], reached: Sequence[Reached]) -> Resume | None:
    """A pod that says its first step after a fault takes up the steps of others, such as a new rank 0."""
    earlier = [fault for fault in faults if first.begun_s is not None and fault.at_s <= first.begun_s]
    others = [one for one in reached if one.pod != first.pod and one.at_s <= first.at_s] if earlier else []
    if not others or others[0].at_s > earlier[-1].at_s:
        return None
    return replace(
        _resume(first, others, earlier[-1], others[0]), is_counted=not (first.is_anew or others[-1].is_anew)
    )


def _cause(faults: Sequence[Happening], used: set[int], since_s: float, at_s: float) -> Happening | None:
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
