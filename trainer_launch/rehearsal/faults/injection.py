"""Faults, carried out: when one has come it is said, done, and undone when its time is over."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.rehearsal.faults import requests
from trainer_launch.rehearsal.faults.kinds import KINDS, InjectedFault, Never, NotNow, Rehearsed
from trainer_launch.rehearsal.report.history import HistoryEntry, What

_NO_STEP_S = 60.0  # without any step, after which faults that wait for one say so
_RETRY_S = 0.3  # a fault whose target is not there yet comes as soon as it is
_log = logging.getLogger(__name__)


class _Waiting(Struct, frozen=True, kw_only=True):
    """A fault that has yet to come: at a time, a step, or a line."""

    fault: InjectedFault
    due_s: float | None = None
    step: int | None = None
    pattern: re.Pattern[str] | None = None
    why_late: str = ""  # its time has come, but it cannot be done yet


def _waiting(fault: InjectedFault) -> _Waiting:
    when = fault.when
    pattern = None if when.line is None else re.compile(when.line)
    return _Waiting(fault=fault, due_s=when.at_s, step=when.step, pattern=pattern)


class Faults:
    """All that is asked for, and what has become of it. Times are the rehearsal's."""

    def __init__(self, faults: Iterable[InjectedFault], rehearsal: Rehearsed) -> None:
        self._rehearsal = rehearsal
        self._waiting = [_waiting(fault) for fault in faults]
        # Until when, and how to undo it.
        self._lasting: list[tuple[float, InjectedFault, str | None, Callable[[], None]]] = []
        self.came = 0
        self._last_step: int | None = None  # the highest that was said
        self._warns_at_s: float | None = _NO_STEP_S  # None: it has been said, or there are steps

    @property
    def to_come(self) -> list[InjectedFault]:
        """What was asked for and has not come."""
        return [waiting.fault for waiting in self._waiting]

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What lines are waited for."""
        return tuple(waiting.pattern for waiting in self._waiting if waiting.pattern)

    def due_s(self) -> float | None:
        """When `pass_time` wants to be called; None: never."""
        times = [waiting.due_s for waiting in self._waiting] + [until_s for until_s, *_ in self._lasting]
        times += [self._warns_at_s] if any(waiting.step is not None for waiting in self._waiting) else []
        return min((at_s for at_s in times if at_s is not None), default=None)

    def precede(self) -> None:
        """No pod has started yet: names that come late are not there from the beginning."""
        self._take(lambda waiting: waiting.due_s == 0.0 and KINDS[waiting.fault.kind].needs_network)

    def pass_time(self) -> None:
        """Time has passed."""
        now_s = self._rehearsal.now_s()
        over = [lasting for lasting in self._lasting if lasting[0] <= now_s]
        self._lasting = [lasting for lasting in self._lasting if lasting[0] > now_s]
        for _, fault, pod, undo in over:
            self._end(fault, pod, undo)
        self._take(lambda waiting: waiting.due_s is not None and waiting.due_s <= now_s)
        late = next((waiting for waiting in self._waiting if waiting.step is not None), None)
        if late is not None and self._warns_at_s is not None and now_s >= self._warns_at_s:
            self._warns_at_s = None
            _log.warning(
                "no step in the first %g s; fault %r waits for step %s. %s",
                _NO_STEP_S,
                late.fault.text,
                late.step,
                _how_to_tell(late.step or 1),
            )

    def reached(self, step: int) -> None:
        """Some pod has reached a step."""
        self._last_step, self._warns_at_s = max(step, self._last_step or 0), None
        self._take(lambda waiting: waiting.step is not None and waiting.step <= step)

    def said(self, line: str) -> None:
        """Some pod has said a line."""
        self._take(
            lambda waiting: waiting.pattern is not None and waiting.pattern.search(line[:MAX_LINE]) is not None
        )

    def finish(self) -> None:
        """The rehearsal is over: say what never came."""
        for waiting in self._waiting:
            why = waiting.why_late or _why_never(waiting.fault, self._last_step)
            self._note(What.FAULT_MISSED, waiting.fault, why=why)
        self._waiting = []

    def _take(self, comes: Callable[[_Waiting], bool]) -> None:
        """Inject the faults that come now, each once and in the order they were given."""
        now = [waiting for waiting in self._waiting if comes(waiting)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in now]
        for waiting in now:
            self._come(waiting)

    def _come(self, waiting: _Waiting) -> None:
        rehearsal, fault = self._rehearsal, waiting.fault
        try:
            pod = self._target(fault)
            effect = KINDS[fault.kind].inject(rehearsal, fault, pod)
        except Never as problem:
            self._miss(fault, str(problem))
            return
        except NotNow as problem:
            self._waiting.append(_Waiting(fault=fault, due_s=rehearsal.now_s() + _RETRY_S, why_late=str(problem)))
            return
        _log.warning("fault: %s", fault.text)
        self._note(What.FAULT, fault, pod)
        self.came += 1
        try:
            effect.do()
        except NodeError as problem:
            self._miss(fault, str(problem))
            return
        if effect.undo is not None and fault.for_s is not None:
            self._lasting.append((rehearsal.now_s() + fault.for_s, fault, pod, effect.undo))

    def _target(self, fault: InjectedFault) -> str | None:
        pods = self._rehearsal.state.there
        try:
            return requests.target(fault, requests.nodes_of(pod.draft for pod in pods.values()), tuple(pods))
        except UsageError as problem:  # a node that is to be added first
            raise NotNow(str(problem)) from None

    def _end(self, fault: InjectedFault, pod: str | None, undo: Callable[[], None]) -> None:
        _log.warning("fault ended: %s", fault.text)
        self._note(What.FAULT_OVER, fault, pod)
        try:
            undo()
        except NodeError as problem:
            _log.warning("the fault could not be undone: %s", problem)

    def _miss(self, fault: InjectedFault, why: str) -> None:
        _log.warning("fault did not happen: %s: %s", fault.text, why)
        self._note(What.FAULT_MISSED, fault, why=why)

    def _note(self, what: What, fault: InjectedFault, pod: str | None = None, why: str = "") -> None:
        now_s = self._rehearsal.now_s()
        self._rehearsal.tell(HistoryEntry(at_s=now_s, what=what, pod=pod, text=fault.text, why=why))


def _why_never(fault: InjectedFault, last_step: int | None) -> str:
    """Why a fault never came, and how it would have."""
    when = fault.when
    if when.at_s is not None:
        return f"the job ended before {when.at_s:g} s"
    if when.step is None:
        return f"no line matched {when.line!r}"
    if last_step is not None:
        return f"step {when.step} was not reached; the last one was {last_step}"
    return f"step {when.step} was not reached, because the steps are unknown. {_how_to_tell(when.step)}"


def _how_to_tell(step: int) -> str:
    return (
        f"Print lines such as 'step {step}' or call trainer_launch.report(step=...), or use at=20s or at=line:REGEX"
    )
