"""What PID 1 does about its torch workers, as a pure state machine: `step(state, event) -> (state, actions)`.

phase    | leaves it when
---------|--------------------------------------------------------------------------------------------------------
WAITING  | node 0's name resolves: JOINING; it does not in time: ENDED
JOINING  | Formed: FORMED; GiveUp, Finished: ENDED
FORMED   | Go, and workers can be started: RUNNING; Restart: JOINING
RUNNING  | the generation is over: all ended with 0: DONE; a failure, Restart, no coordinator: JOINING
DONE     | Finished: ENDED; Restart: JOINING (another node's workers failed after ours had ended)
ENDED    | never

A request to stop ends every phase; while workers run, they have their grace. Inside RUNNING, the supervisor's own
machine starts, stops and clears the workers of one generation: `State.run`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Connected, Disconnected, News
from trainer_launch.model import Exit, FailureRecord, Membership, Plan, Process, Workers, exit_codes
from trainer_launch.model.errors import InternalError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction, action_of
from trainer_launch.pytorch import worker_processes
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import state_machine
from trainer_launch.supervisor.error_lines import error_name, recognise

# -- what may happen to it, beside the supervisor's events ---------------------------------------


class Heard(Struct, frozen=True):
    """The coordinator said something, or is out of reach, or is back."""

    at_s: float
    news: News


class Prepared(Struct, frozen=True):
    """Workers, and a store, can be started; this also comes once without being asked for."""

    at_s: float
    attempt_folder: str = ""  # for error files and logs, a folder for each worker; "": none


class CannotStart(Struct, frozen=True):
    """Workers or a store cannot be started, and never will be."""

    at_s: float
    text: str
    code: int  # the exit code that says it


class StoreOpened(Struct, frozen=True):
    """The store process of this generation is there."""

    at_s: float
    host: str  # where the other nodes reach it
    port: int


class StoreEnded(Struct, frozen=True):
    """The store process has ended, and not by us."""

    at_s: float
    exit: Exit


class WorkerEnded(Struct, frozen=True):
    """A worker has ended, with what it said of it in its error file."""

    exit: Exit
    death: FailureRecord
    said_first: bool = False  # its error was there before the coordinator ended the generation


Event = Heard | Prepared | CannotStart | StoreOpened | StoreEnded | WorkerEnded | ev.Event

# -- what it may do, beside the supervisor's actions ---------------------------------------------


class Tell(Struct, frozen=True):
    """Send this to the coordinator."""

    message: say.FromNode


class Prepare(Struct, frozen=True):
    """Make sure of what starts workers; answered by Prepared or CannotStart."""


class HostStore(Struct, frozen=True):
    """Start the generation's store process; answered by StoreOpened or CannotStart."""


class CloseStore(Struct, frozen=True):
    """End the store process, if there is one."""


class StartWorkers(Struct, frozen=True):
    """Start all workers of a generation; a failure comes back as `SpawnFailed`."""

    processes: tuple[Process, ...]


Action = Tell | Prepare | HostStore | CloseStore | StartWorkers | ev.Action


# -- what a worker's end means ------------------------------------------------------------------


class Ends(Struct, frozen=True):
    """How this node's workers of one generation ended before anybody stopped them."""

    finished: tuple[int, ...] = ()  # ranks that ended with exit code 0
    failed: bool = False  # whether one failed for a reason of its own


UNKNOWN_ENDS = Ends(failed=True)  # as long as nobody has looked, nothing is proved
_OUR_SIGNALS = (signal.SIGTERM, signal.SIGKILL)  # by which workers are ended


def lost_peer(death: FailureRecord) -> bool:
    """Whether a worker says itself that its connection to a peer was closed, also if we ended it after that."""
    said = death.message if death.signal in (None, *_OUR_SIGNALS) else None
    found = recognise(said or "")
    return found is not None and found[0].reason == "PeerLost"


def failed_message(death: FailureRecord, generation: int, ends: Ends) -> say.Failed:
    """What the coordinator is told, which decides whether a restart can help."""
    said, is_peers = death.message or "", lost_peer(death) and not ends.failed
    how = (death.rank, death.exit_code, death.signal, said, error_name(said))
    cause = None if death.reason != "ProgramError" else death.reason  # what a restart cannot mend
    failed = say.Failed(generation, *how, lost_peer=is_peers, finished=ends.finished, cause=cause)
    return replace(failed, fault=death.fault, evidence=death.evidence)


def ends_of(deaths: Iterable[FailureRecord]) -> Ends:
    """Sum up deaths in the order they were seen.

    Who leaves with 0 after the first failure may have been asked to. Who was killed after it tells nothing, unless
    an error was written first.
    """
    finished: list[int] = []
    own = lost = False
    for death in deaths:
        if death.exit_code == 0:
            if death.rank is not None and not (lost or own):
                finished.append(death.rank)
        elif lost_peer(death):
            lost = True
        else:
            ended_by_us = (lost or own) and death.signal in _OUR_SIGNALS
            own = own or death.message is not None or not ended_by_us
    return Ends(tuple(finished[: say.MAX_RANKS]), own)


# -- the group as a whole ------------------------------------------------------------------------


Step = tuple["State", tuple[Action, ...]]


class Phase(Enum):
    """Where the group is; see the drawing."""

    WAITING = "waiting"
    JOINING = "joining"
    FORMED = "formed"
    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"


class Ending(Enum):
    """Why a generation is being ended."""

    FAILED = "failed"  # here
    OVER = "over"  # the coordinator says so, or is out of reach


class Refusal(Struct, frozen=True):
    """Nothing can be started here."""

    text: str
    code: int


class State(Struct, frozen=True, kw_only=True):
    """Everything the group knows; times are monotonic seconds, None: not set."""

    plan: Plan
    incarnation: str  # this process, among all that were or will be this node
    phase: Phase
    started_at_s: float
    away_since_s: float | None  # None while the coordinator is there
    wait_until_s: float | None = None  # for node 0's name
    unresolved: str = ""  # what the resolver says of it
    formed: say.Formed | None = None
    go: say.Go | None = None
    was_prepared: bool = False  # workers could be started once, which the coordinator knows
    is_prepared: bool = False  # for this generation
    attempt_folder: str = ""  # of this generation's workers
    has_store: bool = False  # this node has opened this generation's store
    seen: int = 0  # the last generation that this node was in
    starts: int = 0  # generations whose workers were started
    run: ev.State | None = None  # of this generation's workers, or the last one's
    ending: Ending | None = None
    deaths: tuple[FailureRecord, ...] = ()  # of this generation, in the order they were seen
    failure: FailureRecord | None = None  # the first of them, or what else has ended the generation here
    is_told: bool = False  # the coordinator knows of it
    own: FailureRecord | None = None  # the failure here that ended the last generation
    ends: Ends = UNKNOWN_ENDS  # of the last generation
    end: say.GiveUp | say.Finished | Refusal | None = None
    stop_signal: int | None = None  # what asked this pod to stop, or said that nothing is to be started again

    @property
    def workers(self) -> Workers:
        """The plan's."""
        if self.plan.workers is None:
            raise InternalError("a worker group needs a plan with workers")
        return self.plan.workers

    @property
    def membership(self) -> Membership:
        """The plan's."""
        if self.plan.membership is None:
            raise InternalError("a worker group needs a plan with a membership")
        return self.plan.membership

    @property
    def deadline_s(self) -> float | None:
        """When `step` wants a `Deadline`, None: never."""
        inner = self.run.deadline_s if self.run is not None and self.phase is Phase.RUNNING else None
        times = (self.wait_until_s, inner, self._away_until_s)
        return min([at_s for at_s in times if at_s is not None], default=None)

    @property
    def _away_until_s(self) -> float | None:
        """How long the coordinator may stay away."""
        is_over = self.ending is not None or self.stop_signal is not None
        if self.away_since_s is None or self.phase in (Phase.WAITING, Phase.ENDED) or is_over:
            return None
        patience_s = {Phase.RUNNING: timeouts.BLIP_S, Phase.DONE: timeouts.GONE_S}
        return self.away_since_s + patience_s.get(self.phase, self.membership.patience_s)


def begin(plan: Plan, incarnation: str, at_s: float) -> Step:
    """Join the job, once node 0's name resolves where that is waited for."""
    phase = Phase.WAITING if plan.wait_for else Phase.JOINING
    state = State(plan=plan, incarnation=incarnation, phase=phase, started_at_s=at_s, away_since_s=at_s)
    state = replace(state, was_prepared=not state.workers.forks)
    if plan.wait_for:
        return replace(state, wait_until_s=at_s + plan.wait_s), (ev.Resolve(plan.wait_for),)
    return state, (_join(state),)


def step(state: State, event: Event) -> Step:
    """Decide what an event changes and what has to be done."""
    if state.phase is Phase.ENDED:
        return state, ()
    handle = _HANDLERS.get(type(event))
    if handle is not None:
        return handle(state, event)
    if isinstance(event, ev.Exited | ev.Childless) and state.phase is Phase.RUNNING:
        return _inside(state, event)
    return state, ()


def _names_resolved(state: State, event: ev.Resolved) -> Step:
    away_since_s = None if state.away_since_s is None else event.at_s
    state = replace(state, phase=Phase.JOINING, wait_until_s=None, away_since_s=away_since_s, unresolved="")
    return state, (ev.StopResolving(), _join(state))


# -- the coordinator --------------------------------------------------------------------------


def _hear(state: State, heard: Heard) -> Step:
    match heard.news:
        case Disconnected():
            since_s = heard.at_s if state.away_since_s is None else state.away_since_s
            return replace(state, away_since_s=since_s), ()
        case Connected():
            state = replace(state, away_since_s=None)
            again = state.phase is Phase.DONE  # it may have been lost with the connection
            return state, (Tell(say.Done(state.seen)),) if again else ()
        case say.Formed() as formed if state.phase is Phase.JOINING:
            return _form(state, formed)
        case say.Go() as go if state.phase is Phase.FORMED and state.formed:
            if go.generation == state.formed.generation:
                return _start(replace(state, go=go), heard.at_s)
        case say.Restart() as restart:
            return _over(state, restart, heard.at_s)
        case say.GiveUp() | say.Finished() as end:
            return _break_off(replace(state, end=end), heard.at_s)
        case say.Quarantined(reason=reason):
            state = replace(state, end=say.GiveUp(reason, exit_code=exit_codes.INFRASTRUCTURE, cause="Quarantined"))
            return _break_off(state, heard.at_s)
        case say.Refused(reason=reason, retry=False):
            state = replace(state, end=say.GiveUp(f"the coordinator refuses this node: {reason}"))
            return _break_off(state, heard.at_s)
    return state, ()


def _join(state: State) -> Tell:
    ends, proof = state.ends, next((one for one in state.deaths if one.fault == say.DEVICE), FailureRecord())
    join = say.Join(state.incarnation, state.seen, ends.finished, ends.failed, state.was_prepared)
    return Tell(replace(join, fault=proof.fault, evidence=proof.evidence))


def _form(state: State, formed: say.Formed) -> Step:
    """This node is in: who hosts the store opens it, everybody gets ready to start workers."""
    state = replace(state, phase=Phase.FORMED, formed=formed, seen=formed.generation, ends=UNKNOWN_ENDS, deaths=())
    return state, (Prepare(),)


def _prepared(state: State, event: Prepared) -> Step:
    was_prepared, state = state.was_prepared, replace(state, was_prepared=True)
    if state.phase is Phase.JOINING and not was_prepared:  # a generation that runs ends for this node only now
        return state, (_join(state),)
    if state.phase is not Phase.FORMED or state.formed is None or state.has_store:
        return state, ()
    state = replace(state, is_prepared=True, attempt_folder=event.attempt_folder)
    if state.formed is not None and state.formed.is_store_host:
        return state, (HostStore(),)
    return _start(state, event.at_s)


def _cannot_start(state: State, event: CannotStart) -> Step:
    return _end(replace(state, end=Refusal(event.text, event.code)), say.Leave(event.text[:200]))


def _store_opened(state: State, opened: StoreOpened) -> Step:
    if state.phase is not Phase.FORMED or state.formed is None:
        return state, ()
    return replace(state, has_store=True), (Tell(say.Store(state.formed.generation, opened.host, opened.port)),)


def _over(state: State, restart: say.Restart, at_s: float) -> Step:
    """The coordinator ends the generation: what our workers did before we stop them may tell why."""
    if state.phase is Phase.RUNNING:
        if state.stop_signal is not None or (state.ending is Ending.FAILED and state.is_told):
            return state, ()  # the workers end by themselves, or have been told to
        return _stop(replace(state, ending=Ending.OVER, failure=None, ends=_ends(state)), at_s)
    if state.phase is Phase.DONE:
        return _rejoin(replace(state, ends=_ends(state)))
    return _rejoin(state) if state.phase in (Phase.JOINING, Phase.FORMED) else (state, ())


def _ends(state: State) -> Ends:
    """How this generation's workers ended before anybody stopped them; who was sent a signal proves nothing."""
    was_sent = state.stop_signal is not None or (state.run is not None and bool(state.run.handed_on))
    return Ends() if was_sent else ends_of(state.deaths)


def _rejoin(state: State) -> Step:
    state = replace(state, phase=Phase.JOINING, formed=None, go=None, run=None, is_prepared=False, has_store=False)
    return state, (CloseStore(), _join(state), ev.Clean())


def _break_off(state: State, at_s: float) -> Step:
    """The job is over: also here, once nothing runs."""
    if state.phase is Phase.RUNNING:
        state = replace(state, ending=state.ending or Ending.OVER)
        return _stop(state, at_s) if state.stop_signal is None else (state, ())
    return _end(state)


def _end(state: State, word: say.Leave | None = None) -> Step:
    stop = (ev.StopResolving(),) if state.phase is Phase.WAITING else ()
    told = () if word is None else (Tell(word),)
    return replace(state, phase=Phase.ENDED, wait_until_s=None), (*stop, *told, CloseStore())


# -- workers ----------------------------------------------------------------------------------


def _start(state: State, at_s: float) -> Step:
    """Start the workers once the store is open and they can be."""
    formed, go = state.formed, state.go
    if formed is None or go is None or not state.is_prepared:
        return state, ()
    processes = worker_processes.of(state.workers, state.membership, formed, go, state.attempt_folder)
    plan = replace(state.plan, processes=processes, wait_for=(), restarts=0)
    run, actions = state_machine.begin(plan, at_s)
    state = replace(state, phase=Phase.RUNNING, run=run, starts=state.starts + 1, ending=None, deaths=())
    state = replace(state, failure=None, is_told=False, own=None)
    # All that is to be started is one action.
    starts = tuple(action.process for action in actions if isinstance(action, ev.Spawn))
    others = tuple(action for action in actions if not isinstance(action, ev.Spawn))
    return state, (StartWorkers(starts), *others) if starts else others


def _inside(state: State, event: ev.Event) -> Step:
    """What concerns the workers of this generation alone."""
    if state.run is None:
        return state, ()
    run, actions = state_machine.step(state.run, event)
    state, more = _settle(replace(state, run=run), event.exit.at_s if isinstance(event, ev.Exited) else event.at_s)
    return state, (*actions, *more)


def _stop(state: State, at_s: float) -> Step:
    if state.run is None:
        return state, ()
    run, actions = state_machine.stop(state.run, at_s)
    return replace(state, run=run), actions


def _worker_ended(state: State, ended: WorkerEnded) -> Step:
    state = replace(state, deaths=(*state.deaths, ended.death))
    note = _note_cause if ended.said_first and state.ending is Ending.OVER else _note_failure
    state, told = note(state, ended.death) if ended.exit.exit_code != 0 else (state, ())
    state, actions = _inside(state, ev.Exited(ended.exit.at_s, ended.exit))
    return state, (*told, *actions)


def _note_failure(state: State, death: FailureRecord) -> Step:
    """The first failure ends the generation; who only lost a peer may not be the first that failed."""
    if state.ending is not None or state.stop_signal is not None:
        if state.failure is not None and lost_peer(state.failure) and not state.is_told and _is_guiltier(death):
            return _tell_failure(replace(state, failure=_by_itself(death)))
        return state, ()
    state = replace(state, ending=Ending.FAILED, failure=death)
    return (state, ()) if lost_peer(death) else _tell_failure(state)


def _note_cause(state: State, death: FailureRecord) -> Step:
    """An error that was there before we ended its worker: whom it cut off on another node has only died sooner."""
    if state.is_told or state.stop_signal is not None or death.message is None or lost_peer(death):
        return state, ()
    own, ends = _by_itself(death), replace(state.ends, failed=True)
    told = Tell(failed_message(own, state.seen, ends))
    return replace(state, own=own, ends=ends, is_told=True), (told,)


def _is_guiltier(death: FailureRecord) -> bool:
    """Whether it failed for a reason of its own, not because we had asked it to end."""
    return not lost_peer(death) and (death.message is not None or death.signal not in _OUR_SIGNALS)


def _by_itself(death: FailureRecord) -> FailureRecord:
    """As it would have ended: its error was written when our request to end came."""
    was_ended = death.signal in _OUR_SIGNALS and death.message is not None
    return replace(death, signal=None, exit_code=exit_codes.FAILED) if was_ended else death


def _tell_failure(state: State) -> Step:
    death = state.failure
    if death is None or state.is_told or state.formed is None:
        return state, ()
    failed = failed_message(death, state.formed.generation, _ends(state))
    return replace(state, is_told=True), (Tell(failed),)


def _not_spawned(state: State, failed: ev.SpawnFailed) -> Step:
    if state.phase is not Phase.RUNNING:
        return state, ()
    death = FailureRecord(rank=worker_processes.rank_of(failed.process), exit_code=failed.code, message=failed.text)
    state, told = _note_failure(replace(state, deaths=(*state.deaths, death)), death)
    state, actions = _inside(state, failed)
    return state, (*told, *actions)


def _hung(state: State, hung: ev.Hung) -> Step:
    """Kill at once: who hangs saves nothing, and the others wait for it."""
    if state.phase is not Phase.RUNNING or state.run is None or state.ending is not None or state.stop_signal:
        return state, ()
    death = FailureRecord(
        rank=hung.rank,
        local_rank=hung.local_rank,
        signal=signal.SIGKILL,
        message=hung.text,
        lines=hung.lines,
        reason=hung.reason,
    )
    alive = state.run.alive
    state, told = _tell_failure(replace(state, ending=Ending.FAILED, failure=death))
    return state, (*told, *(ev.SignalGroup(name, signal.SIGKILL) for name in alive))


def _store_ended(state: State, event: StoreEnded) -> Step:
    """Without its store a generation cannot go on; who killed it is not known."""
    if state.formed is None or state.ending is not None or state.stop_signal is not None:
        return state, ()
    end = event.exit
    how = f"was killed (signal {end.signal})" if end.signal is not None else f"ended with exit code {end.code}"
    text = f"the store process of generation {state.formed.generation} {how}"
    if state.phase is Phase.DONE:  # what other nodes' workers still do may not need it; if it does, they fail
        return state, (ev.Say(text),)
    death = FailureRecord(exit_code=end.code, signal=end.signal, message=text)
    state, told = _tell_failure(replace(state, failure=death, is_told=False))
    if state.phase is Phase.RUNNING:
        state, actions = _stop(replace(state, ending=Ending.FAILED), event.at_s)
    else:
        state, actions = _rejoin(replace(state, own=death))
    return state, (ev.Say(text), *told, *actions)


def _settle(state: State, at_s: float) -> Step:
    """After a step of this generation's run: what comes next, once nothing of it is left."""
    if state.run is None or state.run.phase is not ev.Phase.DONE:
        return state, ()
    if state.stop_signal is not None:
        return _end(state, say.Leave("asked to stop"))
    state, told = _tell_failure(state) if state.failure is not None else (state, ())
    if state.failure is not None:
        state = replace(state, own=state.failure, ends=_ends(state))
    if state.end is not None:
        state, actions = _end(state)
    elif state.ending is not None:
        state, actions = _rejoin(replace(state, ending=None))
    else:
        state = replace(state, phase=Phase.DONE)
        actions = (Tell(say.Done(state.seen)),)
    return state, (*told, *actions)


# -- requests to stop, and time ---------------------------------------------------------------


def _signalled(state: State, event: ev.Signalled) -> Step:
    action = action_of(event.number, state.plan.signals)
    asks = action is SignalAction.TERMINATE or (event.number in STOP_SIGNALS and state.phase is not Phase.RUNNING)
    drains = action is SignalAction.DRAIN
    if state.phase is not Phase.RUNNING:
        if not asks and not drains:
            return state, ()
        return _end(replace(state, stop_signal=event.number), say.Leave("asked to stop"))
    is_first = state.stop_signal is None and (asks or drains)
    if is_first:
        state = replace(state, stop_signal=event.number)
    state, actions = _inside(state, event)
    return state, ((Tell(say.Leave("asked to stop")),) if is_first and asks else ()) + actions


def _tick(state: State, event: ev.Deadline) -> Step:
    if state.phase is Phase.WAITING:
        return _end(state) if _is_due(state.wait_until_s, event.at_s) else (state, ())
    if _is_due(state._away_until_s, event.at_s):
        return _lose_coordinator(state, event.at_s)
    if state.phase is Phase.RUNNING and state.run is not None and _is_due(state.run.deadline_s, event.at_s):
        return _inside(state, event)
    return state, ()


def _lose_coordinator(state: State, at_s: float) -> Step:
    if state.phase is Phase.RUNNING:
        return _stop(replace(state, ending=Ending.OVER), at_s)
    if state.phase is Phase.DONE:  # our own workers did succeed
        return _end(replace(state, end=say.Finished()))
    patience_s, where = state.membership.patience_s, state.membership.coordinator
    text = f"the coordinator at {where} did not answer for {patience_s:g} s"
    return _end(replace(state, end=say.GiveUp(text)))


def _is_due(at_s: float | None, now_s: float) -> bool:
    return at_s is not None and now_s >= at_s


_Handler = Callable[[State, Any], Step]
_HANDLERS: dict[type, _Handler] = {
    Heard: _hear,
    Prepared: _prepared,
    CannotStart: _cannot_start,
    StoreOpened: _store_opened,
    StoreEnded: _store_ended,
    WorkerEnded: _worker_ended,
    ev.SpawnFailed: _not_spawned,
    ev.Hung: _hung,
    ev.Signalled: _signalled,
    ev.Resolved: _names_resolved,
    ev.Unresolved: lambda state, event: (replace(state, unresolved=event.text), (ev.Say(event.text),)),
    ev.Deadline: _tick,
}
