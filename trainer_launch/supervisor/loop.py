"""Run a plan to its end: wait, step, apply. What happens is decided in `state_machine`, done in `system`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from trainer_launch.model import Exit, Failure, FailureRecord, Outcome, Plan, Process, exit_codes
from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.signal_policy import SignalAction, signal_name
from trainer_launch.model.units import counted
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import failure, state_machine
from trainer_launch.supervisor.events import Phase, State
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import System

log = logging.getLogger(__name__)

DRAIN_S = 1.0  # for the last output, once nothing of ours runs any more


class AnyWatch(Protocol):
    """Who looks, at a pace of its own, whether what runs hangs; `hang_watch.Watch` is it."""

    due_s: float

    def look(self, now_s: float) -> ev.Hung | None:
        """The hang that has been found, if one was, and when to look again in `due_s`."""


class AnyObserver(Protocol):
    """Who is told what happens; it may neither wait nor raise. `observability.observer.Observer` is it."""

    def begun(self, state: State) -> None:
        """A run begins in this state."""

    def stepped(self, event: ev.Event, before: State, after: State) -> None:
        """An event has made the one state of the other."""

    def spawned(self, process: str, pid: int) -> None:
        """A process has been started."""


def supervise(
    plan: Plan,
    system: System,
    watch: AnyWatch | None = None,
    observer: AnyObserver | None = None,
    failed: Callable[[Failure, str], None] = lambda failure, process: None,
) -> Outcome:
    """Run `plan` until nothing of it is left, and say how it ended.

    `failed` is told of a failure as it is known then, and whose it is, before anything else is stopped for it.
    """
    run = _Run(plan, system, watch, observer)
    run.failed = failed
    run.to_the_end()
    system.drain(DRAIN_S)
    state = run.state
    return Outcome(
        verdict=state.verdict,
        failure=_failure(state, system, run.evidence),
        stop_signal=state.stop_signal,
        exits=state.exits,
        took_s=system.now() - state.started_at_s,
        attempt=1 + state.restarts,
        survivors=system.descendants() if state.gave_up else (),
    )


class _Run:
    """The state, and who carries out what it asks for."""

    def __init__(self, plan: Plan, system: System, watch: AnyWatch | None, observer: AnyObserver | None) -> None:
        self.evidence = Evidence()
        self.failed: Callable[[Failure, str], None] = lambda failure, process: None
        self._system = system
        self._watch = watch
        self._observer = observer
        self.state, actions = state_machine.begin(plan, system.now())
        if observer is not None:
            observer.begun(self.state)
        self._apply(actions)

    def to_the_end(self) -> None:
        while self.state.phase is not Phase.DONE:
            times = (self.state.deadline_s, self._look_at_s())
            for event in self._system.wait(min((at_s for at_s in times if at_s is not None), default=None)):
                self._take(event)
            if _is_due(self.state.deadline_s, self._system.now()):
                self._take(ev.Deadline(self._system.now()))
            if self._watch and _is_due(self._look_at_s(), self._system.now()):
                hung = self._watch.look(self._system.now())
                if hung is not None:
                    self._take(hung)

    def _look_at_s(self) -> float | None:
        """When the watch is to look: only at what runs, and was not asked to stop."""
        return self._watch.due_s if self._watch and self.state.phase is Phase.RUNNING else None

    def _take(self, event: ev.Event) -> None:
        before = self.state
        self.state, actions = state_machine.step(before, event)
        _tell(event, before.phase, self.state)
        if self._observer is not None:
            self._observer.stepped(event, before, self.state)
        if isinstance(event, ev.Exited) and before.phase is Phase.RUNNING and self.state.cause is event.exit:
            self._apply(tuple(action for action in actions if isinstance(action, ev.Look)))
            actions = tuple(action for action in actions if not isinstance(action, ev.Look))
            found = _failure(self.state, self._system, self.evidence)
            if found is not None:
                self.failed(found, event.exit.process)
        self._apply(actions)

    def _apply(self, actions: tuple[ev.Action, ...]) -> None:
        failed: list[ev.SpawnFailed] = []
        for action in actions:
            if isinstance(action, ev.Spawn):
                failed += self._spawn(action.process)
            else:
                self._do(action)
        for event in failed:
            self._take(event)

    def _spawn(self, process: Process) -> list[ev.SpawnFailed]:
        try:
            pid = self._system.spawn(process)
        except NotRunnableError as error:
            return [ev.SpawnFailed(self._system.now(), process.name, error.exit_code, str(error))]
        log.info("started %s as pid %d", process.name, pid)
        if self._observer is not None:
            self._observer.spawned(process.name, pid)
        return []

    def _do(self, action: ev.Action) -> None:
        if isinstance(action, ev.Look):
            self.evidence = self._system.look()
        else:
            carry_out(self._system, action, self.state.plan)


def carry_out(system: System, action: ev.Action, plan: Plan) -> None:
    """Do what the machine asks for, but start and look."""
    match action:
        case ev.Resolve(names=names):
            log.info("waiting up to %g s for %s to resolve", plan.wait_s, ", ".join(names))
            system.resolve_names(names)
        case ev.StopResolving():
            system.stop_resolving()
        case ev.Say(text=text):
            log.warning("%s", text)
        case ev.SignalLeader(process=name, number=number):
            system.signal_leader(name, number)
        case ev.SignalGroup(process=name, number=number):
            _count(system.signal_group(name, number), number)
        case ev.SignalAll(number=number, again=again, sparing=sparing):
            _count(system.signal_all(number, again=again, sparing=sparing), number)
        case ev.Clean():
            system.clean()
        case ev.NameHanging():
            for text in system.descendants():
                log.warning("still running after SIGKILL: %s", text)


def _is_due(at_s: float | None, now_s: float) -> bool:
    return at_s is not None and now_s >= at_s


def _count(reached: int, number: int) -> None:
    if reached:
        log.info("sent %s to %s", signal_name(number), counted(reached, "process"))


def _tell(event: ev.Event, before: Phase, state: State) -> None:
    """Log what happened; a run's story has a dozen lines."""
    match event:
        case ev.Exited(exit=end):
            log.info("%s ended with %s", end.process, how(end))
        case ev.SpawnFailed(text=text):
            log.error("%s", text)
        case ev.Signalled(number=number) if _is_request(number, before, state):
            grace_s = state.plan.grace_s
            log.info("asked to stop by %s (request %d, grace %g s)", signal_name(number), state.asked, grace_s)
        case ev.Signalled(number=number):
            log.debug("%s", signal_name(number))
        case ev.Deadline() if state.phase is Phase.KILLING and before is not Phase.KILLING:
            log.warning("the grace period is over; sending SIGKILL to the remaining processes")


def _is_request(number: int, before: Phase, state: State) -> bool:
    purpose = state_machine.purpose(replace(state, phase=before), number)
    return purpose is SignalAction.TERMINATE and before is not Phase.DONE


def _failure(state: State, system: System, evidence: Evidence) -> Failure | None:
    if state.names_failed:
        return failure.unresolved(state.text)
    cause = state.cause
    if state.stopped:  # how it took the request is worth a word when it did not leave with 0
        cause = next((end for end in state.exits if end.exit_code != 0), None)
    if state.hung:
        return _hung(state.hung, evidence)
    if cause is None:
        return None
    note = system.read_text(state.plan.failure_file) if state.plan.failure_file else None
    agent = failure.parse_agent_failure(note) if note else None
    lines = system.last_lines(cause.process)
    seen = replace(evidence, agent=agent, last_lines=lines, stopped=state.stopped, text=state.text)
    seen = replace(seen, handed_on=state.handed_on)
    return failure.classify(cause, seen)


def _hung(hung: ev.Hung, evidence: Evidence) -> Failure:
    """The cause is the hang, however what hung then ended, if it did."""
    told = FailureRecord(reason="Hung", message=hung.text, lines=hung.lines)
    end = Exit(process="", code=exit_codes.INFRASTRUCTURE, signal=None, at_s=hung.at_s)
    return failure.classify(end, replace(evidence, agent=told))


def how(end: Exit) -> str:
    """A death in words."""
    return f"exit code {end.code}" if end.signal is None else signal_name(end.signal)
