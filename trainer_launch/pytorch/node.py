"""A node in the job: starts its torch workers, tells the coordinator how they end, joins again.

phase    | leaves it when
---------|--------------------------------------------------------------------------------------------------------
JOINING  | Formed: FORMED; GiveUp, Finished, or no coordinator for too long: ENDED
FORMED   | Go, and workers can be started: RUNNING; Restart, or the store has ended: JOINING
RUNNING  | all workers have ended with 0: DONE; the generation ends in any other way: ENDING
ENDING   | nothing of the generation lives any more: JOINING, or ENDED if the job is over
DONE     | Finished: ENDED; Restart: JOINING (another node's workers failed after ours had ended)
ENDED    | never

A generation ends for one reason, an `Ending`: a failure here, the coordinator's word, its absence, or a hang. All
workers are then stopped by the rungs of `Processes`. A request to stop, or a drain, is about what comes after: once
no worker lives any more the node leaves, whatever else has happened. `settle` alone decides what comes next.

The methods of `TorchNode` stand in the order of a generation: join, start, a worker's death, stop, settle.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict, replace

from trainer_launch.diagnosis import stragglers
from trainer_launch.diagnosis.group_incidents import GroupIncidents
from trainer_launch.host import runtime_directory
from trainer_launch.host.machine import machine_name
from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Client, Connected, Disconnected, News
from trainer_launch.model import Death, Failure, GivenUp, Outcome, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError, explained
from trainer_launch.model.signal_policy import SignalAction, action_of
from trainer_launch.model.units import counted
from trainer_launch.pytorch import worker_ends
from trainer_launch.pytorch.fork_server import Starter
from trainer_launch.pytorch.generations import LostPeer, Outside, SharedState
from trainer_launch.pytorch.worker_group import WorkerGroup
from trainer_launch.pytorch.worker_processes import LogFolders, worker_processes
from trainer_launch.supervisor.failure import how
from trainer_launch.supervisor.processes import Rung
from trainer_launch.supervisor.run_loop import Due, RunLoop, is_hang
from trainer_launch.supervisor.run_observer import RunPhase, StateKept, TimeKind

if TYPE_CHECKING:
    from trainer_launch.diagnosis.hang_watch import Watch

_STOP_REQUEST = "it was asked to stop"
_log = logging.getLogger(__name__)


class NodePhase(Enum):
    """Where the node is; see the drawing."""

    JOINING = "joining"
    FORMED = "formed"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    ENDED = "ended"


_LIVES = (NodePhase.RUNNING, NodePhase.ENDING)  # workers may live


class Ending(Struct, frozen=True):
    """Why a generation ends on this node."""

    death: Death | None = None  # the failure here; None: the coordinator's word, or its absence
    is_reported: bool = False  # the coordinator knows of it
    early: worker_ends.EarlyEnds | None = None  # None: looked at once all have ended
    wrote_error: frozenset[str] = frozenset()  # workers that had written an error of their own when it ended
    awaited: frozenset[str] = frozenset()  # workers that may still end by themselves, and tell the cause
    stops_at_s: float | None = None  # when workers are stopped; None: they have been
    stopped_at_s: float = math.inf


def client_of(group: WorkerGroup, secret: bytes | None, carried: Callable[[], Mapping[str, object]]) -> Client:
    """The connection of this node to its coordinator."""
    me, workers, system = group.membership, group.workers, group.system
    hello = say.Hello(
        *(say.VERSION, me.job, me.node_rank, me.host, group.incarnation),
        workers=workers.count,
        role=workers.role,
        machine=machine_name(workers.env, f"{me.host}-{me.node_rank}"),
        fault=me.fault,
        label=me.label,
        nodes=me.nodes,
        arrives=me.node_rank is None,
    )
    connected = me.coordinator, hello, secret, _log.info, me.seats, system.poke, workers.run_dir
    return Client(*connected, carried, stragglers.answer)


class TorchNode(RunLoop):
    """The node, which waits, acts, and settles what comes next."""

    def __init__(
        self,
        group: WorkerGroup,
        client: Client,
        starter: Starter,
        incidents: GroupIncidents,
        straggler_samples: stragglers.StragglerSamples,
        watch: Watch | None,
    ) -> None:
        """`watch` looks for hangs."""
        super().__init__(group.processes, watch)
        self._group, self._client, self._starter = group, client, starter
        self._workers, self._membership = group.workers, group.membership
        self._incidents, self._stragglers, self._hang_watch = incidents, straggler_samples, watch
        group.system.mark = runtime_directory.VARIABLE, self._workers.run_dir
        self._folders = LogFolders(self._workers, self._membership.job)
        self.phase = NodePhase.JOINING
        self._formed: say.Formed | None = None  # the last generation that this node was in
        self._go: say.Go | None = None  # where its store is
        self._has_store = False  # it is open, or another node's
        self._starts = 0  # generations whose workers were started
        self._ending = Ending(early=worker_ends.UNKNOWN)  # of this generation, or of the last one
        # When the last generation ended, until it is told that survivors have kept its state.
        self._replaces_since_s: float | None = self._started_at_s
        self._job_end: say.GiveUp | say.Finished | Death | None = None  # how the job ends for this node
        self._was_prepared = False  # all could be started when it joined, as the coordinator knows
        self._lost_peer: Death | None = None  # the first worker that has lost a peer, as it would have ended
        self._away_since_s: float | None = self._started_at_s  # None while the coordinator is there
        self._waiting: say.Waiting | None = None  # the coordinator's last word about missing nodes
        self._says_at_s = self._started_at_s + self._say_again_s  # when to log again what this node waits for

    def close(self) -> None:
        """The job is over for this node."""
        self._incidents.close()
        self._client.close()
        self._starter.close()

    def begin(self, now_s: float) -> None:
        """Join the job, once the coordinator is in reach."""
        self._join()

    def due(self) -> Iterator[Due]:
        """What is due, but for what `Processes` does."""
        yield from super().due()
        yield self._away_until_s, self._on_lost_coordinator
        if self.phase is NodePhase.JOINING and self._away_until_s is not None:
            yield self._says_at_s, self._say_awaited
        yield self._starter.retry_at_s, self._starter.retry
        yield self._ending.stops_at_s, self._stop
        if self.phase is NodePhase.RUNNING and self._lost_peer is not None:
            yield self._lost_peer.at_s + timeouts.PATIENCE_S, self._on_lost_peer

    def on_time(self, now_s: float) -> None:
        """Do what is due, and let observers see how far the workers are."""
        super().on_time(now_s)
        if self._processes.is_running:
            self._observer.look(self._group.recorders.farthest)

    def on_news(self, now_s: float) -> None:
        """Hear the fork server, then the coordinator: behind a Formed it would answer what that asks for.

        Workers are heard before their deaths: one that is inside of `generations()` since a moment can be kept.
        """
        self._try(self._starter.answer)
        self._hear_survivors(now_s)
        while (news := self._client.receive(0)) is not None:
            self.hear(news, now_s)

    def hear(self, news: News, now_s: float) -> None:
        """Act on news of the coordinator: its messages, the end of the connection, a new one."""
        match news:
            case say.Note(generation=self._group.generation):
                self._stragglers.hear(news)
                if self._incidents.hear(news, self._hang_watch):
                    self._observer.suspect()
            case Disconnected():
                self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
                self._says_at_s = now_s + self._say_again_s
            case say.Waiting():
                self._waiting = news
            case Connected():
                self._away_since_s = None
                if self.phase is NodePhase.DONE:  # it may have been lost with the connection
                    self._send(say.Done(self._group.generation))
            case say.Formed() if self.phase is NodePhase.JOINING:
                self._on_formed(news)
            case say.Go(generation=self._group.generation) if self.phase is NodePhase.FORMED:
                self._go = news
            case say.Restart():
                self._stragglers.end()
                self.on_restart(news, now_s)
            case say.GiveUp() | say.Finished() | say.Quarantined() | say.Refused(retry=False):
                self._stragglers.end()
                self._on_job_end(news, now_s)

    def _send(self, message: say.FromNode) -> None:
        self._client.send(self._incidents.completed(message))

    def _join(self) -> None:
        group, early = self._group, self._ending.early or worker_ends.UNKNOWN
        proof = next((death.fault for death in group.deaths if death.fault), "")
        self._was_prepared = self._starter.is_ready
        own = group.incarnation, group.generation, early.finished, early.failed, self._was_prepared
        self._send(say.Join(*own, device_fault=proof, may_be_asked=early.may_be_asked, kept=group.kept_states))

    @property
    def _say_again_s(self) -> float:
        return max(1.0, min(timeouts.SAY_AGAIN_S, self._membership.patience_s / 4))

    def _say_awaited(self, now_s: float) -> None:
        """Log what this node waits for, in place of a coordinator that would."""
        self._says_at_s = now_s + self._say_again_s
        left_s = (self._away_until_s or now_s) - now_s
        _log.info("%s; giving up in %.0f s", self._awaited(), left_s)

    @property
    def _away_until_s(self) -> float | None:
        """How long the coordinator may stay away: not at all where a worker has lost a peer, and waits for news."""
        if self._away_since_s is None or self.phase in (NodePhase.ENDING, NodePhase.ENDED):
            return None
        blip_s = timeouts.BLIP_S if self._lost_peer is None else 0.0
        patience_s = {NodePhase.RUNNING: blip_s, NodePhase.DONE: timeouts.GONE_S}
        until_s = self._away_since_s + patience_s.get(self.phase, self._membership.patience_s)
        return None if self._processes.asked else until_s

    def _awaited(self) -> str:
        """Say what this node waits for before a generation."""
        waiting, member = self._waiting, self._membership
        if self._away_since_s is not None:
            return self._client.connection or f"no answer from the coordinator at {member.coordinator} yet"
        if self.phase is NodePhase.JOINING and waiting is not None and waiting.missing:
            return f"{waiting.present} of {waiting.wanted} nodes, without {', '.join(waiting.missing)}"
        return "the start of its workers" if self.phase is NodePhase.FORMED else "the other nodes"

    def _on_lost_coordinator(self, now_s: float) -> None:
        if self.phase is NodePhase.RUNNING:
            self._end_generation(Ending(early=worker_ends.UNKNOWN), now_s)
            return
        if self.phase is NodePhase.DONE:  # our own workers did succeed
            self._job_end = say.Finished()
        else:
            member = self._membership
            text = f"the coordinator at {member.coordinator} did not answer for {member.patience_s:g} s"
            if member.node_rank is None and not self._group.generation:
                text += f"; the machine of that name or address serves it, and this is {member.host}"
            self._job_end = say.GiveUp(": ".join(filter(None, (text, self._client.connection))))
        self._leave()

    def _on_formed(self, formed: say.Formed) -> None:
        """Enter a generation, whose store and workers are started when they can be."""
        self.phase, self._formed, self._go = NodePhase.FORMED, formed, None
        self._ending = replace(self._ending, early=worker_ends.UNKNOWN)
        self._group.enter_generation(formed)
        self._has_store = not self._group.hosts_store
        self._observer.adopt(formed.notes)
        self._try(lambda: self._folders.begin(formed.restarts))

    def _try(self, action: Callable[[], None]) -> None:
        """Do what workers need that are to start; what runs goes on where that will never be."""
        try:
            action()
        except LaunchError as problem:
            if self.phase not in (NodePhase.JOINING, NodePhase.FORMED):
                _log.warning("%s; running workers continue", problem)
                return  # the next start tries it again, before others wait for this node
            reason = "Misconfigured" if problem.exit_code == exit_codes.MISCONFIGURED else "NotStarted"
            self._job_end = Death(reason=reason, message=str(problem), code=problem.exit_code)
            self._leave(str(problem))

    def _prepare(self, now_s: float) -> None:
        """Before a generation, or in one that is formed: what its workers need, one after the other."""
        self._try(self._starter.prepare)
        if self.is_done or not self._starter.is_ready:
            return
        if self.phase is NodePhase.JOINING and not self._was_prepared:
            self._join()
        elif self.phase is NodePhase.FORMED and not self._has_store:
            self._try(self._open_store)
        if self.phase is NodePhase.FORMED and self._formed and self._go:  # which tells where the open store is
            self._start(self._formed, self._go, now_s)

    def _open_store(self) -> None:
        """Open the store of a generation, and send its place."""
        port = self._starter.open_store(self._membership.ports)
        if port is not None:
            self._has_store = True
            host = self._client.own_address(self._membership.address, self._membership.host)
            self._send(say.Store(self._group.generation, host, port))

    def _start(self, formed: say.Formed, go: say.Go, now_s: float) -> None:
        """Start the workers: the store is open."""
        workers = self._workers
        self._observe()  # also a generation that starts at once
        specs = worker_processes(workers, self._membership, formed, go, self._folders.folder)
        runtime_directory.tell(workers.run_dir, "workers_started", workers=len(specs), first_rank=formed.first_rank)
        if self._starts:
            at_most = self._membership.max_restarts
            self._observer.tell("restarting", restart=self._starts, restarts_at_most=at_most)
        self.phase, self._ending, self._starts = NodePhase.RUNNING, Ending(), self._starts + 1
        self._lost_peer = None
        kept = [*self._processes.kept]
        try:
            unstarted = self._starter.start(specs, go.port)
        except (NodeError, OSError) as problem:
            text = str(explained(problem) or problem)
            self._job_end = Death(reason="NotStarted", message=text, code=exit_codes.INFRASTRUCTURE)
            self._end_generation(Ending(), now_s, rung=Rung.KILL)
            return
        _log.log(
            logging.WARNING if self._is_first and formed.generation > 1 else logging.INFO,
            "generation %d: %s, %s so far; this is node %d, store at %s:%d; %s",
            *(formed.generation, counted(formed.size, "node"), counted(formed.restarts, "restart")),
            *(formed.group_rank, go.host, go.port, _started([*self._processes.pids().values()], kept)),
        )
        for death in unstarted:
            self.on_end(replace(death, rank=self._group.places[death.process].rank), now_s)

    @property
    def _is_first(self) -> bool:
        """Whether this node is the first of its generation, and speaks for the job."""
        return self._formed is not None and self._formed.group_rank == 0

    def on_child(self, pid: int, status: int, now_s: float) -> None:
        """A child has ended; orphans, and workers of an earlier generation, concern nobody."""
        if self._starter.is_server(pid):
            self._try(lambda: self._starter.server_ended(status))
        elif self._starter.lose_store(pid):
            self.on_store_end(status, now_s)
        else:
            death = self._processes.reaped(pid, status, now_s)
            if death is not None:
                self._group.unasked |= {death.process} if pid in self._system.unasked else set()
                was_stopped, is_asked = self.phase is NodePhase.ENDING, self._stop_signal is not None
                self.on_end(self._group.explained(death, was_stopped=was_stopped, is_asked=is_asked), now_s)

    def on_end(self, death: Death, now_s: float) -> None:
        """A worker has ended: the first failure ends the generation, here and by the coordinator everywhere."""
        if self.phase in (NodePhase.JOINING, NodePhase.FORMED):
            _log.warning("%s ended with %s while it waited for the next generation", death.process, how(death))
            if self.phase is NodePhase.JOINING and death.process in self._group.survivors.holders:
                self._join()  # with one state fewer
            return
        self._group.deaths.append(death)
        _log.debug("%s ended with %s", death.process, how(death))
        if death.exit_code != 0 and not self._processes.asked:
            self._on_failure(death, now_s)

    def _on_failure(self, death: Death, now_s: float) -> None:
        if self._processes.is_draining and self.phase is NodePhase.RUNNING:
            self._log_failure(death)  # all have to save and to leave: the others here have the time that they need
            self._send(say.Leave(_STOP_REQUEST))  # and those of other nodes wait for nobody
        elif self.phase is NodePhase.RUNNING:
            self._evidence = self._system.look()
            ending = Ending(death, wrote_error=self._group.own_errors(death))
            if self._is_cause(ending):
                self._log_failure(death)
            # After a time-out, nobody need have ended; where the coordinator's node is gone, that is the cause.
            is_cut_off = worker_ends.waited_in_vain(death) == "PeerLost" and self._away_since_s is None
            awaits_s = timeouts.PATIENCE_S if is_cut_off else 0.0
            self._end_generation(ending, now_s, awaits_s=awaits_s)
        elif not self._ending.is_reported and worker_ends.is_guiltier(death, self._ending.stopped_at_s):
            self._note_guiltier(death)
        elif not self._ending.is_reported and worker_ends.is_nearer(death, self._ending.death):
            self._ending = replace(self._ending, death=worker_ends.by_itself(death))

    def _is_cause(self, ending: Ending) -> bool:
        """Whether a failure of its own has ended a generation, and no worker that still lives failed before it."""
        return ending.death is not None and not (ending.wrote_error or worker_ends.is_victim(ending.death))

    def _note_guiltier(self, death: Death) -> None:
        """A worker failed for a reason of its own, even where a peer that lost it has ended sooner."""
        ending = self._ending
        wrote_first = death.process in ending.wrote_error
        is_first = not ending.wrote_error and death.at_s <= ending.stopped_at_s
        if not (wrote_first or is_first or (ending.death and worker_ends.is_victim(ending.death))):
            return  # it may have failed because it was stopped
        self._evidence = self._system.look()
        early = replace(ending.early or self._early_ends(), failed=True)
        self._ending = replace(ending, death=worker_ends.by_itself(death), early=early, wrote_error=frozenset())
        self._log_failure(death)
        self._report()
        self._stop(self._system.now())

    def on_hang(self, hang: Death, now_s: float) -> None:
        """Workers hang: all are killed at once. A rank that hangs saves nothing, and the others wait for it."""
        if self.phase is not NodePhase.RUNNING or self._processes.asked:
            return
        hang = self._incidents.with_explanation(hang)
        self._observer.tell("hung", text=hang.message)
        self._evidence = self._system.look()
        ending = Ending(replace(hang, signal=signal.SIGKILL))
        for name, place in self._group.places.items():
            if hang.local_rank is not None and place.local_rank == hang.local_rank:
                self._group.survivors.able.discard(name)
                self._processes.kill(name)
        # Of those that can leave, who hangs does not.
        rung = Rung.LEADERS if self._group.survivors.able else Rung.KILL
        self._end_generation(ending, now_s, rung=rung)

    def on_store_end(self, status: int, now_s: float) -> None:
        """Without its store a generation cannot go on; who killed it is not known."""
        if self.phase in (NodePhase.JOINING, NodePhase.ENDING) or self._stop_signal is not None:
            return
        code, number = (None, -status) if status < 0 else (status, None)
        ended = f"was killed (signal {number})" if number is not None else f"ended with exit code {code}"
        text = f"the store process of generation {self._group.generation} {ended}"
        _log.warning("%s", text)
        if self.phase is not NodePhase.DONE:  # else others' workers may not need it, and if they do, they fail
            self._end_generation(Ending(Death(code=code, signal=number, message=text, at_s=now_s)), now_s)

    def on_restart(self, restart: say.Restart, now_s: float) -> None:
        """The coordinator ends the generation, also while draining: a rank that has lost a peer never ends."""
        ending = self._ending
        if self.phase is NodePhase.ENDING:
            if ending.is_reported or ending.death is None:
                return  # it ends it for what this node has reported, or repeats itself: ours were stopped since
            if worker_ends.waited_in_vain(ending.death) == "Hung":
                return  # it is told once all have ended: a time-out may be what others lost their peer for
        text = f"generation {restart.generation} is over: {restart.reason}"
        _log.log(logging.WARNING if self._is_first and not restart.grows else logging.INFO, "%s", text)
        if restart.patience_s and ending.awaited:  # victims here and there: one that waits for nobody may say why
            self._ending = replace(ending, death=None)
        elif self.phase in _LIVES:
            # What workers did before we stop them may tell why.
            ending = Ending(wrote_error=self._group.own_errors(), stopped_at_s=ending.stopped_at_s)
            since_s = now_s - restart.unnoticed_s if restart.unnoticed_s else None
            awaits_s = restart.patience_s
            self._end_generation(ending, now_s, None if restart.grows else text, since_s, awaits_s=awaits_s)
        elif self.phase is not NodePhase.ENDED:
            if self.phase is NodePhase.DONE:
                self._ending, self._replaces_since_s = Ending(early=self._early_ends()), now_s
            self._rejoin()

    def _on_job_end(self, news: say.GiveUp | say.Finished | say.Refused, now_s: float) -> None:
        """The job is over, or goes on without this node: it ends here once nothing runs."""
        self._job_end = worker_ends.end_of(news)
        if self.phase is NodePhase.RUNNING:
            self._end_generation(Ending(), now_s, news.reason if isinstance(news, say.GiveUp) else None)
        elif self.phase is NodePhase.ENDING:
            self._stop(now_s)
        else:
            self._leave()

    def _end_generation(
        self,
        ending: Ending,
        now_s: float,
        incident: str | None = None,
        since_s: float | None = None,
        *,
        rung: Rung = Rung.LEADERS,
        awaits_s: float = 0.0,
    ) -> None:
        """The generation ends: what is gone a moment later is collected first, then all workers are stopped.

        Where it is no death here, `incident` says why, and `since_s` since when that went unnoticed. Workers that
        wait for nobody may end by themselves within `awaits_s`: one of them may be the cause.
        """
        is_first, self.phase, self._ending = self.phase is NodePhase.RUNNING, NodePhase.ENDING, ending
        death, awaited = ending.death, frozenset[str]()
        if death is not None:
            since_s = death.at_s
            incident = None if is_hang(death) else self._failure_of(death).message  # that of a hang is there
        if is_first:
            self._replaces_since_s = now_s if death is None else death.at_s
            self._observe(since_s)  # what follows is no training
            if incident is not None and self._stop_signal is None:
                death = death or Death()
                timed_out = death.rank if worker_ends.waited_in_vain(death) == "Hung" else None
                awaited = self._incidents.failed(incident, was_killed=death.signal is not None, timed_out=timed_out)
        if self._is_cause(ending):
            self._report()
        if awaits_s and awaited:  # a worker that has written an error has nothing more to tell
            awaited -= self._group.survivors.able | {death.process for death in self._group.dying()}
        if awaits_s and awaited and not ending.wrote_error and not self._processes.asked:
            self._ending = replace(self._ending, awaited=awaited, stops_at_s=now_s + awaits_s)
        else:
            self._stop(now_s, rung)

    def _report(self) -> None:
        """Report the failure that ends the generation; a node that drains leaves instead, and costs no restart."""
        death = self._ending.death
        if death is None or self._ending.is_reported:
            return
        self._ending = replace(self._ending, is_reported=True)
        if self._stop_signal is not None:
            self._send(say.Leave(_STOP_REQUEST))
            return
        early, generation = self._ending.early or self._early_ends(), self._group.generation
        failure, now_s = self._failure_of(death), self._system.now()
        self._send(worker_ends.failed_message(death, failure, generation, early, now_s))

    def _log_failure(self, death: Death) -> None:
        if death == self._lost_peer:
            _log.warning("%s has lost a peer, and no rank is known to have ended: %s", death.process, death.message)
        elif death.process and death.reason != "NotRunnable":  # which is in the log already
            _log.warning("%s", self._failure_of(death).message)

    def _early_ends(self) -> worker_ends.EarlyEnds:
        """Return how workers ended before they were stopped; a worker that was sent a signal proves nothing."""
        if self._stop_signal is not None or self._processes.relayed:
            return worker_ends.EarlyEnds()
        return worker_ends.early_ends(self._group.deaths, self._ending.stopped_at_s, self._group.left_unasked())

    def _stop(self, now_s: float, rung: Rung = Rung.LEADERS) -> None:
        """Stop all workers: what they do from now on, they may do because of that."""
        stopped_at_s = min(now_s, self._ending.stopped_at_s)
        self._ending = replace(self._ending, awaited=frozenset(), stops_at_s=None, stopped_at_s=stopped_at_s)
        if self.phase is NodePhase.ENDING:
            able = self._group.survivors.able & self._processes.pids().keys()
            kept = able if rung is Rung.LEADERS and self._may_keep else frozenset[str]()
            self._group.survivors.leave(kept, self._group.generation)
            self._processes.stop(now_s, rung, sparing=kept)

    def _hear_survivors(self, now_s: float) -> None:
        """Hear workers inside of `generations()`: a lost peer is no cause, and the worker waits for the cause."""
        for name, message in self._group.survivors.hear():
            match message:
                case LostPeer(message=text) if self.phase is NodePhase.RUNNING and self._lost_peer is None:
                    place = self._group.places[name]
                    lost = Death(process=name, code=exit_codes.FAILED, at_s=now_s, message=text)
                    self._lost_peer = replace(lost, rank=place.rank, local_rank=place.local_rank)
                case Outside() if self.phase is NodePhase.ENDING and self._ending.stops_at_s is None:
                    self._stop(now_s)  # as any other worker
                case SharedState() if self.phase is NodePhase.RUNNING:
                    self._on_shared(message, now_s)

    def _on_lost_peer(self, now_s: float) -> None:
        """Connections broke, and nobody is known to have ended: the ranks meet again."""
        self._end_generation(Ending(self._lost_peer), now_s)

    def _settle_survivors(self, now_s: float) -> None:
        """Workers that have left a generation which ends are kept for the next one, if there is one for them."""
        ending, survivors, alive = self._ending, self._group.survivors, self._processes.pids().keys()
        if ending.awaited and ending.awaited & alive <= survivors.left:  # nobody can tell another cause any more
            self._stop(now_s)
        is_stopped = self.phase is NodePhase.ENDING and self._ending.stops_at_s is None
        if self._processes.asked or (is_stopped and not self._may_keep):
            survivors.dismiss()  # no step is left to them, whatever their handlers of the signal do
        elif is_stopped:
            for name in survivors.left & alive:
                self._processes.keep(name)

    @property
    def _may_keep(self) -> bool:
        """Whether this node will be in another generation, as far as it knows."""
        return self._job_end is None and self._stop_signal is None and not self._processes.asked

    def _on_shared(self, shared: SharedState, now_s: float) -> None:
        """A rank has the newest state: the first news of it is logged, once for each generation."""
        formed, since_s, self._replaces_since_s = self._formed, self._replaces_since_s, None
        if formed is None or since_s is None or not shared.kept:
            return
        kept = StateKept(
            generation=formed.generation,
            ranks=shared.kept,
            replaced=formed.world_size - shared.kept,
            step=shared.step,
            took_s=round(now_s - since_s, 3),
        )
        self._observer.tell("state_kept", **asdict(kept))
        self._incidents.recovered(str(kept))
        level = logging.WARNING if self._is_first else logging.INFO
        _log.log(level, "generation %d: %s", formed.generation, kept)

    def on_signal(self, number: int, now_s: float) -> None:
        """A request to stop is sent at once, so that the other nodes need not wait for the end of our workers."""
        was_asked = self._processes.asked
        if action_of(number, self._plan.signals) is SignalAction.TERMINATE and self._processes.take_back():
            self.phase = NodePhase.ENDING  # a handler of theirs may save
        super().on_signal(number, now_s)
        if self._processes.asked and not was_asked and not self._processes.is_over:
            self._send(say.Leave(_STOP_REQUEST))

    @property
    def is_decided(self) -> bool:
        """How the job has ended for this node stays so."""
        return self._job_end is not None

    def settle(self, now_s: float) -> None:
        """Nothing lives any more: leave, join again, or wait for the others, who are not done yet."""
        self._settle_survivors(now_s)
        if self.is_done or (self.phase in _LIVES and not self._processes.is_over):
            return
        if self.phase is NodePhase.ENDING:
            if self._ending.death is not None and not self._ending.is_reported:  # nobody failed but for a lost peer
                self._log_failure(self._ending.death)
                self._report()
            self._ending = replace(self._ending, early=self._ending.early or self._early_ends())
        if self._stop_signal is not None:
            if self.phase in (NodePhase.JOINING, NodePhase.FORMED):
                self._note = f"it was waiting: {self._awaited()}"
            self._leave(_STOP_REQUEST)
        elif self.phase in (NodePhase.JOINING, NodePhase.FORMED):
            self._prepare(now_s)
        elif self.phase is NodePhase.ENDING and self._job_end is not None:
            self._leave(self._job_end.message if isinstance(self._job_end, Death) else None)
        elif self.phase is NodePhase.ENDING:
            self._rejoin()
            self._prepare(now_s)
        elif self.phase is NodePhase.RUNNING:
            self.phase = NodePhase.DONE
            self._send(say.Done(self._group.generation))

    def _rejoin(self) -> None:
        """Join again, without what SIGKILL did not end."""
        self.phase = NodePhase.JOINING
        self._group.leave_generation()
        self._starter.close_store()
        self._join()
        self._system.clean()

    def _leave(self, why: str | None = None) -> None:
        if self._processes.take_back():  # they have waited in vain
            self.phase = NodePhase.ENDING
            self._processes.stop(self._system.now())
            return
        if self.phase not in (*_LIVES, NodePhase.DONE):  # no worker of the last generation ran at the end
            self._group.deaths = []
        self.phase, self.is_done = NodePhase.ENDED, True
        if why is not None:
            self._send(say.Leave(why[:200]))
        self._starter.close_store()

    def _observe(self, since_s: float | None = None) -> None:
        phases = {NodePhase.DONE: RunPhase.CLEARING, NodePhase.ENDED: RunPhase.DONE}
        phases |= dict.fromkeys(_LIVES, self._processes.phase)
        self._observer.enter(phases.get(self.phase, RunPhase.WAITING), self._time_kind(), since_s)

    def _time_kind(self) -> TimeKind:
        if self._stop_signal is not None or self._job_end is not None:
            return TimeKind.ENDING
        match self.phase:
            case NodePhase.JOINING:
                return TimeKind.WAITING
            case NodePhase.FORMED if self._formed is not None and self._formed.kept:
                return TimeKind.REPLACING
            case NodePhase.FORMED if self._starter.is_ready:
                return TimeKind.MEETING
            case NodePhase.FORMED:  # the fork server still imports torch
                return TimeKind.RESTARTING if self._starts else TimeKind.STARTING
            case NodePhase.RUNNING if self._processes.is_running:
                return TimeKind.TRAINING
            case NodePhase.ENDING:
                keeps = self._may_keep and self._group.keeps_state
                return TimeKind.REPLACING if keeps else TimeKind.STOPPING
        return TimeKind.ENDING

    def outcome(self) -> Outcome:
        """How the job ended for this node, and why."""
        end = self._job_end
        well = isinstance(end, say.Finished)
        outcome = self.ended(self._cause(), self._starts, well=well)
        if isinstance(end, say.GiveUp):
            first = {"rank": end.rank, "exit_code": end.exit_code, "signal": end.signal}
            return replace(outcome, given_up=GivenUp(reason=end.reason, message=end.message or "", **first))
        if well and not self._group.deaths and self._stop_signal is None:
            more = " any more" if self._starts else ""
            return replace(outcome, note=f"this node was a spare, and the job did not need it{more}")
        return outcome

    def _cause(self) -> Failure | None:
        """Return the failure for which the job ends."""
        if self._stop_signal is not None:  # worth a word when a worker did not leave with 0
            death = next((death for death in self._group.deaths if death.exit_code != 0), None)
            if death is None:
                return None
            plain = Death(process=death.process, code=death.code, signal=death.signal)
            return self._failure_of(plain, stopped=True)
        match self._job_end:
            case Death() as death:
                return self._failure_of(death)
            case say.GiveUp() as end:
                own = self._ending.death
                own = own if own is not None and own.rank == end.rank else None  # the job did not end for it
                failure = self._failure_of(worker_ends.cause_of(end, own))
                failure = replace(failure, message=f"{failure.message}; {end.seen}") if end.seen else failure
                return worker_ends.of_the_job(failure, end, self._group.node_rank)
        return None


def _started(pids: Sequence[int], kept: Sequence[int]) -> str:
    started = [pid for pid in pids if pid not in kept]
    which = f"{'pids' if started[1:] else 'pid'} {', '.join(map(str, started))}"
    text = f"started {counted(len(started), 'worker')} ({which})" if started else "started no worker"
    return f"{text}, {counted(len(kept), 'worker')} kept" if kept else text
