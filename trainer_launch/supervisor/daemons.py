"""A plan whose processes serve others, such as sshd: they come back when they crash, and stop after those. Pure.

What such a process has started outlives its crash. A request to stop reaches the ranks at once, with all of the
grace to save, and the daemons above them when their ranks have ended: an MPI daemon would kill them a second later.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.state import Phase, State

TOO_SOON_S = 1.0  # who ends by itself within it cannot run at all
ASK_EVERY_S = 0.25  # whether daemons are alone by now
SPARED = 0.8  # of the grace; then daemons are asked whatever runs below them

Step = tuple[State, tuple[ev.Action, ...]]


def respawned(state: State, event: ev.Exited | ev.SpawnFailed) -> Step | None:
    """Start again what has ended by itself, alone; None where that is not wanted or would be in vain."""
    wanted = state.phase is Phase.RUNNING and not state.asked and not state.draining
    recent = state.restarts_before(event.at_s)
    if not wanted or isinstance(event, ev.SpawnFailed) or len(recent) >= state.plan.respawns:
        return None
    end = event.exit
    began_s = max((state.started_at_s, *recent))
    if end.signal is None and event.at_s - began_s < TOO_SOON_S:
        return None
    process = next(process for process in state.plan.processes if process.name == end.process)
    count = f"restart {len(recent) + 1} of at most {state.plan.respawns} per hour"
    text = f"restarting {end.process} ({count}); its child processes keep running"
    return state.started_again(event.at_s), (ev.Say(text), ev.Spawn(process))


def next_look_s(state: State, at_s: float) -> float | None:
    """When to look again whether daemons are alone."""
    return at_s + ASK_EVERY_S if state.plan.daemons else None


def ask(state: State, at_s: float) -> ev.SignalAll:
    """SIGTERM to all who have not had it; to daemons only once they are alone, or most of the grace is over."""
    patient = state.kill_at_s is not None and at_s < state.kill_at_s - (1 - SPARED) * state.plan.grace_s
    return ev.SignalAll(signal.SIGTERM, sparing=state.plan.daemons if patient else frozenset())


def tick(state: State, at_s: float) -> Step:
    """Ask again, when it is time."""
    if state.tell_all_at_s is None or at_s < state.tell_all_at_s:
        return state, ()
    return replace(state, tell_all_at_s=next_look_s(state, at_s)), (ask(state, at_s),)
