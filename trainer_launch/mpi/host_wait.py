"""How an MPI job waits for its hosts, starts on them, and ends. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from trainer_launch.model import Member, exit_codes
from trainer_launch.mpi.state import Action, Await, End, Phase, Say, Start, State

Step: TypeAlias = tuple[State, tuple[Action, ...]]


def wait(state: State, at_s: float, limit_s: float, *afresh: str) -> Step:
    """Wait for hosts until `limit_s` from now; `afresh` are those to be looked at again."""
    waiting = replace(
        state,
        phase=Phase.WAITING,
        ready=state.ready - set(afresh),
        running=(),
        wait_until_s=at_s + limit_s,
        shrink_from_s=None,
        most_ready=0,
        deadline_s=None,
        admit_at_s=None,
        killed=False,
    )
    waiting, actions = look(waiting, at_s)
    if waiting.phase is Phase.WAITING or afresh:  # who is gone on without has to come by himself, too
        return waiting, (Await(state.members, afresh, state.check_keys), *actions)
    return waiting, actions


def look(state: State, at_s: float) -> Step:
    """Start when all are there, or enough of them for long enough; interrupt a job that others could join."""
    if state.phase is Phase.RUNNING and state.settings.follows:
        return replace(state, running=there(state)), ()
    if state.phase is Phase.RUNNING:
        return state if state.draining else _newcomers(state, at_s), ()
    if state.phase is not Phase.WAITING:
        return state, ()
    ready = there(state)
    if len(ready) == len(wanted(state)) and (ready or not state.settings.has_list):
        return _start(state, ready, at_s)
    state = replace(state, shrink_from_s=None) if len(ready) > state.most_ready else state
    state = replace(state, most_ready=len(ready))
    least = least_hosts(state)
    if least is None or len(ready) < least:
        return replace(state, shrink_from_s=None), ()
    since_s = at_s if state.shrink_from_s is None else state.shrink_from_s
    if at_s >= since_s + patience_s(state):
        return _start(state, ready, at_s)
    return replace(state, shrink_from_s=since_s), ()


def patience_s(state: State) -> float:
    """How long to wait for more hosts than the minimum; at first others are just coming, too."""
    settings = state.settings
    return settings.shrink_s if state.starts else max(settings.shrink_s, settings.gather_s)


def least_hosts(state: State) -> int | None:
    """With how many hosts the job may start; None: with all."""
    settings = state.settings
    return settings.min_hosts if state.starts or settings.first_hosts is None else settings.first_hosts


def wanted(state: State) -> tuple[Member, ...]:
    """The hosts that the job is for; more of them stay in reserve."""
    return state.members[: state.settings.max_hosts]


def there(state: State) -> tuple[Member, ...]:
    """Who could run the job: of those that are ready the first, so that ranks keep their order."""
    found = tuple(member for member in state.members if member.host in state.ready)
    return found[: state.settings.max_hosts]


def _start(state: State, members: tuple[Member, ...], at_s: float) -> Step:
    number = state.starts + 1
    running = replace(
        state,
        phase=Phase.RUNNING,
        running=members,
        starts=number,
        started_s=at_s,
        lost=None,
        ended_by_us=False,
        shrink_from_s=None,
        last=None,
    )
    told: tuple[Action, ...] = ()
    missing = len(wanted(state)) - len(members)
    if missing:
        absent = ", ".join(m.host for m in wanted(state) if m not in members)
        told = (Say(f"going on with {len(members)} of {len(members) + missing} hosts, without {absent}"),)
    return running, (*told, Start(members, number))


def _newcomers(state: State, at_s: float) -> State:
    """Whether hosts are ready that would be in the job if it started now; then when to let them in."""
    would_be = there(state)
    known = {m.host for m in state.running}
    come = [m.host for m in would_be if m.host not in known]
    if not come or len(would_be) <= len(state.running):
        return replace(state, admit_at_s=None)
    return state if state.admit_at_s is not None else replace(state, admit_at_s=at_s + state.settings.gather_s)


def give_up(state: State, text: str) -> Step:
    """End because hosts are missing."""
    return done(
        state,
        exit_codes.INFRASTRUCTURE,
        {"reason": "PeerLost", "message": text, "exit_code": exit_codes.INFRASTRUCTURE},
    )


def done(state: State, code: int, failure: dict[str, object] | None) -> Step:
    """End with this code, and with the failure that the termination message tell."""
    return replace(state, phase=Phase.DONE, deadline_s=None, end=End(code=code, failure=failure)), ()
