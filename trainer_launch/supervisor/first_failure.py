"""Which of several ends is the cause: the first failure, but not a victim's if the faulty one comes after it. Pure.

Of several processes, those that lost a peer may end before the one that failed.
"""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.model import Exit, Plan, exit_codes
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.state import State

PATIENCE_S = 3.0  # that the others have to end by themselves after a victim


def end_of(event: ev.Exited | ev.SpawnFailed) -> Exit:
    """What did not start has ended too."""
    if isinstance(event, ev.SpawnFailed):
        return Exit(process=event.process, code=event.code, signal=None, at_s=event.at_s)
    return event.exit


def is_innocent(end: Exit) -> bool:
    """Whether it says itself that something else was at fault."""
    return end.exit_code == exit_codes.INFRASTRUCTURE


def ends_all(plan: Plan, end: Exit) -> bool:
    """Whether the others are of no use after this end."""
    return end.exit_code != 0 and plan.stop_all_on_failure


def note(state: State, event: ev.Exited | ev.SpawnFailed) -> tuple[State, tuple[ev.Action, ...]]:
    """Write an end down; the first failure before any request to stop is the cause."""
    end = end_of(event)
    alive = tuple(name for name in state.alive if name != end.process)
    state = replace(state, alive=alive, exits=(*state.exits, end))
    is_harmless = end.exit_code == 0 or state.stopped
    if is_harmless or (state.cause is not None and not _is_guiltier(state, end)):
        return state, ()
    text = event.text if isinstance(event, ev.SpawnFailed) else ""
    return replace(state, cause=end, text=text), (ev.Look(),)


def _is_guiltier(state: State, end: Exit) -> bool:
    """While a victim's end is waited out (`stop_at_s`), the others end by themselves, not by our signal."""
    return (
        state.stop_at_s is not None
        and state.cause is not None
        and is_innocent(state.cause)
        and not is_innocent(end)
    )
