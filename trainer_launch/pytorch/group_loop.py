"""Run this node's torch workers to the end of the job: wait, step, act. `worker_group` decides what happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from trainer_launch.host import incident_facts, runtime_directory
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.host.machine import machine_name
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client
from trainer_launch.model import (
    Exit,
    Failure,
    FailureRecord,
    GivenUp,
    Membership,
    Outcome,
    Plan,
    Process,
    Verdict,
    Workers,
    exit_codes,
)
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.model.goodput import Kind, Told
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted
from trainer_launch.pytorch import worker_group, worker_processes
from trainer_launch.pytorch.fork_server import SERVER, STORE, ServerError, Starter
from trainer_launch.pytorch.group_incidents import GroupIncidents, aborted
from trainer_launch.pytorch.group_stragglers import GroupStragglers
from trainer_launch.pytorch.worker_group import (
    Action,
    CannotStart,
    CloseStore,
    Event,
    Heard,
    HostStore,
    Phase,
    Prepare,
    Prepared,
    Refusal,
    StartWorkers,
    State,
    StoreEnded,
    StoreOpened,
    Tell,
    WorkerEnded,
)
from trainer_launch.pytorch.worker_processes import LogFolders
from trainer_launch.supervisor import error_lines, failure, loop
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import System
from trainer_launch.supervisor.worker_samples import Place

if TYPE_CHECKING:
    from trainer_launch.supervisor.hang_watch import Watch as HangWatch

_OWN_DESCRIPTORS = 16  # for the fork server, the coordinator's client, and what is opened for a moment
_log = logging.getLogger(__name__)


class AnyGoodput(Protocol):
    """Who keeps the goodput ledger; `goodput_keeper.GoodputKeeper` is it."""

    def enter(self, kind: Kind, at_s: float, since_s: float | None = None) -> None:
        """From now on this node does this."""

    def look(self, collectives: int = 0) -> None:
        """See how far the workers are."""

    def suspect(self) -> None:
        """A hang is suspected."""

    def told(self) -> Told:
        """For other nodes."""

    def adopt(self, told: Told) -> None:
        """Of other nodes."""


def run(
    plan: Plan,
    system: System,
    secret: bytes | None,
    attach: Callable[[Group], None] = lambda group: None,
    observer: loop.AnyObserver | None = None,
) -> Outcome:
    """Run the plan's workers until the job is over for this node, and say how it ended."""
    with contextlib.closing(Group(plan, system, secret, observer)) as group:
        attach(group)
        group.to_the_end()
    system.drain(loop.DRAIN_S)
    group.hand_up()
    return outcome(group.state, system, group.evidence)


class Group:
    """The state, and who carries out what it asks for."""

    def __init__(self, plan: Plan, system: System, secret: bytes | None, observer: loop.AnyObserver | None) -> None:
        incarnation = uuid.uuid4().hex
        self.state, self._first = worker_group.begin(plan, incarnation, system.now())
        workers, membership = self.state.workers, self.state.membership
        self.evidence = Evidence()
        self.watch: HangWatch | None = None
        self.goodput: AnyGoodput | None = None
        self._observer = observer
        self._plan, self._workers, self._membership = plan, workers, membership
        self._system = system
        self._places: dict[str, Place] = {}
        self._said: frozenset[str] = frozenset()  # workers with an error when the coordinator ended the generation
        self._queue: list[Event] = []
        system.need_descriptors(_OWN_DESCRIPTORS + 4 * workers.count)
        system.mark = runtime_directory.VARIABLE, workers.run_dir
        self._gpus = Watch(workers.env)
        self._folders = LogFolders(workers, membership.job)
        self._attempt_folder = ""
        self._store_failed_in = -1  # a generation
        self._starter = Starter(workers, system, self._hosts_store)
        self._queue += self._asked(self._starter.begin)
        self._client = _client(membership, workers, incarnation, secret, system)
        self._client.goodput = lambda: None if self.goodput is None else self.goodput.told()
        recorders, send = self._starter.recorders, self._client.send
        self.incidents = GroupIncidents(self, recorders, send, system.pids)
        self.stragglers = GroupStragglers(self, recorders, send, workers)

    def to_the_end(self) -> None:
        """Wait and act until the group has ended."""
        if self._observer is not None:
            self._observer.begun(snapshot(self.state))
        self._book(ev.Deadline(self._system.now()))
        self._apply(self._first)
        self._work_off()
        while self.state.phase is not Phase.ENDED:
            for event in self._wait():
                self._take(event)
                self._work_off()

    def close(self) -> None:
        """End what is left beside the workers, and leave the coordinator."""
        self.incidents.close()
        self._client.close()
        self._starter.close()

    def hand_up(self) -> None:
        """Give what a worker of this node said before it ended the job to who asks us for it."""
        own, end = self.state.own, self.state.end
        place = self._places.get(f"rank {own.rank}") if own is not None else None
        if own is not None and place is not None and isinstance(end, say.GiveUp) and end.rank == own.rank:
            code = -own.signal if own.signal is not None else own.exit_code or 0
            error_lines.hand_up(place.error_file, code, self._workers.env.get("TORCHELASTIC_ERROR_FILE"))

    @property
    def node_rank(self) -> int:
        """This node's."""
        return self._membership.node_rank

    @property
    def names(self) -> tuple[str, ...]:
        """The processes of this generation's workers."""
        return tuple(self._places)

    def place_of(self, name: str) -> Place | None:
        """Which worker a process is."""
        return self._places.get(name)

    # -- events -------------------------------------------------------------------------------

    def _wait(self) -> list[Event]:
        """Signals, news, ends, that nobody is left: a worker that had the same SIGTERM as we has not failed."""
        watch_s = self.watch.due_s if self.watch is not None and self._is_watched() else None
        times = [at_s for at_s in (self.state.deadline_s, watch_s, self.stragglers.due_s) if at_s is not None]
        happened = self._system.wait(min(times, default=None))
        ends = [event for event in happened if isinstance(event, ev.Exited)]
        last = [event for event in happened if isinstance(event, ev.Childless)]
        events: list[Event] = [event for event in happened if event not in ends and event not in last]
        # In this order: behind a Formed, Prepared would look like the answer to what that asks for.
        events += [*self._asked(self._starter.answer), *self._news()]
        events += [event for end in ends for event in self._ended(end)]
        events += last
        now_s = self._system.now()
        if self.state.deadline_s is not None and now_s >= self.state.deadline_s:
            events.append(ev.Deadline(now_s))
        self.stragglers.look(now_s)
        if self.watch is not None and self._is_watched() and now_s >= self.watch.due_s:
            hung = self.watch.look(now_s)
            if self.goodput is not None:
                self.goodput.look(self._starter.recorders.farthest)
            events += [self.incidents.with_explanation(hung)] if hung is not None else []
        return events

    def _is_watched(self) -> bool:
        run = self.state.run
        return self.state.phase is Phase.RUNNING and run is not None and run.phase is ev.Phase.RUNNING

    def _news(self) -> list[Heard]:
        heard = []
        while (news := self._client.receive(0)) is not None:
            self.stragglers.hear(news, self._system.now())
            if isinstance(news, say.Restart):
                files = {name: place.error_file for name, place in self._places.items()}
                self._said = frozenset(name for name, path in files.items() if path and os.path.exists(path))
            heard.append(Heard(self._system.now(), news))
        return heard

    def _ended(self, event: ev.Exited) -> list[Event]:
        """A worker's end with what it said; what else has ended is of our own making."""
        end = event.exit
        if end.process.startswith(SERVER):
            return self._asked(lambda: self._starter.server_ended(end))
        if end.process.startswith(STORE):
            return [StoreEnded(event.at_s, end)] if self._starter.store_ended(end.process) else []
        place = self._places.get(end.process)
        said = error_lines.read_error_file(place.error_file if place is not None else None)
        rank, local_rank = (None, None) if place is None else (place.rank, place.local_rank)
        was_ended = self.state.ending is not None
        death = failure.death_of(rank, local_rank, end.code, end.signal, said, was_ended=was_ended)
        if end.signal == signal.SIGABRT:
            death = aborted(death, lambda: self._system.last_lines(end.process), end.at_s)
        if end.exit_code != 0 and self.state.stop_signal is None:
            seen = replace(self._system.look(), last_lines=self._system.last_lines(end.process))
            death = failure.fault_of(death, seen, was_ended=was_ended)
        return [WorkerEnded(end, death, said_first=end.process in self._said)]

    def _asked(self, ask: Callable[[], bool]) -> list[Event]:
        try:
            return [Prepared(self._system.now(), self._attempt_folder)] if ask() else []
        except LaunchError as problem:
            return [CannotStart(self._system.now(), str(problem), problem.exit_code)]

    def _hosts_store(self) -> bool:
        formed = self.state.formed
        return formed.is_store_host if formed is not None else self._membership.node_rank == 0

    # -- steps and actions --------------------------------------------------------------------

    def _work_off(self) -> None:
        while self._queue:
            self._take(self._queue.pop(0))

    def _take(self, event: Event) -> None:
        before = self.state
        self.state, actions = worker_group.step(before, event)
        _log_step(event, before, self.state)
        self._book(event)
        self.incidents.note(event, before, self.state, self.watch)
        self._observe(event, before)
        self._apply(actions)

    def _book(self, event: Event) -> None:
        """What the seconds from now on are spent on; other nodes may have been in the job for longer."""
        if self.goodput is None:
            return
        now_s = self._system.now()
        since_s: float | None = None
        match event:
            case Heard(news=say.Formed(goodput=told)) if told is not None:
                self.goodput.adopt(told)
            case Heard(news=say.Explained(accuses=True, generation=generation)) if generation == self.state.seen:
                self.goodput.suspect()
            case Heard(news=say.Restart(unnoticed_s=unnoticed_s)) if unnoticed_s:
                since_s = now_s - unnoticed_s
            case ev.Hung(since_s=seen_s):
                since_s = seen_s
            case WorkerEnded(exit=end):
                since_s = end.at_s
        self.goodput.enter(doing(self.state), now_s, since_s)

    def _observe(self, event: Event, before: State) -> None:
        """Observers know the supervisor's events; the others change what they see of the state."""
        if self._observer is None:
            return
        seen: ev.Event = ev.Deadline(self._system.now())
        if isinstance(event, WorkerEnded):
            seen = ev.Exited(event.exit.at_s, event.exit)
        elif isinstance(event, ev.Event):
            seen = event
        self._observer.stepped(seen, snapshot(before), snapshot(self.state))

    def _apply(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Tell(message=message):
                self._client.send(self.incidents.completed(message))
            case Prepare():
                self._queue += self._asked(self._prepare)
            case HostStore():
                self._open_store()
            case CloseStore():
                self._starter.close_store()
            case StartWorkers(processes=processes):
                self._start(processes)
            case ev.Look():
                self.evidence = self._system.look()
            case _:
                loop.carry_out(self._system, action, self._plan)

    def _prepare(self) -> bool:
        formed = self.state.formed
        self._attempt_folder = self._folders.begin(0 if formed is None else formed.restarts)
        return self._starter.prepare()

    def _start(self, processes: tuple[Process, ...]) -> None:
        formed, go = self.state.formed, self.state.go
        if formed is None or go is None:
            return
        _log.info(
            "generation %d: this is node %d of %d, store at %s:%d, %s so far",
            *(formed.generation, formed.group_rank, formed.size, go.host, go.port),
            counted(formed.restarts, "failure"),
        )
        self._said = frozenset()
        self._places = worker_processes.places(
            self._workers, formed, self._attempt_folder, are_forked=self._starter.forks
        )
        started = {"workers": len(processes), "first_rank": formed.first_rank}
        runtime_directory.tell(self._workers.run_dir, "workers_started", **started)
        self._gpus.tell(is_first=self.state.starts == 1)
        try:
            failed = self._starter.start(processes, self._places)
        except (NodeError, OSError) as problem:
            self._queue.append(CannotStart(self._system.now(), str(problem), exit_codes.INFRASTRUCTURE))
            return
        self._queue += [ev.SpawnFailed(self._system.now(), *one) for one in failed]
        if self._observer is not None:
            for name, pid in self._system.pids().items():
                self._observer.spawned(name, pid)

    def _open_store(self) -> None:
        formed = self.state.formed
        if formed is None:
            return
        try:
            port = self._starter.open_store(formed.generation, self._membership.ports)
        except ServerError as problem:
            self._lost_store(str(problem))
            return
        host = self._client.own_address(self._membership.address, self._membership.host)
        self._queue.append(StoreOpened(self._system.now(), host, port))

    def _lost_store(self, why: str) -> None:
        """The fork server has failed while it opened the store: another one tries it again, once a generation."""
        generation = self.state.seen
        if self._store_failed_in == generation:
            text = f"the store cannot be opened: {why}"
            self._queue.append(CannotStart(self._system.now(), text, exit_codes.INFRASTRUCTURE))
            return
        self._store_failed_in = generation
        _log.warning("the store cannot be opened: %s; a new fork server tries it again", why)
        self._queue += self._asked(self._starter.renew)


def doing(state: State) -> Kind:
    """What a node does in this state, for the goodput ledger."""
    if state.stop_signal is not None or state.end is not None:
        return Kind.ENDING
    if state.phase is Phase.RUNNING and state.ending is None:
        run = state.run
        return Kind.TRAINING if run is not None and run.phase is ev.Phase.RUNNING else Kind.ENDING
    if state.phase is Phase.FORMED and not state.is_prepared:  # the fork server still imports torch
        return Kind.RESTARTING if state.starts else Kind.STARTING
    return {
        Phase.WAITING: Kind.WAITING,
        Phase.JOINING: Kind.WAITING,
        Phase.FORMED: Kind.MEETING,
        Phase.RUNNING: Kind.STOPPING,
    }.get(state.phase, Kind.ENDING)


def snapshot(state: State) -> ev.State:
    """The group as the supervisor's observers know a run."""
    run = state.run if state.phase is Phase.RUNNING and state.run is not None else None
    if run is None:
        phases = {Phase.ENDED: ev.Phase.DONE, Phase.DONE: ev.Phase.CLEARING}
        phase = phases.get(state.phase, ev.Phase.WAITING)
        exits = state.run.exits if state.run is not None else ()
        run = ev.State(plan=state.plan, phase=phase, started_at_s=state.started_at_s, exits=exits)
    phase = ev.Phase.RUNNING if run.phase is ev.Phase.DONE else run.phase
    return replace(run, phase=phase, restarts=max(0, state.starts - 1), stop_signal=state.stop_signal)


def _client(me: Membership, workers: Workers, incarnation: str, secret: bytes | None, system: System) -> Client:
    hello = say.Hello(
        *(say.VERSION, me.job, me.node_rank, me.host, incarnation),
        workers=workers.count,
        role=workers.role,
        machine=machine_name(workers.env, f"{me.host}-{me.node_rank}"),
        fault=me.fault,
        label=me.label,
    )
    return Client(me.coordinator, hello, secret, _log.info, me.seats, system.poke, workers.run_dir)


def _log_step(event: Event, before: State, after: State) -> None:
    """What the supervisor's loop would log of its own steps, in fewer lines: workers are many."""
    match event:
        case WorkerEnded(exit=end) if after.failure is not None and before.failure is None:
            _log.info("%s ended with %s", end.process, loop.how(end))
        case WorkerEnded(exit=end):
            _log.debug("%s ended with %s", end.process, loop.how(end))
        case ev.SpawnFailed(text=text):
            _log.error("%s", text)
        case ev.Signalled(number=number) if before.stop_signal is None and after.stop_signal is not None:
            asked = after.run.asked if after.run is not None and after.phase is Phase.RUNNING else 1
            grace_s = after.plan.grace_s
            _log.info("asked to stop by %s (request %d, grace %g s)", signal_name(number), asked, grace_s)
        case ev.Deadline() if _begins_to_kill(before, after):
            _log.warning("the grace period is over; sending SIGKILL to the remaining processes")


def _begins_to_kill(before: State, after: State) -> bool:
    return [run is not None and run.phase is ev.Phase.KILLING for run in (before.run, after.run)] == [False, True]


# -- GPU memory in use -------------------------------------------------------------------------


PATIENCE_S = 0.2  # with a driver that hangs, at a restart; the first start does not wait at all


class Watch:
    """Looks once at its making, and again before each later start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._answer: list[str] = []
        self._look()

    def tell(self, *, is_first: bool) -> None:
        """Warn of each holder."""
        if not is_first:
            self._answer = []
            self._look()
            if self._thread is not None:
                self._thread.join(PATIENCE_S)
        if self._thread is None or not self._thread.is_alive():
            for text in self._answer:
                _log.warning("%s", text)

    def _look(self) -> None:
        self._thread = begin_thread("gpu-holders", self._ask)

    def _ask(self) -> None:
        self._answer = holders(self._env)


def holders(env: Mapping[str, str]) -> list[str]:
    """One sentence for each process that holds memory on a GPU that we see; none when nothing can be told."""
    nvml = incident_facts.load_nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return []
    try:
        return [text for index in range(nvml.nvmlDeviceGetCount()) for text in _on(nvml, index, env)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _on(nvml: Any, index: int, env: Mapping[str, str]) -> list[str]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(device)
    uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    shown = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", str(index)).split(",")]
    if not any(word == str(index) or (word and uuid.startswith(word)) for word in shown):
        return []
    me = os.getpid()
    return [
        f"GPU {index}: process {process.pid} (as the driver numbers it) holds"
        f" {_in_mib(process.usedGpuMemory)} while none of our workers runs"
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
        if process.pid != me
    ]


def _in_mib(size: int | None) -> str:
    return "memory" if size is None else f"{size >> 20} MiB"


# -- how a worker group ended, as the run's outcome --------------------------------------------


def outcome(state: State, system: System, evidence: Evidence) -> Outcome:
    """How it ended, and why."""
    run = state.run
    return Outcome(
        verdict=verdict(state),
        failure=_failure(state, system, evidence),
        given_up=_given_up(state.end),
        stop_signal=state.stop_signal,
        exits=run.exits if run is not None else (),
        took_s=system.now() - state.started_at_s,
        attempt=max(1, state.starts),
        survivors=system.descendants() if run is not None and run.gave_up else (),
        note=_note(state),
    )


def _note(state: State) -> str:
    """That the job has ended well without this node."""
    if not isinstance(state.end, say.Finished) or state.formed is not None or state.stop_signal is not None:
        return ""
    return "this node was a spare, and the job did not need it" + (" any more" if state.starts else "")


def verdict(state: State) -> Verdict:
    """How the job ended for this node."""
    if state.stop_signal is not None:
        return Verdict.STOPPED
    return Verdict.SUCCEEDED if isinstance(state.end, say.Finished) else Verdict.FAILED


def _failure(state: State, system: System, evidence: Evidence) -> Failure | None:
    if state.stop_signal is not None:
        return _how_it_stopped(state, system, evidence)
    match state.end:
        case say.Finished():
            return None
        case None:  # node 0's name
            text = state.unresolved or f"the resolver has not answered for {', '.join(state.plan.wait_for)}"
            return failure.unresolved(text)
        case Refusal(text=text, code=code):
            reason = "Misconfigured" if code == exit_codes.MISCONFIGURED else "NotStarted"
            told = FailureRecord(reason=reason, message=text, exit_code=code)
            return _classified(told, "", system, evidence)
        case say.GiveUp() as given_up:
            own = state.own if state.own is not None and state.own.rank == given_up.rank else None
            name = "" if own is None or own.rank is None else f"rank {own.rank}"
            found = _classified(given_up_for(given_up, own), name, system, evidence)
            return replace(found, message=f"{found.message}; {given_up.seen}") if given_up.seen else found


def _given_up(end: object) -> GivenUp | None:
    if not isinstance(end, say.GiveUp):
        return None
    how = {"rank": end.rank, "exit_code": end.exit_code, "signal": end.signal}
    return GivenUp(reason=end.reason, message=end.message or "", **how)


def given_up_for(given_up: say.GiveUp, own: FailureRecord | None) -> FailureRecord:
    """Why the coordinator has ended the job, as this node tells it.

    The faulty node has its worker's own code, the others have lost a peer; a cause of its own is everybody's.
    """
    if given_up.cause is not None:  # no code of ours may ask a controller for a restart
        told = FailureRecord(
            reason=given_up.cause,
            message=given_up.reason,
            exit_code=given_up.exit_code or exit_codes.FAILED,
            why_not_again=given_up.message,
        )
        return told if own is None else replace(told, rank=own.rank, local_rank=own.local_rank, lines=own.lines)
    if own is None:
        said = given_up.message  # of the faulty worker, on another node
        text = f"{given_up.reason}; it said: {said}" if said else given_up.reason
        return FailureRecord(reason="PeerLost", message=text, exit_code=exit_codes.INFRASTRUCTURE)
    return replace(own, why_not_again=given_up.reason, exit_code=failure.code_of(own))


def _classified(told: FailureRecord, name: str, system: System, evidence: Evidence) -> Failure:
    end = Exit(process=name, code=told.exit_code, signal=None, at_s=0.0)
    lines = system.last_lines(name) if name else ()
    return failure.classify(end, replace(evidence, agent=told, last_lines=lines))


def _how_it_stopped(state: State, system: System, evidence: Evidence) -> Failure | None:
    """How the workers took the request is worth a word when one did not leave with 0."""
    ends = state.run.exits if state.run is not None else ()
    cause = next((end for end in ends if end.exit_code != 0), None)
    if cause is None:
        return None
    lines = system.last_lines(cause.process)
    return failure.classify(cause, replace(evidence, agent=None, last_lines=lines, stopped=True))
