r"""What the supervisor does, as a pure state machine: `step(state, event) -> (state, actions)`.

state    | opened  | unres. | ended, not spawned | terminate       | drain  | forward | deadline           | empty
---------|---------|--------|--------------------|-----------------|--------|---------|--------------------|---------
WAITING  | RUNNING | say it | x                  | DONE            | DONE   | ignore  | DONE, unresolved   | x
RUNNING  | x       | ignore | last: CLEARING     | STOPPING        | relay, | relay   | kill what an ended | x
         |         |        | failed: STOPPING   |                 | note   |         | one left; none: x  |
STOPPING | x       | ignore | last: CLEARING     | next rung       | relay  | relay   | 80 %: all are told | x
         |         |        |                    |                 |        |         | 100 %: KILLING     |
CLEARING | x       | ignore | x                  | second: KILLING | note   | ignore  | KILLING            | DONE,
KILLING  | x       | ignore | note it            | ignore          | ignore | ignore  | kill again, name   | or
         |         |        |                    |                 |        |         | bound: DONE        | RUNNING
DONE     | ignore  | ignore | ignore             | ignore          | ignore | ignore  | ignore             | ignore

x raises InternalError and changes nothing. WAITING: names must resolve first. STOPPING: leaders are asked politely.
CLEARING: every leader has ended, what they left behind has SIGTERM. KILLING: all that is left has SIGKILL.
RUNNING again: what we started was killed by somebody else or hung (which stops it), and `State.again` allows it.
terminate, drain, forward: what a signal is for, by the plan; checkpoint is forward with a word in the log. Once a
drain is noted nothing is started again, no failure stops the others, and the run ends as one that was stopped.
The rungs of a stop: leaders, everyone, SIGKILL. A stop that begins with the group begins on the second rung.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from trainer_launch.model import Exit, Plan, exit_codes
from trainer_launch.model.errors import InternalError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction, action_of, name_of
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.events import KILL_AGAIN_S, Phase, State

LEADER_SHARE = 0.8  # of the grace belongs to the leaders alone; the rest to whoever they did not end
GIVE_UP_S = 3.0  # after the first SIGKILL; PID 1 must end before kubelet's own SIGKILL

Step = tuple[State, tuple[ev.Action, ...]]


def begin(plan: Plan, at_s: float) -> Step:
    """Start a plan: after its names resolve, when it waits for some, else at once."""
    names = [p.name for p in plan.processes]
    if not names or len(set(names)) < len(names):
        raise InternalError(f"a plan needs processes with distinct names, found {names}")
    state = State(plan=plan, phase=Phase.WAITING, started_at_s=at_s)
    if plan.wait_for:
        return replace(state, wait_until_s=at_s + plan.wait_s), (ev.Resolve(plan.wait_for),)
    return _spawn_all(state)


def step(state: State, event: ev.Event) -> Step:
    """Decide what an event changes and what has to be done."""
    if isinstance(event, ev.Hung):  # politely at first: a part of it may still be able to save
        return _stop(replace(state, hung=event), event.at_s) if state.phase is Phase.RUNNING else (state, ())
    return _TABLE[state.phase][_column(state, event)](state, event)


def stop(state: State, at_s: float) -> Step:
    """End what runs, politely at first, although nobody has asked for it and nothing has failed."""
    return _stop(state, at_s) if state.phase is Phase.RUNNING else (state, ())


def _column(state: State, event: ev.Event) -> int:
    if isinstance(event, ev.Signalled):
        return {SignalAction.TERMINATE: 3, SignalAction.DRAIN: 4}.get(purpose(state, event.number), 5)
    return {ev.Resolved: 0, ev.Unresolved: 1, ev.Exited: 2, ev.SpawnFailed: 2, ev.Deadline: 6, ev.Childless: 7}[
        type(event)
    ]


def purpose(state: State, number: int) -> SignalAction:
    """What a signal is for now: as long as there is nobody to hand it to, a request to stop is one."""
    if state.phase is Phase.WAITING and number in STOP_SIGNALS:
        return SignalAction.TERMINATE
    return action_of(number, state.plan.signals)


# -- waiting ----------------------------------------------------------------------------------


def _illegal(state: State, event: ev.Event) -> Step:
    raise InternalError(f"the supervisor cannot take {event!r} while {state.phase.value}")


def _ignore(state: State, _: ev.Event) -> Step:
    return state, ()


def _say_it(state: State, event: ev.Unresolved) -> Step:
    return replace(state, text=event.text), (ev.Say(event.text),)


def _open(state: State, event: ev.Resolved) -> Step:
    state, spawns = _spawn_all(replace(state, text="", wait_until_s=None))
    return state, (ev.StopResolving(), *spawns)


def _spawn_all(state: State) -> Step:
    processes = state.plan.processes
    alive = tuple(p.name for p in processes)
    return replace(state, phase=Phase.RUNNING, alive=alive), tuple(ev.Spawn(p) for p in processes)


def _unstarted(state: State, event: ev.Signalled) -> Step:
    return replace(_done(state), stop_signal=event.number, asked=1), (ev.StopResolving(),)


def _unresolved(state: State, event: ev.Deadline) -> Step:
    if _early(state.wait_until_s, event):
        return state, ()
    text = state.text or f"the resolver has not answered for {', '.join(state.plan.wait_for)}"
    return replace(_done(state), names_failed=True, text=text), (ev.StopResolving(),)


# -- ends of processes ------------------------------------------------------------------------


def _note(state: State, event: ev.Exited | ev.SpawnFailed) -> Step:
    if end_of(event).process not in state.alive:
        _illegal(state, event)
    return note(state, event)


def _end(state: State, event: ev.Exited | ev.SpawnFailed) -> Step:
    """One has ended: what it left behind is told to go, and perhaps the others too."""
    if (again := respawned(state, event)) is not None:
        return again
    state, looks = _note(state, event)
    end = state.exits[-1]
    if not state.alive:
        state, actions = _clear(state, event.at_s)
        return state, looks + actions
    bound = event.at_s + state.clear_s(event.at_s)
    state = replace(state, leftovers=(*state.leftovers, (end.process, bound)))
    actions = (*looks, ev.SignalGroup(end.process, signal.SIGTERM))
    if state.phase is not Phase.RUNNING or end.exit_code == 0 or state.stopped:
        return state, actions
    if is_innocent(end) and state.stop_at_s is None:
        return replace(state, stop_at_s=event.at_s + PATIENCE_S), actions
    state, stop = _stop(state, event.at_s)
    return state, actions + stop


def _clear(state: State, at_s: float) -> Step:
    kill_at_s = max([at_s + state.clear_s(at_s), *[bound for _, bound in state.leftovers]])
    state = replace(state, tell_all_at_s=next_look_s(state, at_s), stop_at_s=None, leftovers=())
    cleared = replace(state, phase=Phase.CLEARING, kill_at_s=kill_at_s)
    return cleared, (ask(cleared, at_s),)


def _kill_leftovers(state: State, at_s: float) -> Step:
    due = tuple(name for name, kill_at_s in state.leftovers if kill_at_s <= at_s)
    rest = tuple(entry for entry in state.leftovers if entry[0] not in due)
    return replace(state, leftovers=rest), tuple(ev.SignalGroup(name, signal.SIGKILL) for name in due)


def _tick_running(state: State, event: ev.Deadline) -> Step:
    if not _early(state.stop_at_s, event):
        return _stop(state, event.at_s)
    return _kill_leftovers(state, event.at_s) if state.leftovers else _illegal(state, event)


def _relay(state: State, event: ev.Signalled) -> Step:
    state = replace(state, handed_on=state.handed_on | {event.number})
    relayed = tuple(ev.SignalLeader(name, event.number) for name in state.alive)
    saves = purpose(state, event.number) is SignalAction.CHECKPOINT
    says = (ev.Say(f"SIG{name_of(event.number)}: the workers were told to save and continue"),) if saves else ()
    return state, (*relayed, *says)


def _drain(state: State, event: ev.Signalled) -> Step:
    state, relayed = _relay(_no_more(state, event)[0], event)
    return state, (
        *relayed,
        ev.Say(f"SIG{name_of(event.number)}: no more restarts; the launcher exits when the workers do"),
    )


def _no_more(state: State, event: ev.Signalled) -> Step:
    """Nothing is started again; what has failed before stays the cause, and what has succeeded stays so."""
    spoils = state.phase is Phase.RUNNING and state.cause is None and not state.stopped
    return replace(state, draining=True, stop_signal=event.number if spoils else state.stop_signal), ()


# -- stopping ---------------------------------------------------------------------------------


def _ask_running(state: State, event: ev.Signalled) -> Step:
    return _stop(replace(state, asked=1, stop_signal=None if state.cause else event.number), event.at_s)


def _stop(state: State, at_s: float) -> Step:
    grace_s = state.plan.grace_s
    stopping = replace(
        state,
        phase=Phase.STOPPING,
        everyone_told=False,
        stop_at_s=None,
        tell_all_at_s=at_s + LEADER_SHARE * grace_s,
        kill_at_s=at_s + grace_s,
    )
    return stopping, tuple(ev.SignalLeader(name, state.plan.stop_signal) for name in state.alive)


def _ask_stopping(state: State, event: ev.Signalled) -> Step:
    """Hurry from the second request on; the first may follow a stop that a failure began."""
    state = replace(state, asked=state.asked + 1)
    if state.asked == 1:
        return state, ()
    if state.everyone_told:
        return _kill(state, event.at_s)
    return replace(state, everyone_told=True, tell_all_at_s=None), (ev.SignalAll(signal.SIGTERM, again=True),)


def _tick_stopping(state: State, event: ev.Deadline) -> Step:
    if not _early(state.kill_at_s, event):
        return _kill(state, event.at_s)
    state, actions = _kill_leftovers(state, event.at_s)
    if _early(state.tell_all_at_s, event):
        return state, actions
    # Leaders hear it again: to an agent the second request means "now everyone". A whole group has heard it.
    tell = ev.SignalAll(signal.SIGTERM, again=not state.everyone_told)
    return replace(state, everyone_told=True, tell_all_at_s=None), (*actions, tell)


def _ask_clearing(state: State, event: ev.Signalled) -> Step:
    state = replace(state, asked=state.asked + 1)
    return (state, ()) if state.asked == 1 else _kill(state, event.at_s)


def _tick_clearing(state: State, event: ev.Deadline) -> Step:
    return tick(state, event.at_s) if _early(state.kill_at_s, event) else _kill(state, event.at_s)


# -- killing ----------------------------------------------------------------------------------


def _kill(state: State, at_s: float) -> Step:
    killing = replace(
        state,
        phase=Phase.KILLING,
        tell_all_at_s=None,
        kill_at_s=None,
        leftovers=(),
        again_at_s=at_s + KILL_AGAIN_S,
        give_up_at_s=at_s + GIVE_UP_S,
    )
    return killing, (ev.SignalAll(signal.SIGKILL, again=True),)


def _tick_killing(state: State, event: ev.Deadline) -> Step:
    """Kill again, for who was forked meanwhile; name once who is stuck in the kernel; end at the bound."""
    if _early(state.again_at_s, event):
        return state, ()
    if event.at_s >= state.give_up_at_s:
        return replace(_done(state), gave_up=True), ()
    every_s = 2 * state.again_every_s
    again_at_s = min(event.at_s + every_s, state.give_up_at_s)
    name = (ev.NameHanging(),) if every_s == 4 * KILL_AGAIN_S else ()
    state = replace(state, again_at_s=again_at_s, again_every_s=every_s)
    return state, (ev.SignalAll(signal.SIGKILL, again=True), *name)


def _childless(state: State, event: ev.Childless) -> Step:
    """Nothing is left: the end, or a new start on clean ground after a process of ours was killed."""
    if state.again is None:
        return _done(state), ()
    fresh = replace(_done(state), cause=None, hung=None, text="", again_every_s=KILL_AGAIN_S)
    fresh = fresh.started_again(event.at_s)
    count = f"restart {len(fresh.restarts_at_s)} of at most {state.plan.restarts} per hour"
    text = f"{state.again}; restarting it ({count})"
    state, spawns = _spawn_all(fresh)
    return state, (ev.Say(text), ev.Clean(), *spawns)


def _done(state: State) -> State:
    times: dict[str, Any] = dict.fromkeys(("wait_until_s", "stop_at_s", "tell_all_at_s", "kill_at_s", "again_at_s"))
    return replace(state, phase=Phase.DONE, leftovers=(), **times)


def _early(due_s: float | None, event: ev.Deadline) -> bool:
    return due_s is None or event.at_s < due_s


_Cell = Callable[[State, Any], Step]
# fmt: off
_TABLE: dict[Phase, tuple[_Cell, ...]] = {
    #                opened,   unres.,  ended,    terminate,     drain,      forward, deadline,       childless
    Phase.WAITING:  (_open,    _say_it, _illegal, _unstarted,    _unstarted, _ignore, _unresolved,    _illegal),
    Phase.RUNNING:  (_illegal, _ignore, _end,     _ask_running,  _drain,     _relay,  _tick_running,  _illegal),
    Phase.STOPPING: (_illegal, _ignore, _end,     _ask_stopping, _relay,     _relay,  _tick_stopping, _illegal),
    Phase.CLEARING: (_illegal, _ignore, _illegal, _ask_clearing, _no_more,   _ignore, _tick_clearing, _childless),
    Phase.KILLING:  (_illegal, _ignore, _note,    _ignore,       _ignore,    _ignore, _tick_killing,  _childless),
    Phase.DONE:     (_ignore,  _ignore, _ignore,  _ignore,       _ignore,    _ignore, _ignore,        _ignore),
}
# fmt: on


# -- which of several ends is the cause: the first failure, but not a victim's if the faulty one com ---


PATIENCE_S = 3.0  # that the others have to end by themselves after a victim


def end_of(event: ev.Exited | ev.SpawnFailed) -> Exit:
    """What did not start has ended too."""
    if isinstance(event, ev.SpawnFailed):
        return Exit(process=event.process, code=event.code, signal=None, at_s=event.at_s)
    return event.exit


def is_innocent(end: Exit) -> bool:
    """Whether it says itself that something else was at fault."""
    return end.exit_code == exit_codes.INFRASTRUCTURE


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


# -- daemons -----------------------------------------------------------------------------------


TOO_SOON_S = 1.0  # who ends by itself within it cannot run at all
ASK_EVERY_S = 0.25  # whether daemons are alone by now
SPARED = 0.8  # of the grace; then daemons are asked whatever runs below them


def respawned(state: State, event: ev.Exited | ev.SpawnFailed) -> Step | None:
    """Start again what has ended by itself, alone; None where that is not wanted or will not help."""
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
