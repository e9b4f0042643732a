"""This node in the job: starts its torch workers, tells the coordinator how they end, joins again.

phase    | leaves it when
---------|--------------------------------------------------------------------------------------------------------
WAITING  | node 0's name resolves: JOINING; it does not in time: ENDED
JOINING  | Formed: FORMED; GiveUp, Finished: ENDED
FORMED   | Go, and workers can be started: RUNNING; Restart: JOINING
RUNNING  | nothing of the generation lives any more: DONE if all ended with 0, else JOINING
DONE     | Finished: ENDED; Restart: JOINING (another node's workers failed after ours had ended)
ENDED    | never

A generation ends for one reason, the first that is known: a failure here, the coordinator's word, its absence, or a
hang. All workers are then stopped by the rungs of `Processes`. A request to stop, or a drain, is about what comes
after: once no worker lives any more the node leaves, whatever else has happened. `settle` alone decides what comes
next.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from trainer_launch.diagnosis.group_incidents import GroupIncidents, aborted
from trainer_launch.host import runtime_directory
from trainer_launch.host.gpu_holders import GpuHolders
from trainer_launch.host.machine import machine_name
from trainer_launch.host.slow_files import within
from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Client, Connected, Disconnected, News
from trainer_launch.model import Death, Failure, GivenUp, Outcome, Verdict, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.model.goodput import Kind, Told
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction, action_of
from trainer_launch.model.units import counted
from trainer_launch.pytorch import worker_ends, worker_processes
from trainer_launch.pytorch.fork_server import ServerError, Starter
from trainer_launch.pytorch.group_stragglers import GroupStragglers
from trainer_launch.pytorch.worker_group import WorkerGroup
from trainer_launch.pytorch.worker_processes import LogFolders
from trainer_launch.supervisor import error_lines, failure
from trainer_launch.supervisor.failure import Evidence, how
from trainer_launch.supervisor.name_wait import NameWait
from trainer_launch.supervisor.processes import Rung
from trainer_launch.supervisor.program_loop import DRAIN_S
from trainer_launch.supervisor.run_observer import RunObserver, RunPhase

if TYPE_CHECKING:
    from trainer_launch.diagnosis.hang_watch import Watch

_OWN_DESCRIPTORS = 16  # for the fork server, the coordinator's client, and what is opened for a moment
_log = logging.getLogger(__name__)


class NodePhase(Enum):
    """Where the node is; see the drawing."""

    WAITING = "waiting"
    JOINING = "joining"
    FORMED = "formed"
    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"


class Diagnosis(NamedTuple):
    """Who looks at the workers."""

    incidents: GroupIncidents
    stragglers: GroupStragglers
    watch: Watch | None  # for hangs


def client_of(group: WorkerGroup, secret: bytes | None, ledger: Callable[[], Told | None]) -> Client:
    """The connection of this node to its coordinator.

    Raises:
        NodeError: there are too few descriptors for the workers.
    """
    me, workers, system = group.membership, group.workers, group.system
    system.need_descriptors(_OWN_DESCRIPTORS + 4 * workers.count)
    hello = say.Hello(
        *(say.VERSION, me.job, me.node_rank, me.host, group.incarnation),
        workers=workers.count,
        role=workers.role,
        machine=machine_name(workers.env, f"{me.host}-{me.node_rank}"),
        fault=me.fault,
        label=me.label,
    )
    return Client(me.coordinator, hello, secret, _log.info, me.seats, system.poke, workers.run_dir, ledger)


class Node:
    """The node, which waits, acts, and settles what comes next."""

    def __init__(
        self,
        group: WorkerGroup,
        client: Client,
        starter: Starter,
        diagnosis: Diagnosis,
        observer: RunObserver,
    ) -> None:
        self._group, self._client, self._starter = group, client, starter
        self._plan, self._system = plan, system = group.plan, group.system
        self._processes, self._workers, self._membership = group.processes, group.workers, group.membership
        self._incidents, self._stragglers, self._watch = diagnosis
        self._observer = observer
        system.mark = runtime_directory.VARIABLE, self._workers.run_dir
        self._gpus = GpuHolders(self._workers.env)
        self._folders = LogFolders(self._workers, self._membership.job)
        self.phase = NodePhase.WAITING if plan.wait_for else NodePhase.JOINING
        self._started_at_s = system.now()
        self._away_since_s: float | None = self._started_at_s  # None while the coordinator is there
        self._names = NameWait(plan, system, observer)  # node 0's
        self._unstartable: Death | None = None  # why no worker can be started; looked at only by the next start
        self._was_prepared = not self._workers.forks  # workers could be started, which the coordinator knows
        self._starts = 0  # generations whose workers were started
        self._leave_generation()
        self._ends = worker_ends.UNKNOWN_ENDS  # of the last generation
        self._own: Death | None = None  # the failure here that ended it
        self._stop_signal: int | None = None  # what asked to stop, or said that nothing is to be started again
        self._end: say.GiveUp | say.Finished | Death | None = None
        self._exits: tuple[Death, ...] = ()  # of the last generation, where its workers ran at the end
        self._evidence = Evidence()

    def _leave_generation(self) -> None:
        self._group.leave_generation()
        self._formed: say.Formed | None = None
        self._go: say.Go | None = None
        self._is_prepared = False  # workers can be started in this generation
        self._has_store = False  # this node has opened its store
        self._is_store_tried_again = False
        self._attempt_folder = ""  # for error files and logs, a folder for each worker; "": none
        self._is_ending = False  # the generation
        self._failure: Death | None = None  # the first one here, or what else has ended the generation here
        self._is_told = False  # the coordinator knows of it
        self._with_error: frozenset[str] = frozenset()  # who had written an error when the coordinator ended it

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run workers until the job is over for this node, and say how it ended."""
        try:
            self._to_the_end()
        finally:
            self._incidents.close()
            self._client.close()
            self._starter.close()
        self._system.drain(DRAIN_S)
        self._hand_up()
        return self._outcome()

    def _to_the_end(self) -> None:
        self._ask(self._starter.begin)
        self._names.begin()
        if self.phase is NodePhase.JOINING:
            self._join()
        while True:
            now_s = self._system.now()
            self._on_time(now_s)
            self._observe()
            self._processes.tick(now_s)
            self.settle(now_s)
            self._observe()
            if self.phase is NodePhase.ENDED:
                return
            happened = self._system.wait(min((s for s in self._times() if s is not None), default=None))
            now_s = self._system.now()
            for number in happened.signals:  # first: a worker that had the same SIGTERM as we has not failed
                self.on_signal(number, now_s)
            if self._names.is_over(happened):
                self.phase = NodePhase.JOINING
                self._away_since_s = None if self._away_since_s is None else now_s
                self._join()
            self._ask(self._starter.answer)  # before the news: behind a Formed it would answer what that asks for
            while (news := self._client.receive(0)) is not None:
                self._stragglers.hear(news, now_s)
                self.hear(news, now_s)
            for pid, status in happened.ended:
                self._on_child(pid, status, now_s)

    def _times(self) -> tuple[float | None, ...]:
        watch_s = self._watch.due_s if self._watch is not None and self._processes.is_running else None
        away_s, names_s = self._away_until_s, self._names.until_s
        return self._processes.deadline_s, names_s, away_s, watch_s, self._stragglers.due_s

    @property
    def _away_until_s(self) -> float | None:
        """How long the coordinator may stay away."""
        is_over = self._is_ending or self._processes.asked > 0
        if self._away_since_s is None or self.phase in (NodePhase.WAITING, NodePhase.ENDED) or is_over:
            return None
        patience_s = {NodePhase.RUNNING: timeouts.BLIP_S, NodePhase.DONE: timeouts.GONE_S}
        return self._away_since_s + patience_s.get(self.phase, self._membership.patience_s)

    def _on_time(self, now_s: float) -> None:
        if self._names.is_late(now_s):
            self._leave()
        if self._away_until_s is not None and now_s >= self._away_until_s:
            self._on_lost_coordinator(now_s)
        self._stragglers.look(now_s)
        if self._watch is not None and self._processes.is_running and now_s >= self._watch.due_s:
            hang = self._watch.look(now_s)
            self._observer.look(self._group.recorders.farthest)
            if hang is not None:
                self.on_hang(self._incidents.with_explanation(hang), now_s)

    def _on_child(self, pid: int, status: int, now_s: float) -> None:
        """A child has ended; orphans, and workers of an earlier generation, concern nobody."""
        if self._starter.is_server(pid):
            self._ask(lambda: self._starter.server_ended(status))
        elif self._starter.is_store(pid):
            self._starter.store_ended()
            self.on_store_end(status, now_s)
        else:
            death = self._processes.reaped(pid, status, now_s)
            if death is not None:
                self.on_end(self._explained(death), now_s)

    # -- the coordinator ----------------------------------------------------------------------

    def hear(self, news: News, now_s: float) -> None:
        """The coordinator said something, or is out of reach, or is back."""
        self._incidents.hear(news, self._watch)
        match news:
            case Disconnected():
                self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
            case Connected():
                self._away_since_s = None
                if self.phase is NodePhase.DONE:  # it may have been lost with the connection
                    self._tell(say.Done(self._group.generation))
            case say.Formed() if self.phase is NodePhase.JOINING:
                self._on_formed(news)
            case say.Go() if self._formed is not None and news.generation == self._formed.generation:
                self._go = news
                self._start_when_ready(now_s)
            case say.Restart():
                self.on_restart(news, now_s)
            case say.GiveUp() | say.Finished() | say.Quarantined() | say.Refused(retry=False):
                self._on_job_end(news, now_s)
            case say.Explained(accuses=True, generation=number) if number == self._group.generation:
                self._observer.suspect()

    def _tell(self, message: say.FromNode) -> None:
        self._client.send(self._incidents.completed(message))

    def _join(self) -> None:
        group, ends = self._group, self._ends
        proof = next((death.fault for death in group.deaths if death.fault), "")
        join = say.Join(group.incarnation, group.generation, ends.finished, ends.failed, self._was_prepared)
        self._tell(replace(join, device_fault=proof))

    def on_restart(self, restart: say.Restart, now_s: float) -> None:
        """The coordinator ends the generation, also while draining: who waits for a lost peer never ends."""
        if self.phase is NodePhase.RUNNING:
            if self._is_told or (self._is_ending and self._failure is None):
                return  # it ends it for what this node has told, or says so again: ours have been stopped since
            files = {name: place.error_file for name, place in self._group.places.items() if place.error_file}
            errors = (name for name, path in files.items() if within(path, False, os.path.exists, path))
            self._with_error = frozenset(errors)
            self._ends, self._failure = self._ends_now(), None  # what workers did before we stop them may tell why
            text = f"generation {self._group.generation} is over: {restart.reason}"
            since_s = now_s - restart.unnoticed_s if restart.unnoticed_s else None
            self._end_generation(None if restart.grows else text, since_s)
            self._processes.stop(now_s)
        elif self.phase in (NodePhase.JOINING, NodePhase.FORMED, NodePhase.DONE):
            self._ends = self._ends_now() if self.phase is NodePhase.DONE else self._ends
            self._rejoin()

    def _on_job_end(self, news: say.GiveUp | say.Finished | say.Refused, now_s: float) -> None:
        """The job is over, or goes on without this node: it ends here once nothing runs."""
        self._end = worker_ends.end_of(news)
        if self.phase is not NodePhase.RUNNING:
            self._leave()
            return
        self._end_generation(news.reason if isinstance(news, say.GiveUp) else None)
        self._processes.stop(now_s)

    def _on_lost_coordinator(self, now_s: float) -> None:
        if self.phase is NodePhase.RUNNING:
            self._end_generation()
            self._processes.stop(now_s)
            return
        if self.phase is NodePhase.DONE:  # our own workers did succeed
            self._end = say.Finished()
        else:
            patience_s, where = self._membership.patience_s, self._membership.coordinator
            self._end = say.GiveUp(f"the coordinator at {where} did not answer for {patience_s:g} s")
        self._leave()

    # -- starting a generation ----------------------------------------------------------------

    def _on_formed(self, formed: say.Formed) -> None:
        """This node is in: who hosts the store opens it, everybody gets ready to start workers."""
        self._leave_generation()
        self.phase, self._formed, self._ends = NodePhase.FORMED, formed, worker_ends.UNKNOWN_ENDS
        self._group.enter_generation(formed.generation, hosts_store=formed.is_store_host)
        if formed.goodput is not None:
            self._observer.adopt(formed.goodput)
        self._ask(self._prepare)

    def _prepare(self) -> bool:
        restarts = 0 if self._formed is None else self._formed.restarts
        self._attempt_folder = self._folders.begin(restarts)
        return self._starter.prepare()

    def _ask(self, is_ready: Callable[[], bool]) -> None:
        """Ask whether workers, and a store, can be started now; if not now, this is asked again."""
        try:
            if is_ready():
                self._on_prepared()
        except LaunchError as problem:
            self.on_unstartable(str(problem), problem.exit_code)

    def _on_prepared(self) -> None:
        was_prepared, self._was_prepared = self._was_prepared, True
        if self.phase is NodePhase.JOINING and not was_prepared:  # a generation that runs ends for us only now
            self._join()
        elif self.phase is NodePhase.FORMED and not self._has_store:
            self._is_prepared = True
            if self._group.hosts_store:
                self._open_store()
            self._start_when_ready(self._system.now())

    def on_unstartable(self, why: str, code: int = exit_codes.INFRASTRUCTURE) -> None:
        """Workers or a store cannot be started: `settle` looks at it before the next start; what runs goes on."""
        reason = "Misconfigured" if code == exit_codes.MISCONFIGURED else "NotStarted"
        self._unstartable = Death(reason=reason, message=why, code=code)
        if self.phase in (NodePhase.RUNNING, NodePhase.DONE):
            _log.warning("%s; running workers continue", why)

    def _open_store(self) -> None:
        try:
            port = self._starter.open_store(self._membership.ports)
        except ServerError as problem:
            text = f"the store cannot be opened: {problem}"
            if self._is_store_tried_again:
                self.on_unstartable(text)
                return
            self._is_store_tried_again = True
            _log.warning("%s; a new fork server tries it again", text)
            self._ask(self._starter.renew)
            return
        host = self._client.own_address(self._membership.address, self._membership.host)
        self._has_store = True
        self._tell(say.Store(self._group.generation, host, port))

    def _start_when_ready(self, now_s: float) -> None:
        """Start the workers once the store is open and they can be."""
        formed, go = self._formed, self._go
        if self.phase is not NodePhase.FORMED or formed is None or go is None or not self._is_prepared:
            return
        _log.info(
            "generation %d: this is node %d of %d, store at %s:%d, %s so far",
            *(formed.generation, formed.group_rank, formed.size, go.host, go.port),
            counted(formed.restarts, "failure"),
        )
        workers, folder, group = self._workers, self._attempt_folder, self._group
        specs = worker_processes.of(workers, self._membership, formed, go, folder)
        group.places = worker_processes.places(workers, formed, folder, are_forked=self._starter.forks)
        started = {"workers": len(specs), "first_rank": formed.first_rank}
        runtime_directory.tell(workers.run_dir, "workers_started", **started)
        self._gpus.tell(is_first=self._starts == 0)
        if self._starts:
            at_most = self._membership.max_restarts
            self._observer.tell("restarting", restart=self._starts, restarts_at_most=at_most)
        self.phase, self._own, self._starts = NodePhase.RUNNING, None, self._starts + 1
        try:
            unstarted = self._starter.start(specs, group.places)
        except (NodeError, OSError) as problem:
            self._is_ending = True
            self._end = Death(reason="NotStarted", message=str(problem), code=exit_codes.INFRASTRUCTURE)
            self._processes.stop(now_s, Rung.KILL)
            return
        for death in unstarted:
            self.on_end(replace(death, rank=group.places[death.process].rank), now_s)

    # -- how workers end ----------------------------------------------------------------------

    def _explained(self, death: Death) -> Death:
        """A worker's death with what it said in its error file, and what its last output proves."""
        place, name = self._group.places.get(death.process), death.process
        if place is not None:
            death = replace(death, rank=place.rank, local_rank=place.local_rank)
        content = error_lines.read_error_file(place.error_file if place is not None else None)
        death = failure.with_error_file(death, content, was_ended=self._is_ending)
        if death.signal == signal.SIGABRT:
            death = aborted(death, lambda: self._system.last_lines(name))
        if death.exit_code != 0 and self._stop_signal is None:
            death = failure.with_device_fault(death, Evidence(last_lines=self._system.last_lines(name)))
        return death

    def on_end(self, death: Death, now_s: float) -> None:
        """A worker has ended: the first failure ends the generation, here and by the coordinator everywhere."""
        self._group.note(death)
        is_first = death.exit_code != 0 and not self._is_ending and self._stop_signal is None
        _log.log(logging.INFO if is_first else logging.DEBUG, "%s ended with %s", death.process, how(death))
        if death.exit_code == 0 or self._stop_signal is not None:
            return
        if not self._is_ending:
            self._evidence = self._system.look()
            self._failure = death
            self._end_generation(worker_ends.what_failed(death), death.at_s)
            if not worker_ends.lost_peer(death):  # who only lost a peer may not be the first that failed
                self._tell_failure()
            self._processes.stop(now_s)
        elif death.process in self._with_error:
            self._note_cause(death)
        elif self._failure is not None and not self._is_told and worker_ends.is_guiltier(death):
            self._failure = worker_ends.by_itself(death)  # in place of who lost a peer
            self._tell_failure()

    def _note_cause(self, death: Death) -> None:
        """An error was there before we ended its worker: whom it cut off on another node has only died sooner."""
        if self._is_told or death.message is None or worker_ends.lost_peer(death):
            return
        self._evidence, self._is_told = self._system.look(), True
        self._own, self._ends = worker_ends.by_itself(death), replace(self._ends, failed=True)
        self._tell(worker_ends.failed_message(self._own, self._group.generation, self._ends))

    def _end_generation(self, incident: str | None = None, since_s: float | None = None) -> None:
        """The generation ends, unless it does already; what is gone a moment later is collected first."""
        if self._is_ending:
            return
        self._is_ending = True
        self._observe(since_s)  # what follows is no training
        if incident is not None and self._stop_signal is None:
            was_killed = self._failure is not None and self._failure.signal is not None
            self._incidents.failed(incident, was_killed=was_killed)

    def _tell_failure(self) -> None:
        if self._failure is not None and not self._is_told:
            self._is_told = True
            self._tell(worker_ends.failed_message(self._failure, self._group.generation, self._ends_now()))

    def _ends_now(self) -> worker_ends.Ends:
        """How this generation's workers ended before anybody stopped them; who was sent a signal proves nothing."""
        was_sent = self._stop_signal is not None or bool(self._processes.relayed)
        return worker_ends.Ends() if was_sent else worker_ends.ends_of(self._group.deaths)

    def on_hang(self, hang: Death, now_s: float) -> None:
        """Workers hang: all are killed at once. Who hangs saves nothing, and the others wait for it."""
        if self._is_ending or self._processes.asked:
            return
        self._observer.tell("hung", text=hang.message)
        self._evidence, self._failure = self._system.look(), replace(hang, signal=signal.SIGKILL)
        self._end_generation(since_s=hang.at_s)
        if self._stop_signal is None:
            self._tell_failure()
        self._processes.stop(now_s, Rung.KILL)

    def on_store_end(self, status: int, now_s: float) -> None:
        """Without its store a generation cannot go on; who killed it is not known."""
        if self._formed is None or self._is_ending or self._stop_signal is not None:
            return
        code, number = (None, -status) if status < 0 else (status, None)
        ended = f"was killed (signal {number})" if number is not None else f"ended with exit code {code}"
        text = f"the store process of generation {self._formed.generation} {ended}"
        _log.warning("%s", text)
        if self.phase is NodePhase.DONE:  # other nodes' workers may not need it; if they do, they fail
            return
        self._failure = death = Death(code=code, signal=number, message=text)
        is_running = self.phase is NodePhase.RUNNING
        self._end_generation(text if is_running else None)
        self._tell_failure()
        if is_running:
            self._processes.stop(now_s)
        else:
            self._own = death
            self._rejoin()

    # -- requests to stop ---------------------------------------------------------------------

    def on_signal(self, number: int, now_s: float) -> None:
        """One rule for every phase: a request to stop or a drain is remembered, and what lives is told.

        Where no worker lives there is nobody to hand a stop signal to: it is a request, whatever it is mapped to.
        How the job has ended for this node stays so.
        """
        action = action_of(number, self._plan.signals)
        lives = self.phase is NodePhase.RUNNING
        asks = action is SignalAction.TERMINATE or (number in STOP_SIGNALS and not lives)
        is_first = self._stop_signal is None and self._end is None
        if is_first and (asks or action is SignalAction.DRAIN):
            self._stop_signal = number
        if lives:
            if asks and not self._processes.asked:
                self._tell(say.Leave("asked to stop"))
            self._processes.on_signal(number, now_s)
        elif self._stop_signal is not None:
            self._processes.note_request(number)

    # -- what comes next ----------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Nothing lives any more: leave, join again, or wait for the others, who are not done yet."""
        if self.phase is NodePhase.ENDED or (self.phase is NodePhase.RUNNING and not self._processes.is_over):
            return
        is_starting = self.phase in (NodePhase.WAITING, NodePhase.JOINING, NodePhase.FORMED)
        if self._stop_signal is not None:
            self._leave("asked to stop")
        elif is_starting and self._unstartable is not None:
            self._end = self._unstartable
            self._leave(self._end.message)
        elif self.phase is NodePhase.RUNNING:
            self._settle_generation()
            self.settle(now_s)  # the next start may have been tried in vain

    def _settle_generation(self) -> None:
        if self._failure is not None:
            self._tell_failure()
            self._own, self._ends = self._failure, self._ends_now()
        if self._end is not None:
            self._leave(self._end.message if isinstance(self._end, Death) else None)
        elif self._is_ending:
            self._rejoin()
        else:
            self.phase = NodePhase.DONE
            self._tell(say.Done(self._group.generation))

    def _rejoin(self) -> None:
        """Join again, without what SIGKILL did not end; where no worker could be started now, once one can be."""
        self.phase = NodePhase.JOINING
        self._leave_generation()
        self._starter.close_store()
        problem, self._unstartable = self._unstartable, None
        self._was_prepared = self._was_prepared and problem is None
        self._join()
        self._system.clean()
        if problem is not None:
            self._ask(self._starter.prepare)

    def _leave(self, why: str | None = None) -> None:
        self._exits = tuple(self._group.deaths) if self.phase in (NodePhase.RUNNING, NodePhase.DONE) else ()
        self.phase = NodePhase.ENDED
        self._names.end()
        if why is not None:
            self._tell(say.Leave(why[:200]))
        self._starter.close_store()

    # -- for observers ------------------------------------------------------------------------

    def _observe(self, since_s: float | None = None) -> None:
        phases = {NodePhase.RUNNING: self._processes.phase, NodePhase.DONE: RunPhase.CLEARING}
        phases[NodePhase.ENDED] = RunPhase.DONE
        self._observer.enter(phases.get(self.phase, RunPhase.WAITING), self._kind(), since_s)

    def _kind(self) -> Kind:
        """What the node's seconds are spent on."""
        if self._stop_signal is not None or self._end is not None:
            return Kind.ENDING
        match self.phase:
            case NodePhase.WAITING | NodePhase.JOINING:
                return Kind.WAITING
            case NodePhase.FORMED if self._is_prepared:
                return Kind.MEETING
            case NodePhase.FORMED:  # the fork server still imports torch
                return Kind.RESTARTING if self._starts else Kind.STARTING
            case NodePhase.RUNNING if self._processes.is_running and not self._is_ending:
                return Kind.TRAINING
            case NodePhase.RUNNING if self._is_ending:
                return Kind.STOPPING
        return Kind.ENDING

    # -- how it ended -------------------------------------------------------------------------

    def _hand_up(self) -> None:
        """Give what a worker of this node said before it ended the job to who asks us for it."""
        own, end = self._own, self._end
        place = self._group.places.get(f"rank {own.rank}") if own is not None else None
        if own is not None and place is not None and isinstance(end, say.GiveUp) and end.rank == own.rank:
            code = -own.signal if own.signal is not None else own.code or 0
            error_lines.hand_up(place.error_file, code, self._workers.env.get("TORCHELASTIC_ERROR_FILE"))

    def _outcome(self) -> Outcome:
        end, given_up, note = self._end, None, ""
        verdict = Verdict.SUCCEEDED if isinstance(end, say.Finished) else Verdict.FAILED
        if isinstance(end, say.GiveUp):
            given_up = GivenUp(
                reason=end.reason,
                rank=end.rank,
                exit_code=end.exit_code,
                signal=end.signal,
                message=end.message or "",
            )
        if isinstance(end, say.Finished) and self._formed is None and self._stop_signal is None:
            note = "this node was a spare, and the job did not need it" + (" any more" if self._starts else "")
        return Outcome(
            verdict=verdict if self._stop_signal is None else Verdict.STOPPED,
            failure=self._cause(),
            given_up=given_up,
            stop_signal=self._stop_signal,
            exits=self._exits,
            took_s=self._system.now() - self._started_at_s,
            attempt=max(1, self._starts),
            survivors=self._processes.stuck(),
            note=note,
        )

    def _cause(self) -> Failure | None:
        if self._stop_signal is not None:  # worth a word when a worker did not leave with 0
            death = next((death for death in self._exits if death.exit_code != 0), None)
            if death is None:
                return None
            plain = Death(process=death.process, code=death.code, signal=death.signal)
            lines = self._system.last_lines(death.process)
            return failure.classify(plain, replace(self._evidence, last_lines=lines, stopped=True))
        match self._end:
            case say.Finished():
                return None
            case None:
                return failure.unresolved(self._names.why)
            case Death() as death:
                return failure.classify(death, self._evidence)
            case say.GiveUp() as end:
                own = self._own if self._own is not None and self._own.rank == end.rank else None
                death = worker_ends.given_up_for(end, own)
                lines = self._system.last_lines(own.process) if own is not None and own.process else ()
                cause = failure.classify(death, replace(self._evidence, last_lines=lines))
                return replace(cause, message=f"{cause.message}; {end.seen}") if end.seen else cause
