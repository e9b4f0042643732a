"""The steps that pods reached, and from which step training resumed after its workers began again. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_launch.rehearsal.report.history import INIT, Entry, History, What

# -- steps that pods reached, counted on over epochs -------------------------------------------


_CLIMB, _FALLS = 3, 3  # distinct rising values, or falls, below the highest: a count that begins anew
_SKEW = 1  # workers of one pod may say their steps in another order
_IN_FLIGHT = 3  # lines that may still come after a fault
_RESUMES = re.compile(r"resum|restor|load|continu|checkpoint", re.IGNORECASE)
_HARMLESS = ("slow link", "delay dns")  # faults after which no worker should have to begin again


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
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


def by_pod(reached: Iterable[Reached]) -> Mapping[str, list[Reached]]:
    """Each pod's own steps, in order of time."""
    found: dict[str, list[Reached]] = {}
    for one in reached:
        found.setdefault(one.pod, []).append(one)
    return found


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
        self._excursion: tuple[int, int, int, bool] | None = (
            None  # `top`, `fell`, `offset`, `is_anew` before a fall
        )

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
    pods = by_pod(reached)
    faults = [one for one in history.entries if is_restarting(one)]
    found = [one for mine in pods.values() for one in _of_pod(mine, faults, reached)]
    again: dict[str, list[float]] = {}
    for one in found:
        again.setdefault(one.pod, []).append(one.at_s)
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
