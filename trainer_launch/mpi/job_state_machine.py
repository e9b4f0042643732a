r"""What becomes of an MPI job, as a pure state machine: `step(state, event) -> (state, actions)`.

WAITING  for hosts: all of them, or after a patience as many as the minimum says; then mpirun starts -> RUNNING
RUNNING  mpirun ends with 0 -> DONE; otherwise -> ASKING. A host is lost, or others have come -> ENDING
ENDING   mpirun was told to end its ranks; too late: it is killed, and its hosts are swept. It ends -> ASKING
ASKING   who of its hosts is there? Then the cause is known -> WAITING again, or DONE
LEAVING  we were asked to stop: ranks are told, then mpirun, then nobody is asked any more -> DONE
DONE     `State.end` says how

Once ranks were told to end by themselves (`Drained`), RUNNING and ENDING lead to DONE, whatever mpirun's end meant.

Only ranks that fail by themselves cost the budget. Lost hosts, hosts that no daemon could be started on, and a
change of membership cost nothing, but a job that never lasts ends all the same.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from trainer_launch.membership import retry_policy, timeouts
from trainer_launch.membership.retry_policy import is_of_code
from trainer_launch.model import Death, Member, exit_codes
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted, listed
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.supervisor.error_lines import error_name, headline

ANSWER_S = 1.0  # beyond `JobSettings.ask_s`, for the answer to come
END_S = 4.0  # for mpirun to end its ranks: it gives them a second or two itself
LEADER_SHARE = 0.7  # of the grace belongs to the ranks alone
_GATHER_S = 3.0  # for other hosts to come too, before the job is interrupted for one


def begin(settings: st.JobSettings, members: tuple[Member, ...], at_s: float) -> Step:
    """Wait for hosts; a job without any runs here."""
    state = st.State(settings=settings, phase=st.Phase.WAITING, members=members, stuck={}, started_s=at_s)
    return wait(state, at_s, settings.wait_s)


def step(state: st.State, event: st.Event) -> Step:
    """Decide what an event changes and what has to be done."""
    if state.phase is st.Phase.DONE:
        return state, ()
    match event:
        case st.Hosts():
            return _hosts(state, event)
        case st.Ready():
            return look(replace(state, ready=event.hosts, stuck=event.stuck), event.at_s)
        case st.Exited():
            return _exited(state, event)
        case st.Lost():
            return _lost(state, event)
        case st.Answered() if state.phase is st.Phase.ASKING:
            return settle(state, dict(event.missing), event.at_s)
        case st.Asked():
            return _asked(state, event)
        case st.Drained():
            is_idle = state.phase in (st.Phase.WAITING, st.Phase.ASKING)
            draining = replace(state, draining=True, admit_at_s=None)
            return done(state, exit_codes.STOPPED, None) if is_idle else (draining, ())
        case st.Tick():
            return _tick(state, event.at_s)
    return state, ()


def due_s(state: st.State) -> float | None:
    """When to tick next."""
    times = [state.deadline_s, state.admit_at_s if state.phase is st.Phase.RUNNING else None]
    if state.phase is st.Phase.WAITING:
        times.append(state.wait_until_s)
        if state.shrink_from_s is not None:
            times.append(state.shrink_from_s + patience_s(state))
    return min((at_s for at_s in times if at_s is not None), default=None)


# -- hosts and ends ------------------------------------------------------------


def _hosts(state: st.State, event: st.Hosts) -> Step:
    if event.members == state.members:
        return state, ()
    gone = {m.host for m in state.running} - {m.host for m in event.members}
    state = replace(state, members=event.members)
    told = st.Say(f"the list of hosts has changed: {counted(len(event.members), 'host')} now")
    if state.phase is st.Phase.RUNNING and gone and not (state.settings.follows or state.draining):
        least = state.settings.min_hosts
        if least is not None and len(state.running) - len(gone) >= least:
            return _end(state, event.at_s, (told, st.Say(f"{', '.join(sorted(gone))} left the job")))
    state, actions = look(state, event.at_s)
    return state, (told, st.Await(event.members, (), state.check_keys), *actions)


def _exited(state: st.State, event: st.Exited) -> Step:
    if state.phase is st.Phase.LEAVING or state.draining:
        return done(state, exit_codes.STOPPED, None)
    if event.code == 0 and state.phase is st.Phase.RUNNING:
        return done(state, 0, None)
    hosts = tuple(m.host for m in state.running)
    lost = state.lost or _host_named(state, event.said.lost)
    ask_s = state.settings.ask_s
    sweep: tuple[st.Action, ...] = (st.Sweep(tuple(h for h in hosts if h != lost)),) if state.killed else ()
    asking = replace(state, phase=st.Phase.ASKING, last=event, lost=lost, deadline_s=event.at_s + ask_s + ANSWER_S)
    hosts = tuple(host for host in hosts if host != lost)  # of whom we do not know yet
    if not hosts:
        settled, actions = settle(asking, {}, event.at_s)
        return settled, (*sweep, *actions)
    return asking, (*sweep, st.Ask(hosts, ask_s))


# -- ending, and being asked to ---------------------------------------------------------------


def _end(state: st.State, at_s: float, told: tuple[st.Action, ...]) -> Step:
    """Let mpirun end its ranks, for a reason that is not theirs."""
    ending = replace(state, phase=st.Phase.ENDING, ended_by_us=True, deadline_s=at_s + END_S)
    return ending, (*told, st.Signal(signal.SIGTERM))


def _lost(state: st.State, event: st.Lost) -> Step:
    """mpirun ends its ranks by itself when it says so; it gets as long as if we had asked."""
    lost = _host_named(state, event.host)
    if state.phase is not st.Phase.RUNNING or lost not in [m.host for m in state.running]:
        return state, ()
    ending = replace(state, phase=st.Phase.ENDING, lost=lost, deadline_s=event.at_s + END_S)
    asks = () if event.said else (st.Signal(signal.SIGTERM),)
    return ending, (st.Say(f"{event.host} is lost; ending the ranks on all hosts"), *asks)


def _asked(state: st.State, event: st.Asked) -> Step:
    grace_s = state.settings.grace_s
    if state.phase in (st.Phase.WAITING, st.Phase.ASKING):
        return done(state, exit_codes.STOPPED, None)
    if state.phase is st.Phase.LEAVING:  # again: now everyone
        return replace(state, deadline_s=event.at_s), ()
    leaving = replace(state, phase=st.Phase.LEAVING, asked=True, killed=False)
    if state.phase is st.Phase.ENDING:
        return replace(leaving, deadline_s=event.at_s + min(END_S, grace_s)), ()
    leaving = replace(leaving, deadline_s=event.at_s + LEADER_SHARE * grace_s)
    return leaving, (st.TellRanks(tuple(m.host for m in state.running)),)


def _tick(state: st.State, at_s: float) -> Step:
    if state.phase is st.Phase.WAITING:
        if at_s >= state.wait_until_s:
            return give_up(state, _who_is_missing(wanted_hosts(state), state.ready, state.stuck, state.lost))
        return look(state, at_s)
    if state.phase is st.Phase.RUNNING and state.admit_at_s is not None and at_s >= state.admit_at_s:
        known = {m.host for m in state.running}
        come = ", ".join(m.host for m in there(state) if m.host not in known)
        return _end(state, at_s, (st.Say(f"{come} joins; restarting the ranks on all hosts"),))
    if state.deadline_s is None or at_s < state.deadline_s:
        return state, ()
    if state.phase is st.Phase.ASKING:
        return settle(state, {}, at_s)
    if state.phase is st.Phase.LEAVING and not state.killed:
        again = replace(state, killed=True, deadline_s=at_s + END_S)
        return again, (st.Signal(signal.SIGTERM),)
    if state.phase in (st.Phase.ENDING, st.Phase.LEAVING):
        killed = replace(state, killed=True, deadline_s=at_s + 1.0)
        return killed, (st.Say("mpirun has not ended its ranks; killing it"), st.Signal(signal.SIGKILL))
    return state, ()


def _host_named(state: st.State, name: str | None) -> str | None:
    """The host as the list has it: mpirun may have cut its domain off."""
    if name is None:
        return None
    hosts = [m.host for m in state.running]
    short = name.partition(".")[0]
    return name if name in hosts else next((h for h in hosts if h.partition(".")[0] == short), name)


# -- the end of mpirun -------------------------------------------------------------------------


EARLY_S = 10.0  # a start that does not last so long is an early end
LATE_S = 600.0  # no daemon takes so long to start, or to fail at it
MAX_EARLY = 10  # early ends in a row that cost no budget; then something else is wrong


def settle(state: st.State, missing: dict[str, str], at_s: float) -> Step:
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
        if state.phase is st.Phase.DONE:
            return state, ()
        text = "; ".join(f"{host} is lost ({why})" for host, why in sorted(missing.items())[:5])
        state, actions = wait(state, at_s, state.settings.rejoin_s, *missing)
        return state, (st.Say(f"{text}; start {state.starts} ended; this costs no restart"), *actions)
    if state.ended_by_us or left:
        return wait(state, at_s, state.settings.rejoin_s)
    if is_unreached:
        return _unreached(state, last, at_s)
    return _failed(state, last, at_s)


def _unreached(state: st.State, last: st.Exited, at_s: float) -> Step:
    """No daemon could be started somewhere: the hosts have to let us in before it is tried again."""
    settings, since_s = state.settings, state.troubles_from_s
    since_s = at_s if since_s is None else since_s
    left_s = since_s + settings.wait_s - at_s
    said = last.said
    where = f" on {said.unreached}" if said.unreached else ""
    text = f"mpirun could not start its daemon{where}: {said.words}"
    state = _count_early(state, at_s, text)
    if state.phase is st.Phase.DONE or left_s <= 0:
        return (state, ()) if state.phase is st.Phase.DONE else give_up(state, text)
    state = replace(state, troubles_from_s=since_s, check_keys=True)
    hosts = tuple(m.host for m in state.members)
    state, actions = wait(state, at_s, left_s, *hosts)
    return state, (st.Say(f"{text}; waiting until all hosts accept the job's key"), *actions)


def _count_early(state: st.State, at_s: float, why: str) -> st.State:
    """What costs no budget must not go on for ever."""
    early = state.early + 1 if at_s - state.started_s < EARLY_S else 0
    state = replace(state, early=early)
    if early >= MAX_EARLY:
        return give_up(state, f"{why}, and {early} starts in a row have not lasted {EARLY_S:g} s")[0]
    return state


def _failed(state: st.State, last: st.Exited, at_s: float) -> Step:
    """Ranks failed by themselves: this costs the budget, unless a restart will not help."""
    settings, last = state.settings, _without_who_was_cut_off(last)
    is_early = at_s - state.started_s < timeouts.START_S
    record = _record_of(last, state.starts)
    why = retry_policy.why_not_again(record, state.before, is_early=is_early)
    if settings.by_slot:
        last = _located(last, state.running)
    text = _how_it_ended(last)
    spent = retry_policy.why_spent(state.failures, settings.max_restarts)
    if why is not None or spent is not None:
        told = why or (spent if settings.max_restarts else None)  # who allows no restart needs no reason
        reason = f"not restarted, because {told}" if told else None
        state, _ = done(state, code_of(last), failure_note(last, reason))
        return state, (st.Say(f"{text}; {reason}" if reason else text),)
    state = replace(state, failures=state.failures + 1, before=record if is_early else None, troubles_from_s=None)
    count = f"restart {state.failures} of {settings.max_restarts}"
    state, actions = wait(state, at_s, settings.rejoin_s)
    return state, (st.Say(f"{text}; {count}"), *actions)


# -- ends of mpirun in words -------------------------------------------------------------------


_SHOWN = 8  # hosts that one sentence names
_TAG = re.compile(r"\s*(?:\[[^\]\s]{1,80}\](?:<std(?:err|out)>)?:? *)?")  # before a line, by mpirun or torch
_CUT_OFF = 14  # MPI_ERR_UNKNOWN, with which Open MPI 5 ends a rank that lost another one


def _how_it_ended(last: st.Exited) -> str:
    said = last.said
    if said.cut_off:
        return "a rank lost another one, which had ended or was cut off before; mpirun does not say which"
    who = "mpirun" if said.rank is None else f"rank {said.rank}"
    where = f" on {said.host}" if said.host else ""
    if said.signal is not None:
        return f"{who} was ended by {signal_name(said.signal)}{where}"
    return f"{who} ended with exit code {_code(last)}{where}"


def _without_who_was_cut_off(last: st.Exited) -> st.Exited:
    """Nobody is named where only the end of a rank was told that had lost the failed one."""
    said = last.said
    if not said.cut_off:
        return last
    if said.signal is not None or _code(last) != _CUT_OFF or _error_of(last):
        return replace(last, said=replace(said, cut_off=False))  # who failed by itself is known
    return replace(last, said=Said(exit_code=exit_codes.INFRASTRUCTURE, cut_off=True))


def _located(last: st.Exited, hosts: Sequence[Member]) -> st.Exited:
    """With the host of the first failed rank, where mpirun does not tell it: ranks fill the slots in order."""
    rank = last.said.rank
    if rank is None or last.said.host is not None:
        return last
    for member in hosts:
        if member.slots is None:
            return last
        if rank < member.slots:
            return replace(last, said=replace(last.said, host=member.host))
        rank -= member.slots
    return last


def failure_note(last: st.Exited, why_not_again: str | None) -> dict[str, object]:
    """What PID 1 is told."""
    said = last.said
    if said.cut_off:
        told = {"reason": "PeerLost", "message": _how_it_ended(last), "exit_code": _code(last)}
        return {**told, "lines": list(last.lines), "why_not_again": why_not_again}
    return {
        "rank": said.rank,
        "exit_code": _code(last),
        "signal": said.signal,
        "hostname": said.host,
        "lines": list(last.lines),
        "why_not_again": why_not_again,
    }


def code_of(last: st.Exited) -> int:
    """The exit code that says it: the first failed rank's own."""
    return exit_codes.of_signal(last.said.signal) if last.said.signal is not None else _code(last)


def _record_of(last: st.Exited, attempt: int) -> Death:
    """This end for the retry policy."""
    said, message = last.said, _error_of(last)
    return Death(
        attempt=attempt,
        rank=said.rank,
        code=_code(last),
        signal=said.signal,
        error=error_name(message),
        message=message.strip(),
    )


def _error_of(last: st.Exited) -> str:
    """The last error of the ranks; one of the code counts before what it has done to other ranks. "": none."""
    lines = [_TAG.sub("", line, count=1) for line in last.lines]
    of_code = (line for line in reversed(lines) if is_of_code(error_name(line), line))
    return next(of_code, None) or headline(lines, only_named=True)


def _who_is_missing(
    expected: Sequence[Member], ready: Collection[str], stuck: Mapping[str, str], lost: str | None
) -> str:
    absent = [member.host for member in expected if member.host not in ready]
    shown = listed([f"{host}: {stuck.get(host, 'not looked for yet')}" for host in absent], _SHOWN, "; ")
    what = f"{lost} did not come back: " if lost in absent else ""
    return f"{what}{len(expected) - len(absent)} of {counted(len(expected), 'host')} ready; missing: {shown}"


def _code(last: st.Exited) -> int:
    return last.code if last.said.exit_code is None else last.said.exit_code


# -- waiting for hosts, starting on them, and the end ------------------------------------------


Step: TypeAlias = tuple[st.State, tuple[st.Action, ...]]


def wait(state: st.State, at_s: float, limit_s: float, *afresh: str) -> Step:
    """Wait for hosts until `limit_s` from now; `afresh` are those to be looked at again."""
    waiting = replace(
        state,
        phase=st.Phase.WAITING,
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
    if waiting.phase is st.Phase.WAITING or afresh:  # who is gone on without has to come by himself, too
        return waiting, (st.Await(state.members, afresh, state.check_keys), *actions)
    return waiting, actions


def look(state: st.State, at_s: float) -> Step:
    """Start when all are there, or enough of them for long enough; interrupt a job that others could join."""
    if state.phase is st.Phase.RUNNING and state.settings.follows:
        return replace(state, running=there(state)), ()
    if state.phase is st.Phase.RUNNING:
        return state if state.draining else _newcomers(state, at_s), ()
    if state.phase is not st.Phase.WAITING:
        return state, ()
    ready = there(state)
    if len(ready) == len(wanted_hosts(state)) and (ready or not state.settings.has_list):
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


def patience_s(state: st.State) -> float:
    """How long to wait for more hosts than the minimum; at first others are just coming, too."""
    settings = state.settings
    return settings.shrink_s if state.starts else max(settings.shrink_s, _GATHER_S)


def least_hosts(state: st.State) -> int | None:
    """With how many hosts the job may start; None: with all."""
    settings = state.settings
    return settings.min_hosts if state.starts or settings.first_hosts is None else settings.first_hosts


def wanted_hosts(state: st.State) -> tuple[Member, ...]:
    """The hosts that the job is for; more of them stay in reserve."""
    return state.members[: state.settings.max_hosts]


def there(state: st.State) -> tuple[Member, ...]:
    """Who could run the job: of those that are ready the first, so that ranks keep their order."""
    found = tuple(member for member in state.members if member.host in state.ready)
    return found[: state.settings.max_hosts]


def _start(state: st.State, members: tuple[Member, ...], at_s: float) -> Step:
    number = state.starts + 1
    running = replace(
        state,
        phase=st.Phase.RUNNING,
        running=members,
        starts=number,
        started_s=at_s,
        lost=None,
        ended_by_us=False,
        shrink_from_s=None,
        last=None,
    )
    told: tuple[st.Action, ...] = ()
    missing = len(wanted_hosts(state)) - len(members)
    if missing:
        absent = ", ".join(m.host for m in wanted_hosts(state) if m not in members)
        told = (st.Say(f"going on with {len(members)} of {len(members) + missing} hosts, without {absent}"),)
    return running, (*told, st.Start(members, number))


def _newcomers(state: st.State, at_s: float) -> st.State:
    """Whether hosts are ready that would be in the job if it started now; then when to let them in."""
    would_be = there(state)
    known = {m.host for m in state.running}
    come = [m.host for m in would_be if m.host not in known]
    if not come or len(would_be) <= len(state.running):
        return replace(state, admit_at_s=None)
    return state if state.admit_at_s is not None else replace(state, admit_at_s=at_s + _GATHER_S)


def give_up(state: st.State, text: str) -> Step:
    """End because hosts are missing."""
    return done(
        state,
        exit_codes.INFRASTRUCTURE,
        {"reason": "PeerLost", "message": text, "exit_code": exit_codes.INFRASTRUCTURE},
    )


def done(state: st.State, code: int, failure: dict[str, object] | None) -> Step:
    """End with this code, and with the failure that the termination message tells."""
    return replace(state, phase=st.Phase.DONE, deadline_s=None, end=st.End(code=code, failure=failure)), ()
