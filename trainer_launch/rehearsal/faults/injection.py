"""Faults, carried out: when one has come it is said, done, and undone when its time is over."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import psutil

from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.value_parsers import MAX_LINE, compiled_pattern
from trainer_launch.rehearsal import pod_watch
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase
from trainer_launch.rehearsal.controllers.restart_decisions import State
from trainer_launch.rehearsal.faults import grammar, requests
from trainer_launch.rehearsal.faults.grammar import Chaos, Fault
from trainer_launch.rehearsal.faults.requests import OWN_NETWORK, Asked, nodes_of
from trainer_launch.rehearsal.kubelet.pods import Kubelet
from trainer_launch.rehearsal.pod_watch import PodProcesses
from trainer_launch.rehearsal.report.history import Entry, What

# -- which faults come when --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Reached:
    """Some pod has reached a step."""

    step: int


@dataclass(frozen=True, slots=True)
class Said:
    """Some pod has said a line."""

    line: str


Event = Passed | Reached | Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What has yet to come."""

    waiting: tuple[Fault, ...]
    patterns: tuple[re.Pattern[str] | None, ...]  # one for each of `waiting`; None: it waits for no line
    chaos: Chaos | None = None
    drawn: Fault | None = None  # the next of chaos
    draws: int = 0


Step = tuple[Timeline, tuple[Fault, ...]]  # and the faults that come now


def begin(faults: Iterable[Fault], chaos: Chaos | None = None) -> Timeline:
    """Nothing has come yet."""
    waiting = tuple(faults)
    patterns = tuple(None if one.when.line is None else compiled_pattern(one.when.line) for one in waiting)
    return _drawn(Timeline(waiting=waiting, patterns=patterns, chaos=chaos), 0.0)


def due_s(state: Timeline) -> float | None:
    """When `Passed` has to be told at the latest; None: never."""
    times = [one.when.at_s for one in (*state.waiting, state.drawn) if one is not None]
    return min((at_s for at_s in times if at_s is not None), default=None)


def advance(state: Timeline, event: Event) -> Step:
    """What comes of an event: the faults whose time, step or line this is, in the order they were given."""
    line = event.line[:MAX_LINE] if isinstance(event, Said) else ""
    come: list[Fault] = []
    rest: list[tuple[Fault, re.Pattern[str] | None]] = []
    for fault, pattern in zip(state.waiting, state.patterns, strict=True):
        if isinstance(event, Said):
            is_now = pattern is not None and pattern.search(line) is not None
        elif isinstance(event, Reached):
            is_now = fault.when.step is not None and event.step >= fault.when.step
        else:
            is_now = fault.when.at_s is not None and event.at_s >= fault.when.at_s
        if is_now:
            come.append(fault)
        else:
            rest.append((fault, pattern))
    if come:
        state = replace(state, waiting=tuple(one for one, _ in rest), patterns=tuple(one for _, one in rest))
    if isinstance(event, Passed):
        state, more = _chance(state, event.at_s)
        come += more
    return state, tuple(come)


def missed(state: Timeline) -> tuple[Fault, ...]:
    """What was asked for and never came; chaos asks for nothing."""
    return state.waiting


def _chance(state: Timeline, now_s: float) -> tuple[Timeline, list[Fault]]:
    come: list[Fault] = []
    while (fault := state.drawn) is not None and fault.when.at_s is not None and fault.when.at_s <= now_s:
        come.append(fault)
        state = _drawn(state, fault.when.at_s)
    return state, come


def _drawn(state: Timeline, after_s: float) -> Timeline:
    if state.chaos is None:
        return state
    fault = grammar.draw(state.chaos, state.draws, after_s)
    return replace(state, drawn=fault, draws=state.draws + 1)


# -- when one has come -------------------------------------------------------------------------


RETRY_S = 0.3  # a fault whose target is not there yet comes as soon as it is
_log = logging.getLogger(__name__)


class AnyDriver(Protocol):
    """What a fault needs of who drives the rehearsal; `driver.Rehearsal` is it."""

    kubelet: Kubelet
    state: State
    processes: PodProcesses

    def now_s(self) -> float:
        """Seconds since the rehearsal began."""

    def take(self, event: job_lifecycle.Event) -> None:
        """Let the job's machine have an event."""

    def tell(self, entry: Entry) -> None:
        """Note what has happened, for people."""

    def leader(self, pod: str) -> int | None:
        """The pid of a pod's first process, None while there is none."""

    def scale(self, workers: int | None) -> None:
        """Change the job's Worker replicas to that number, or with None to one more."""


class NotNow(Exception):
    """It cannot be done as things stand; the text says why."""


class Never(NotNow):
    """Nor will it be possible later."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What is to be done for a fault, once it has been said."""

    do: Callable[[], None]
    undo: Callable[[], None] | None = None


class Faults:
    """All that is asked for, and what has become of it."""

    def __init__(self, asked: Asked, driver: AnyDriver) -> None:
        self._driver = driver
        self._asked = asked
        self._line = begin(asked.faults, asked.chaos)
        self._late: list[tuple[Fault, float, str]] = []  # which wait: when to try again, why not yet
        self._over: list[tuple[float, Fault, str | None, Callable[[], None]]] = []
        self.came: list[Fault] = []
        self.missed: list[tuple[Fault, str]] = []  # of those that were asked for, and why; chance promises nothing
        self._last_step: int | None = None  # the highest that was said

    def due_s(self) -> float | None:
        """When `pass_time` wants to be called, in the rehearsal's time."""
        times = [due_s(self._line), *(at_s for _, at_s, _ in self._late), *(one[0] for one in self._over)]
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What lines have to be heard for."""
        return tuple(pattern for pattern in self._line.patterns if pattern is not None)

    def precede(self) -> None:
        """No pod has started yet: names that come late are not there from the beginning."""
        self._line, come = advance(self._line, Passed(0.0))
        for fault in come:
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
        self._step(Passed(now_s))

    def reached(self, step: int) -> None:
        """Some pod has reached a step."""
        self._last_step = max(step, self._last_step or 0)
        self._step(Reached(step))

    def said(self, line: str) -> None:
        """Some pod has said a line."""
        self._step(Said(line))

    def finish(self) -> None:
        """The rehearsal is over: say what never came."""
        for fault, _, why in self._late:
            self._note_missed(fault, why)
        for fault in missed(self._line):
            self._note_missed(fault, _never(fault, self._last_step))
        self._late = []
        if self._asked.chaos is not None and self.came:
            _log.warning("to repeat these faults:\n%s", grammar.replay(self.came))

    def _step(self, event: Event) -> None:
        self._line, come = advance(self._line, event)
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


def _kill_worker(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    process = _worker(driver, fault, pod)
    return Effect(lambda: pod_watch.send([process], signal.SIGKILL))


def _stop_worker(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    processes = pod_watch.below(_worker(driver, fault, pod))
    return Effect(
        lambda: pod_watch.send(processes, signal.SIGSTOP), lambda: pod_watch.send(processes, signal.SIGCONT)
    )


def _delete_pod(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    name = _living(driver, pod)
    own_s = driver.state.pods[name].draft.template.grace_s
    grace_s = 0.0 if fault.kind == "kill pod" else own_s if fault.grace_s is None else fault.grace_s

    def delete() -> None:
        now_s = driver.state.began_s + driver.now_s()
        driver.take(job_lifecycle.PodDeleted(now_s, name, grace_s, fault.back_s))

    return Effect(delete)


def _scale(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    if driver.state.condition is not None or driver.state.asked:
        raise Never("the job has ended")
    return Effect(lambda: driver.scale(fault.workers))


def _on_network(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    network = driver.kubelet.network
    assert network is not None, "asked for before anything was started"
    return Effect(lambda: network.begin(fault, pod), lambda: network.end(fault, pod))


def _oom(driver: AnyDriver, fault: Fault, pod: str | None) -> Effect:
    name, memory = _living(driver, pod), driver.kubelet.memory
    _worker(driver, fault, pod)  # before there is one, the launcher would be the largest
    assert memory is not None, "asked for before anything was started"
    return Effect(lambda: memory.squeeze(name))


MakeEffect = Callable[[AnyDriver, Fault, "str | None"], Effect]
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


def _living(driver: AnyDriver, pod: str | None) -> str:
    state = driver.state.states[pod or ""]
    if driver.state.condition is not None or driver.state.asked:
        raise Never("the job has ended")
    if state.is_over:
        raise Never(f"{pod} is {state.phase.value} and will not be created again")
    if state.phase is Phase.PENDING or state.stopping:
        raise NotNow(f"{pod} is not running")
    return pod or ""


def _worker(driver: AnyDriver, fault: Fault, pod: str | None) -> psutil.Process:
    name = _living(driver, pod)
    process = driver.processes.worker(driver.state.pods[name], driver.leader(name), fault.local_rank)
    if process is None:
        raise NotNow(f"{name} has no worker {fault.local_rank}")
    return process
