"""What a step of the job's machine means to people, as happenings of the chronicle. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer_launch.rehearsal.controllers.job_lifecycle import Event, Exited, PodDeleted, State, StopAsked
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Phase, PodState, Start, Stop, own_init
from trainer_launch.rehearsal.report.history import Happening, What

INIT = "init"  # the text of the start of a container that ends before the others begin
_ASKERS: tuple[tuple[type, str], ...] = ((PodDeleted, "fault"), (StopAsked, "user"))


def happened(before: State | None, after: State, event: Event | None, actions: Iterable[Action]) -> list[Happening]:
    """All that came of one event, in its order; without an event, of the beginning."""
    at_s = (after.began_s if event is None else event.at_s) - after.began_s
    asker = next((word for kind, word in _ASKERS if isinstance(event, kind)), "controller")
    return [
        *_ends(before, after, event, at_s),
        *_begins(before, after, at_s),
        *_done(after, actions, at_s, asker),
        *_condition(before, after, at_s),
    ]


def _ends(before: State | None, after: State, event: Event | None, at_s: float) -> Iterator[Happening]:
    if isinstance(event, Exited):
        yield Happening(
            at_s=at_s, what=What.CONTAINER_ENDED, pod=event.pod, container=event.container, code=event.code
        )
    for name, old in ({} if before is None else before.states).items():
        new = after.states[name]
        if _lives(old) and (new.starts > old.starts or not _lives(new)):
            phase = Phase.FAILED if new.starts > old.starts else new.phase  # made anew at once, for it has failed
            yield Happening(at_s=at_s, what=What.POD_ENDED, pod=name, attempt=old.starts, text=phase.value)


def _begins(before: State | None, after: State, at_s: float) -> Iterator[Happening]:
    for name, new in after.states.items():
        old = PodState() if before is None else before.states.get(name, PodState())
        if new.starts > old.starts:
            yield Happening(at_s=at_s, what=What.POD_STARTED, pod=name, attempt=new.starts)


def _done(after: State, actions: Iterable[Action], at_s: float, asker: str) -> Iterator[Happening]:
    for action in actions:
        pod, container = action.pod, action.container
        if isinstance(action, Start):
            first = any(one.name == container and not one.sidecar for one in own_init(after.pods[pod]))
            attempt = after.states[pod].restarts.get(container, 0) + 1
            what, text = What.CONTAINER_STARTED, INIT if first else ""
            yield Happening(at_s=at_s, what=what, pod=pod, container=container, attempt=attempt, text=text)
        elif isinstance(action, Stop) and not action.kill:
            yield Happening(at_s=at_s, what=What.STOP_ASKED, pod=pod, container=container, text=asker)


def _condition(before: State | None, after: State, at_s: float) -> Iterator[Happening]:
    end = after.condition
    if end is not None and (before is None or before.condition is None):
        verdict = "Succeeded" if end.succeeded else "Failed"
        text = f"{verdict} ({end.reason}): {end.message}"
        yield Happening(at_s=at_s, what=What.CONDITION, code=end.exit_code, text=text)


def _lives(state: PodState) -> bool:
    return state.phase in (Phase.INIT, Phase.RUNNING)
