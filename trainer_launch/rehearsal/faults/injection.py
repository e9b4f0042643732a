"""Faults, carried out: when one has come it is said, done, and undone when its time is over."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import psutil
from msgspec import Struct

from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.value_parsers import MAX_LINE, compiled_pattern
from trainer_launch.rehearsal import pod_watch
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase
from trainer_launch.rehearsal.faults import grammar, requests
from trainer_launch.rehearsal.faults.grammar import Chaos, Fault
from trainer_launch.rehearsal.faults.requests import OWN_NETWORK, Asked, nodes_of
from trainer_launch.rehearsal.report.history import Entry, What

if TYPE_CHECKING:
    from trainer_launch.rehearsal.driver import Rehearsal

# -- which faults come when --------------------------------------------------------------------


class Timeline:
    """What has yet to come: of the faults that were asked for, and of chaos the next one."""

    def __init__(self, faults: Iterable[Fault], chaos: Chaos | None = None) -> None:
        self._waiting = [(one, _pattern(one)) for one in faults]
        self._chaos, self._draws = chaos, 0
        self._drawn = self._draw(0.0)

    @property
    def waiting(self) -> list[Fault]:
        """What was asked for and has not come; chaos asks for nothing."""
        return [fault for fault, _ in self._waiting]

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What lines have to be heard for."""
        return tuple(pattern for _, pattern in self._waiting if pattern is not None)

    def due_s(self) -> float | None:
        """When `come` has to be told the time at the latest; None: never."""
        times = [one.when.at_s for one in (*self.waiting, self._drawn) if one is not None]
        return min((at_s for at_s in times if at_s is not None), default=None)

    def come(self, *, at_s: float = -1.0, step: int = -1, line: str | None = None) -> list[Fault]:
        """The faults that come now, each once and in the order they were given.

        `at_s` is the rehearsal's time, `step` one that some pod has reached, `line` one that some pod has said.
        """
        come: list[Fault] = []
        rest = []
        for fault, pattern in self._waiting:
            when = fault.when
            is_due = when.at_s is not None and when.at_s <= at_s
            is_reached = when.step is not None and when.step <= step
            is_said = pattern is not None and line is not None and pattern.search(line[:MAX_LINE])
            if is_due or is_reached or is_said:
                come.append(fault)
            else:
                rest.append((fault, pattern))
        self._waiting = rest
        while (drawn := self._drawn) is not None and drawn.when.at_s is not None and drawn.when.at_s <= at_s:
            come.append(drawn)
            self._drawn = self._draw(drawn.when.at_s)
        return come

    def _draw(self, after_s: float) -> Fault | None:
        self._draws += 1
        return None if self._chaos is None else grammar.draw(self._chaos, self._draws - 1, after_s)


def _pattern(fault: Fault) -> re.Pattern[str] | None:
    return None if fault.when.line is None else compiled_pattern(fault.when.line)


# -- when one has come -------------------------------------------------------------------------


RETRY_S = 0.3  # a fault whose target is not there yet comes as soon as it is
_log = logging.getLogger(__name__)


class NotNow(Exception):
    """It cannot be done as things stand; the text says why."""


class Never(NotNow):
    """Nor will it be possible later."""


class Effect(Struct, frozen=True):
    """What is to be done for a fault, once it has been said."""

    do: Callable[[], None]
    undo: Callable[[], None] | None = None


class Faults:
    """All that is asked for, and what has become of it."""

    def __init__(self, asked: Asked, driver: Rehearsal) -> None:
        self._driver = driver
        self._asked = asked
        self._timeline = Timeline(asked.faults, asked.chaos)
        self._late: list[tuple[Fault, float, str]] = []  # which wait: when to try again, why not yet
        self._over: list[tuple[float, Fault, str | None, Callable[[], None]]] = []
        self.came: list[Fault] = []
        self.missed: list[tuple[Fault, str]] = []  # of those that were asked for, and why; chance promises nothing
        self._last_step: int | None = None  # the highest that was said

    def due_s(self) -> float | None:
        """When `pass_time` wants to be called, in the rehearsal's time."""
        times = [self._timeline.due_s(), *(at_s for _, at_s, _ in self._late), *(one[0] for one in self._over)]
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What lines have to be heard for."""
        return self._timeline.patterns

    def precede(self) -> None:
        """No pod has started yet: names that come late are not there from the beginning."""
        for fault in self._timeline.come(at_s=0.0):
            if fault.kind in OWN_NETWORK:
                self._come(fault)
            else:
                self._late.append((fault, 0.0, "no pod has started yet"))

    def pass_time(self) -> None:
        """Time has passed."""
        now_s = self._driver.now_s()
        for entry in [one for one in self._over if one[0] <= now_s]:
            self._over.remove(entry)
            self._end(*entry[1:])
        late, self._late = self._late, []
        for fault, at_s, why in late:
            if at_s <= now_s:
                self._come(fault)
            else:
                self._late.append((fault, at_s, why))
        self._take(self._timeline.come(at_s=now_s))

    def reached(self, step: int) -> None:
        """Some pod has reached a step."""
        self._last_step = max(step, self._last_step or 0)
        self._take(self._timeline.come(step=step))

    def said(self, line: str) -> None:
        """Some pod has said a line."""
        self._take(self._timeline.come(line=line))

    def finish(self) -> None:
        """The rehearsal is over: say what never came."""
        for fault, _, why in self._late:
            self._note_missed(fault, why)
        for fault in self._timeline.waiting:
            self._note_missed(fault, _never(fault, self._last_step))
        self._late = []
        if self._asked.chaos is not None and self.came:
            _log.warning("to repeat these faults:\n%s", grammar.replay(self.came))

    def _take(self, come: Iterable[Fault]) -> None:
        for fault in come:
            self._come(fault)

    def _come(self, fault: Fault) -> None:
        driver = self._driver
        try:
            pod = self._target(fault)
            effect = EFFECTS[fault.kind](driver, fault, pod)
        except Never as problem:
            self._miss(fault, str(problem))
            return
        except NotNow as problem:
            if fault not in self._asked.faults:  # chance hits nobody
                self._miss(fault, str(problem))
                return
            self._late.append((fault, driver.now_s() + RETRY_S, str(problem)))
            return
        _log.warning("fault: %s", fault.text)
        driver.tell(Entry(at_s=driver.now_s(), what=What.FAULT, pod=pod, text=fault.text))
        self.came.append(fault)
        try:
            effect.do()
        except NodeError as problem:
            self._miss(fault, str(problem))
            return
        if effect.undo is not None and fault.for_s is not None:
            self._over.append((driver.now_s() + fault.for_s, fault, pod, effect.undo))

    def _target(self, fault: Fault) -> str | None:
        pods = self._driver.state.there
        try:
            return requests.target(fault, nodes_of(pod.draft for pod in pods.values()), tuple(pods))
        except UsageError as problem:  # a node that is to be added first
            raise NotNow(str(problem)) from None

    def _end(self, fault: Fault, pod: str | None, undo: Callable[[], None]) -> None:
        _log.warning("fault ended: %s", fault.text)
        self._driver.tell(Entry(at_s=self._driver.now_s(), what=What.FAULT_OVER, pod=pod, text=fault.text))
        try:
            undo()
        except NodeError as problem:
            _log.warning("the fault could not be undone: %s", problem)

    def _miss(self, fault: Fault, why: str) -> None:
        _log.warning("fault did not happen: %s: %s", fault.text, why)
        self._note_missed(fault, why)

    def _note_missed(self, fault: Fault, why: str) -> None:
        if fault in self._asked.faults:
            self.missed.append((fault, why))
        self._driver.tell(Entry(at_s=self._driver.now_s(), what=What.FAULT_MISSED, text=fault.text))


def _never(fault: Fault, last_step: int | None) -> str:
    """Why a fault never came, and how it would have."""
    when = fault.when
    if when.at_s is not None:
        return f"the job ended before {when.at_s:g} s"
    if when.step is None:
        return f"no line matched {when.line!r}"
    if last_step is not None:
        return f"step {when.step} was not reached; the last one was {last_step}"
    return (
        f"step {when.step} was not reached, because the steps are unknown. "
        f"Print lines such as 'step {when.step}' or "
        f"call trainer_launch.report(step=...), or use at=20s or at=line:REGEX"
    )


# -- how each kind is carried out -------------------------------------------------------------


def _kill_worker(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    process = _worker(driver, fault, pod)
    return Effect(lambda: pod_watch.send([process], signal.SIGKILL))


def _stop_worker(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    processes = pod_watch.below(_worker(driver, fault, pod))
    return Effect(
        lambda: pod_watch.send(processes, signal.SIGSTOP), lambda: pod_watch.send(processes, signal.SIGCONT)
    )


def _delete_pod(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    name = _living(driver, pod)
    own_s = driver.state.pods[name].draft.template.grace_s
    grace_s = 0.0 if fault.kind == "kill pod" else own_s if fault.grace_s is None else fault.grace_s

    def delete() -> None:
        now_s = driver.state.began_s + driver.now_s()
        driver.take(job_lifecycle.PodDeleted(now_s, name, grace_s, fault.back_s))

    return Effect(delete)


def _scale(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    if driver.state.condition is not None or driver.state.asked:
        raise Never("the job has ended")
    return Effect(lambda: driver.scale(fault.workers))


def _on_network(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    network = driver.kubelet.network
    assert network is not None, "asked for before anything was started"
    return Effect(lambda: network.begin(fault, pod), lambda: network.end(fault, pod))


def _oom(driver: Rehearsal, fault: Fault, pod: str | None) -> Effect:
    name, memory = _living(driver, pod), driver.kubelet.memory
    _worker(driver, fault, pod)  # before there is one, the launcher would be the largest
    assert memory is not None, "asked for before anything was started"
    return Effect(lambda: memory.squeeze(name))


MakeEffect = Callable[["Rehearsal", Fault, "str | None"], Effect]
EFFECTS: Mapping[str, MakeEffect] = {
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "kill pod": _delete_pod,
    "term pod": _delete_pod,
    "add node": _scale,
    "scale": _scale,
    "partition": _on_network,
    "slow link": _on_network,
    "delay dns": _on_network,
    "fill shm": _on_network,
    "oom": _oom,
}


def _living(driver: Rehearsal, pod: str | None) -> str:
    state = driver.state.states[pod or ""]
    if driver.state.condition is not None or driver.state.asked:
        raise Never("the job has ended")
    if state.is_over:
        raise Never(f"{pod} is {state.phase.value} and will not be created again")
    if state.phase is Phase.PENDING or state.stopping:
        raise NotNow(f"{pod} is not running")
    return pod or ""


def _worker(driver: Rehearsal, fault: Fault, pod: str | None) -> psutil.Process:
    name = _living(driver, pod)
    process = driver.processes.worker(driver.state.pods[name], driver.leader(name), fault.local_rank)
    if process is None:
        raise NotNow(f"{name} has no worker {fault.local_rank}")
    return process
