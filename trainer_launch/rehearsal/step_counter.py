"""The steps that pods said they reached, made to count on over epochs. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trainer_launch.rehearsal.report.history import Chronicle, Happening, What
from trainer_launch.rehearsal.report.lanes import INIT

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


def steps(chronicle: Chronicle) -> tuple[Reached, ...]:
    """Every step in order of time; a count that begins anew in workers that were not started again counts on."""
    counts: dict[str, _Count] = {}
    fault_s: float | None = None
    for one in chronicle.happenings:
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


def is_restarting(one: Happening) -> bool:
    """Whether this is a fault after which workers may have to begin again."""
    return one.what is What.FAULT and not one.text.strip().startswith(_HARMLESS)


def _begins(one: Happening, container: str | None) -> bool:
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

    def take(self, one: Happening, fault_s: float | None) -> None:
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
