"""Collect an incident before anything is killed: ask all workers at once, then write what came in time.

What is gone a moment later comes first: stacks, flight recorders, last lines. What stays may be slow: it is
collected in threads, so that a restart does not wait for it. Nothing here may fail a job.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import incident_facts, process_tree, runtime_directory
from trainer_launch.host.deadline_subprocess import NO_THREAD, begin_thread
from trainer_launch.model import Failure, exit_codes
from trainer_launch.model.collectives import Doing, Explanation, Life, RankState, Recorded, brief, explain, spans
from trainer_launch.supervisor import incident_bundle, stacks
from trainer_launch.supervisor.hang_detection import Quiet, Worker
from trainer_launch.supervisor.incident_bundle import FAILURE, HANG, Incident
from trainer_launch.supervisor.worker_samples import ALL_ANSWERS_S, Workers

FAILURE_S = 0.3  # for workers to answer when a restart waits for it
HANG_S = 2.0
_NATIVE_S = 2.0  # for py-spy, all processes at once
_NATIVE_MOST = 4  # processes that py-spy looks at
_FACTS_S = 4.0
_WHOLE_S = 9.5  # for all of it, with the stacks that were asked for before; each part gets the rest at most
_SHOWN = 64  # processes below a worker
_KEPT = 8  # collectives of each group in incident.json
log = logging.getLogger(__name__)


class About(Struct, frozen=True, kw_only=True):
    """What does not change during a run."""

    place: str  # the folder of all incidents
    is_default: bool = False  # a place whose name everybody knows, so that it must be ours
    job: str = ""
    host: str = ""
    node_rank: int | None = None
    env: Mapping[str, str]
    run_dir: str = ""  # where `status` and the event log look for news


class Sources(Struct, frozen=True, kw_only=True):
    """Whom it asks."""

    workers: Workers
    last_lines: Callable[[str], Sequence[str]]  # of a process, by name
    is_group: bool = True  # forked torch workers; False: any program, with whatever it has started
    # To all flight recorders, until when they may save their dumps; its number.
    question: Callable[[str | None, float], int] = lambda folder, until_s: 0
    answers: Callable[[int, float], Mapping[str, Recorded]] = lambda number, until_s: {}  # by process
    ended: Callable[[], Sequence[RankState]] = tuple  # the ranks of this generation without a process
    generation: Callable[[], int] = int
    saving: Callable[[], Collection[int]] = tuple  # pids that have reported a checkpoint


class Collected(Struct, frozen=True, kw_only=True):
    """An incident, and what its ranks show."""

    folder: str  # "": nothing could be saved
    incident: Incident
    explanation: Explanation | None
    limit_s: float = 0.0  # for how long no progress was seen; 0: another node has seen none

    def with_quiet(self, quiet: Mapping[int, Quiet], limit_s: float = 0.0) -> Collected:
        """With the last progress of each rank; who waits in a collective may spin there."""
        states = []
        for state in self.incident.states:
            known = quiet.get(state.rank, ())[: 1 if state.doing is Doing.COLLECTIVE else 2]
            quiet_s = min((since_s for since_s in known if since_s is not None), default=state.quiet_s)
            states.append(replace(state, quiet_s=quiet_s))
        return replace(self, incident=replace(self.incident, states=tuple(states)), limit_s=limit_s)


class Collector:
    """Collects the incidents of one run."""

    def __init__(self, about: About, sources: Sources) -> None:
        self._about, self._sources = about, sources
        self._threads: list[threading.Thread] = []
        self._last: tuple[Collected, Sequence[str]] | None = None  # and whose output counted
        self._told: dict[str, Incident] = {}  # what incident.json says, by folder
        self._dropped: set[str] = set()  # folders of what was no incident
        self._announced: set[str] = set()  # folders that people were told of
        self._lock = threading.Lock()

    def collect(
        self,
        kind: str,
        sentence: str | Callable[[Sequence[RankState]], str],
        *,
        names: Sequence[str] = (),
        report: str = "",
        texts: Mapping[int, str] | None = None,
        keeps_sentence: bool = False,
    ) -> Collected:
        """Collect now; `names` are processes whose output counts, also those that have ended.

        `texts` are the stacks by pid, where they were asked for already. What flight recorders explain takes the
        place of a hang's sentence, unless that is kept.
        """
        at_s, begun_s, missing = time.time(), time.monotonic(), list[str]()
        end_s = begun_s + _WHOLE_S - (0.0 if texts is None else ALL_ANSWERS_S)
        folder = self._folder(at_s, missing)
        until_s = begun_s + (HANG_S if kind == HANG else FAILURE_S)
        number = self._sources.question(f"{folder}/{incident_bundle.RECORDER}" if folder else None, until_s)
        alive = self._sources.workers.look()
        texts = self._sources.workers.ask_at_once(alive, until_s) if texts is None else texts
        recorded = self._sources.answers(number, until_s)
        states = [
            self._state(worker, sample.state, texts.get(worker.pid, ""), recorded.get(worker.name))
            for worker, sample in alive.items()
            if worker.rank is not None
        ]
        states += [one for one in self._sources.ended() if one.rank not in {state.rank for state in states}]
        sentence = sentence if isinstance(sentence, str) else sentence(states)
        found = explain(states, time.time_ns())
        keeps_sentence |= found is None or kind == FAILURE
        told = Explanation(text="") if found is None else found
        incident = self._incident(kind, sentence if keeps_sentence else told.text, at_s, states, told)
        names = tuple(dict.fromkeys([*names, *(worker.name for worker in alive)]))
        if folder:
            parts = [("", "sentence.txt", f"{incident.sentence}\n"), ("", "report.txt", report)]
            parts += [*self._outputs(names), *self._stacks(alive, texts)]
            missing += [why for part in parts if (why := incident_bundle.add(folder, *part)) is not None]
            missing += self._native(folder, kind, alive, texts, end_s)
        missing += self._silent(alive, texts, recorded)
        incident = replace(incident, took_s=round(time.monotonic() - begun_s, 3))
        collected = Collected(folder=folder, incident=incident, explanation=found)
        self._last = collected, names
        if folder:
            self._write(collected, missing=tuple(missing))  # should we be killed
            self._begin_facts(collected, end_s)
        if kind == FAILURE:
            self.tell(collected)
        return collected

    def _incident(
        self, kind: str, sentence: str, at_s: float, states: Sequence[RankState], told: Explanation
    ) -> Incident:
        return Incident(
            sentence=sentence,
            kind=kind,
            time_s=at_s,
            job=self._about.job,
            host=self._about.host,
            node_rank=self._about.node_rank,
            generation=self._sources.generation(),
            reason=told.reason,
            ranks=told.ranks,
            restart_helps=told.helps,
            states=tuple(brief(state, _KEPT) for state in sorted(states, key=lambda one: one.rank)),
        )

    def explained(
        self, collected: Collected, sentence: str, reason: str, ranks: tuple[int, ...], helps: bool | None
    ) -> None:
        """All nodes have told what they know: the sentence of the job in place of this node's own."""
        self.tell(self._write(collected, sentence=sentence, reason=reason, ranks=ranks, restart_helps=helps))

    def drop(self, collected: Collected) -> None:
        """It was no incident: nothing of it is kept, unless people were told of it or workers were ended for it."""
        if collected.folder and collected.folder not in self._announced:
            self._dropped.add(collected.folder)
            self._write(collected)

    def tell(self, collected: Collected) -> None:
        """Tell `status` and the event log, and people where it is; it may take the place of an old one."""
        if collected.folder:
            self._announced.add(collected.folder)
            incident_bundle.remove_old(collected.folder)
        told, where = collected.incident, os.path.basename(collected.folder)
        values = {"kind": told.kind, "text": told.sentence, "id": where or None, "reason": told.reason or None}
        ranks = spans(told.ranks) if told.ranks else None
        runtime_directory.tell(
            self._about.run_dir, "incident", **values, ranks=ranks, restart_helps=told.restart_helps
        )
        if told.kind == FAILURE and collected.folder:
            log.info("collected in %s", collected.folder)

    def concluded(self, failure: Failure) -> None:
        """The run is over: its last failure in the words of the termination message, and all that was written."""
        collected, names = self._last or (None, ())
        if collected is None or collected.incident.kind != FAILURE:
            return
        if collected.incident.generation != self._sources.generation():
            return
        again = exit_codes.retryable(failure.exit_code) if failure.again is None else failure.again
        ranks = () if failure.rank is None else (failure.rank,)
        self._write(collected, sentence=failure.message, reason=failure.reason, ranks=ranks, restart_helps=again)
        for part in self._outputs(names) if collected.folder else ():
            incident_bundle.add(collected.folder, *part, anew=True)

    def close(self, within_s: float = _FACTS_S + 1.0) -> None:
        """Wait until what was begun is written."""
        end_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _state(self, worker: Worker, state: str, text: str, said: Recorded | None) -> RankState:
        frames = stacks.main_thread(text)
        doing = stacks.doing(frames)
        if doing is Doing.UNKNOWN and worker.pid in self._sources.saving():
            doing = Doing.CHECKPOINT
        return RankState(
            rank=worker.rank or 0,
            node=self._about.node_rank,
            life=Life.STOPPED if state == "T" else Life.ALIVE,
            place=stacks.where(frames) if frames else "",
            doing=doing,
            groups=said.groups if said is not None else {},
            why=said.why if said is not None else "it did not answer in time" if self._sources.is_group else "",
        )

    # -- writing ------------------------------------------------------------------------------

    def _folder(self, at_s: float, missing: list[str]) -> str:
        node = self._about.node_rank
        name = f"{self._about.job or 'run'}{'' if node is None else f'-node{node}'}"
        try:
            return incident_bundle.new_folder(
                self._about.place, name, at_s, must_be_ours=self._about.is_default, used=self._dropped
            )
        except OSError as problem:
            why = f"cannot save an incident in {self._about.place}: {problem.strerror}"
            log.warning("%s; set --incident-dir to a writable directory, or to none", why)
            missing.append(why)
            return ""

    def _outputs(self, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        for name in names:
            text = "".join(f"{line}\n" for line in self._sources.last_lines(name))
            yield incident_bundle.OUTPUT, _file_of(name), text

    def _stacks(self, alive: Mapping[Worker, object], texts: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
        """Each worker and what it has started, as it says itself and as the kernel has it."""
        for worker in alive:
            text = texts.get(worker.pid, "") + process_tree.describe(worker.pid)
            for one in self._sources.workers.children(worker)[:_SHOWN]:
                text += f"\n== {one.name}, pid {one.pid}\n{texts.get(one.pid, '')}{process_tree.describe(one.pid)}"
            yield incident_bundle.STACKS, _file_of(worker.name), text
        for pid, name in [*self._left_behind(alive).items()][:_SHOWN]:
            yield incident_bundle.STACKS, _file_of(name), process_tree.describe(pid)

    def _left_behind(self, alive: Mapping[Worker, object]) -> dict[int, str]:
        """What a program that has ended has started, by pid; a group's fork server is none of it."""
        if self._sources.is_group:
            return {}
        known = {pid for w in alive for pid in (w.pid, *(one.pid for one in self._sources.workers.children(w)))}
        found = process_tree.descendants(os.getpid())
        return {one.pid: f"{one.name} pid {one.pid}" for one in found if one.pid not in known}

    def _native(
        self, folder: str, kind: str, alive: Mapping[Worker, object], texts: Mapping[int, str], end_s: float
    ) -> Iterator[str]:
        """C frames while the processes are there; and of any program's Python processes, who cannot be asked."""
        if kind == FAILURE and self._sources.is_group:
            return  # a restart waits for it
        names = {worker.pid: worker.name for worker in alive}
        if not self._sources.is_group:
            below = [one for worker in alive for one in self._sources.workers.children(worker)]
            names |= {one.pid: f"{one.name} pid {one.pid}" for one in below} | self._left_behind(alive)
        pids = [pid for pid in names if pid in texts or incident_facts.is_python(pid)][:_NATIVE_MOST]
        limit_s = max(0.0, min(_NATIVE_S, end_s - time.monotonic() - incident_facts.NATIVE_END_S))
        try:
            found = incident_facts.native_stacks(pids, limit_s) if pids else {}
        except OSError as problem:
            yield from (f"{names[pid]}: no Python stacks: {problem}" for pid in pids if not texts.get(pid))
            return
        for pid, text in found.items():
            why = incident_bundle.add(folder, incident_bundle.NATIVE, _file_of(names[pid]), text)
            yield from [] if why is None else [why]

    def _silent(
        self, alive: Mapping[Worker, object], texts: Mapping[int, str], recorded: Mapping[str, Recorded]
    ) -> Iterator[str]:
        for worker in alive if self._sources.is_group else ():
            if not texts.get(worker.pid):
                yield f"{worker.name}: no Python stacks"
            said = recorded.get(worker.name)
            if said is None:
                yield f"{worker.name}: its flight recorder did not answer"
            elif said.why:
                yield f"{worker.name}: no flight recorder: {said.why}"

    def _write(self, collected: Collected, missing: tuple[str, ...] = (), **changes: Any) -> Collected:
        """Write incident.json anew, with what has changed, and what else could not be collected."""
        with self._lock:
            if collected.folder in self._dropped:
                shutil.rmtree(collected.folder, ignore_errors=True)
                return collected
            before = self._told.get(collected.folder, collected.incident)
            now = replace(before, **changes)
            if collected.folder:
                now = incident_bundle.finish(
                    collected.folder, replace(now, missing=tuple(dict.fromkeys([*now.missing, *missing])))
                )
                self._told = {**self._told, collected.folder: now}
                if "sentence" in changes:
                    incident_bundle.add(collected.folder, "", "sentence.txt", f"{now.sentence}\n", anew=True)
        return replace(collected, incident=now)

    def _begin_facts(self, collected: Collected, end_s: float) -> None:
        """The rest, which a restart does not wait for."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = begin_thread("incident", self._facts, collected, end_s)
        if thread is None:
            self._write(collected, missing=(f"{incident_bundle.HOST}/: {NO_THREAD}",))
        else:
            self._threads.append(thread)

    def _facts(self, collected: Collected, end_s: float) -> None:
        """Ask for all facts at once: one of them may hang."""
        ask: Mapping[str, Callable[[], str]] = {
            "memory.txt": incident_facts.memory,
            "shared_memory.txt": incident_facts.shared_memory,
            "network.txt": incident_facts.network,
            "kernel.txt": incident_facts.kernel_log,
            "gpus.txt": incident_facts.gpus,
            "nccl_ras.txt": lambda: incident_facts.nccl_ras(self._about.env),
        }
        answers: dict[str, str | None] = {}

        def note(name: str, text: Callable[[], str]) -> None:
            try:
                answers[name] = incident_bundle.add(collected.folder, incident_bundle.HOST, name, text())
            except OSError as problem:
                answers[name] = f"{incident_bundle.HOST}/{name}: {_why(problem)}"
            if collected.folder in self._dropped:  # while this was being written
                shutil.rmtree(collected.folder, ignore_errors=True)

        threads = {name: begin_thread(name, note, name, text) for name, text in ask.items()}
        limit_s = max(0.0, min(_FACTS_S, end_s - time.monotonic()))
        until_s = time.monotonic() + limit_s
        environment = incident_facts.environment(self._about.env)
        missing = [incident_bundle.add(collected.folder, "", "environment.txt", environment)]
        for name, thread in threads.items():
            why = NO_THREAD if thread is None else f"no answer within {limit_s:.0f} s"
            if thread is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
            missing.append(answers.get(name, f"{incident_bundle.HOST}/{name}: {why}"))
        self._write(collected, missing=tuple(why for why in missing if why is not None))


def _why(problem: OSError) -> str:
    words = problem.strerror or str(problem)
    return f"{problem.filename}: {words}" if problem.filename else words


def _file_of(name: str) -> str:
    return f"{name.replace(' ', '-').replace('/', '-')}.txt"
