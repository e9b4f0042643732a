"""What the end of mpirun meant, once its hosts have been asked: whose fault it was, and what follows. Pure."""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.model.units import counted
from trainer_launch.mpi import failure_causes
from trainer_launch.mpi.host_wait import Step, done, give_up, wait
from trainer_launch.mpi.state import Exited, Phase, Say, State

EARLY_S = 10.0  # a start that does not last so long is an early end
LATE_S = 600.0  # no daemon takes so long to start, or to fail at it
MAX_EARLY = 10  # early ends in a row that cost no budget; then something else is wrong


def settle(state: State, missing: dict[str, str], at_s: float) -> Step:
    """The hosts have been asked: now it is known what the end of mpirun meant."""
    last, running = state.last, {m.host for m in state.running}
    if last is None:
        return wait(state, at_s, state.settings.rejoin_s)
    if state.lost in running:
        missing.setdefault(str(state.lost), "mpirun has lost it")
    left = running - {m.host for m in state.members}  # they are missing because they left the job
    missing = {host: why for host, why in missing.items() if host not in left}
    is_unreached = bool(last.said.words) and last.said.rank is None
    if at_s - state.started_s >= (LATE_S if is_unreached else EARLY_S):
        state = replace(state, troubles_from_s=None)  # this start had its daemons, whatever was before
    state = replace(state, stuck=missing)
    if missing:
        state = _count_early(state, at_s, f"lost {', '.join(missing)}")
        if state.phase is Phase.DONE:
            return state, ()
        text = "; ".join(f"{host} is lost ({why})" for host, why in sorted(missing.items())[:5])
        state, actions = wait(state, at_s, state.settings.rejoin_s, *missing)
        return state, (Say(f"{text}; start {state.starts} ended; this costs no restart"), *actions)
    if state.ended_by_us or left:
        return wait(state, at_s, state.settings.rejoin_s)
    if is_unreached:
        return _unreached(state, last, at_s)
    return _failed(state, last, at_s)


def _unreached(state: State, last: Exited, at_s: float) -> Step:
    """No daemon could be started somewhere: the hosts have to let us in before it is tried again."""
    settings, since_s = state.settings, state.troubles_from_s
    since_s = at_s if since_s is None else since_s
    left_s = since_s + settings.wait_s - at_s
    said = last.said
    where = f" on {said.unreached}" if said.unreached else ""
    text = f"mpirun could not start its daemon{where}: {said.words}"
    state = _count_early(state, at_s, text)
    if state.phase is Phase.DONE or left_s <= 0:
        return (state, ()) if state.phase is Phase.DONE else give_up(state, text)
    state = replace(state, troubles_from_s=since_s, check_keys=True)
    hosts = tuple(m.host for m in state.members)
    state, actions = wait(state, at_s, left_s, *hosts)
    return state, (Say(f"{text}; waiting until all hosts accept the job's key"), *actions)


def _count_early(state: State, at_s: float, why: str) -> State:
    """What costs no budget must not go on for ever."""
    early = state.early + 1 if at_s - state.started_s < EARLY_S else 0
    state = replace(state, early=early)
    if early >= MAX_EARLY:
        return give_up(state, f"{why}, and {early} starts in a row have not lasted {EARLY_S:g} s")[0]
    return state


def _failed(state: State, last: Exited, at_s: float) -> Step:
    """Ranks failed by themselves: this costs the budget, unless to start again is in vain."""
    settings = state.settings
    is_early = at_s - state.started_s < EARLY_S
    why = failure_causes.in_vain(last, state.before if is_early else None)
    recent = tuple(t for t in state.failures_s if settings.window_s is None or t > at_s - settings.window_s)
    if settings.by_slot:
        last = failure_causes.located(last, state.running)
    text = failure_causes.sentence(last)
    if why is None and len(recent) >= settings.max_restarts:
        within = "" if settings.window_s is None else f" within {settings.window_s:g} s"
        budget = f"({counted(settings.max_restarts, 'restart')}{within})"
        why = f"the restart budget is used up {budget}" if settings.max_restarts else ""
    if why is not None:
        reason = f"not restarted, because {why}" if why else None
        state, _ = done(state, failure_causes.code_of(last), failure_causes.failure(last, reason))
        return state, (Say(f"{text}; {reason}" if reason else text),)
    state = replace(state, failures_s=(*recent, at_s), before=last if is_early else None, troubles_from_s=None)
    count = f"restart {len(recent) + 1} of {settings.max_restarts}"
    state, actions = wait(state, at_s, settings.rejoin_s)
    return state, (Say(f"{text}; {count}"), *actions)
