"""Collect an incident before anything is killed: ask all workers at once, and take what comes in time.

Only what is gone a moment later is waited for: stacks, flight recorders, last lines. A thread writes it to the
folder while workers are stopped and start again, then collects what stays. Nothing here may fail a job.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.diagnosis import incident_bundle, stacks
from trainer_launch.diagnosis.collectives import (
    Doing,
    Explanation,
    Life,
    RankState,
    Recorded,
    Stage,
    brief,
    explain,
)
from trainer_launch.diagnosis.hang_detection import Quiet, WatchedWorker
from trainer_launch.diagnosis.incident_bundle import (
    FAILURE,
    HANG,
    HOST,
    NO_FACTS_YET,
    OUTPUT,
    RECORDER,
    REPORT,
    REQUEST,
    STACKS,
    Incident,
)
from trainer_launch.diagnosis.worker_samples import WatchedGroup, WatchedWorkers
from trainer_launch.host import incident_facts, process_tree, runtime_directory
from trainer_launch.host.deadline_subprocess import NO_THREAD, begin_thread
from trainer_launch.host.slow_files import within
from trainer_launch.model import Failure
from trainer_launch.model.redaction import presentable, redact_text
from trainer_launch.model.units import spans
from trainer_launch.supervisor import error_lines

FAILURE_S = 0.3  # for workers to answer when a restart waits for it
HANG_S = 2.0
_FACTS_S = 5.0  # for what stays, when the run is over
_LATER_S = 1.0  # until what stays is collected: the restart after a failure needs the CPUs
_ERROR_CHARS = 300
_SHOWN = 64  # processes below a worker
_WAITS = ("wait", "to_here")  # methods in which torch waits for other ranks: of collectives, and of RPCs
_KEPT = 8  # collectives of each group in incident.json
log = logging.getLogger(__name__)


class About(Struct, frozen=True, kw_only=True):
    """The values that do not change during a run."""

    place: str  # the folder of all incidents
    is_default: bool = False  # a place whose name everybody knows, so that it must be ours
    job: str = ""
    host: str = ""
    node_rank: int | None = None
    env: Mapping[str, str]
    run_dir: str = ""  # where `status` and the event log look for news


class Collected(Struct, kw_only=True):
    """An incident, as far as it is known now."""

    folder: str  # "": nothing could be saved
    incident: Incident
    names: Sequence[str] = ()  # processes whose output counts
    is_announced: bool = False  # people were told of it
    is_written: threading.Event = field(default_factory=threading.Event)  # all that was taken
    limit_s: float = 0.0  # for how long no progress was seen; 0: another node has seen none
    is_early: bool = False  # before it is known which pauses are usual


def quiet_s(state: RankState, times: Quiet, now_ns: int) -> float | None:
    """Since the last progress of a rank, which may spin where it waits in a collective.

    Calls that torch makes around a collective, such as a backward pass, compute as well. What the rank has entered
    since the watch looked is progress, and so is its end.
    """
    innermost = state.stack.partition("\n")[0]
    waits = state.doing is Doing.COLLECTIVE and (state.waits or "/torch/distributed/" in innermost)
    waits = waits or (times.may_spin and state.waits)
    entered = [each.at_ns for group in state.groups.values() for each in group.last]
    entered += [each.at_ns for group in state.groups.values() for each in group.messages]
    since_s = [(now_ns - at_ns) / 1e9 for at_ns in entered if at_ns <= now_ns]
    signs = (state.quiet_s, times.sign_s, None if waits else times.work_s, *since_s)
    return min((seconds for seconds in signs if seconds is not None), default=None)


class Collector:
    """Collects the incidents of one run."""

    def __init__(
        self,
        about: About,
        workers: WatchedWorkers,
        last_lines: Callable[[str], Sequence[str]],
        group: WatchedGroup | None = None,
        saving: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Collect what `workers` of a `group` show, without one those of any program.

        `last_lines` are those of a process, by its name; `saving` are pids that have reported a checkpoint.
        """
        self._about, self._workers, self._last_lines = about, workers, last_lines
        self._group, self._saving = group, saving
        self.quiet: Callable[[], Mapping[int, Quiet]] = dict  # by rank; a watch that collects with this has it
        self._count = 0  # so that no folder has the name of one that was dropped
        self._last: Collected | None = None
        self._last_announced: Collected | None = None  # the last of which people were told unasked
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()  # the run: nothing is put off any more
        self._lock = threading.Lock()

    def collect(
        self,
        kind: str,
        sentence: str | Callable[[Sequence[RankState]], str],
        *,
        names: Sequence[str] = (),
        report: str = "",
        texts: Mapping[int, str] | None = None,
        is_same: bool = False,
    ) -> Collected:
        """Collect now; `names` are processes whose output counts, also those that have ended.

        `texts` are the stacks by pid, where they were asked for already. What flight recorders explain takes the
        place of a hang's sentence that is a text. What is the same as the last hang of which people were told goes
        into the folder of that, below its sentence.
        """
        at_s, begun_s = time.time(), time.monotonic()
        before = self.announced_hang() if is_same else None
        folder, why = self._folder(at_s) if before is None else (before.folder, ())
        until_s = begun_s + (FAILURE_S if kind == FAILURE else HANG_S)
        group, recorders = self._group, None if self._group is None else self._group.recorders
        # A rank that leaves its groups unwinds: faulthandler would read frames that change, and end it by SIGSEGV.
        unwinds, dumps = kind == FAILURE and group is not None and group.keeps_state, f"{folder}/{RECORDER}"
        number = recorders.question(dumps if folder else None, until_s, stacks=unwinds) if recorders else 0
        alive = self._workers.present()
        asked = stacks.ask(alive) if texts is None and not unwinds else {}
        recorded = recorders.answers(number, until_s) if recorders else {}
        if unwinds:
            texts = {each.pid: recorded[each.name].stacks for each in alive if each.name in recorded}
        texts = stacks.answers(asked, until_s) if texts is None else texts
        states = [
            self._state(
                worker, state, texts.get(worker.pid, ""), recorded.get(worker.name), is_hang=kind != FAILURE
            )
            for worker, state in alive.items()
            if worker.rank is not None
        ]
        with_process = {state.rank for state in states}
        states += [state for state in (group.ended() if group else ()) if state.rank not in with_process]
        if kind != FAILURE:
            by_rank, now_ns = self.quiet(), time.time_ns()
            times = [(each, by_rank.get(each.rank, Quiet(None, None))) for each in states]
            states = [replace(each, quiet_s=quiet_s(each, quiet, now_ns)) for each, quiet in times]
        states.sort(key=lambda state: state.rank)
        is_kept, sentence = (kind != HANG, sentence) if isinstance(sentence, str) else (True, sentence(states))
        verdict = explain(states, time.time_ns()) or Explanation(text=sentence)
        names = tuple(dict.fromkeys([*names, *(worker.name for worker in alive)]))
        # A worker that is about to be stopped for another one's failure has told enough by its Python stacks.
        silent = {worker for worker in alive if kind != FAILURE or not texts.get(worker.pid)}
        texts_by_file = {**self._outputs(names), **self._stacks(alive, texts, silent)} if folder else {}
        incident = Incident(
            sentence=sentence if is_kept else verdict.text,
            kind=kind,
            time_s=at_s,
            job=self._about.job,
            host=self._about.host,
            node_rank=self._about.node_rank,
            generation=self._generation,
            reason=verdict.reason,
            ranks=verdict.ranks,
            restart_helps=verdict.helps,
            states=tuple(brief(state, _KEPT) for state in states),
            missing=(*why, *self._silent(alive, texts, recorded)),
            took_s=round(time.monotonic() - begun_s, 3),
        )
        collected = before or Collected(folder=folder, incident=incident)
        if before is not None:
            shown = {"states": incident.states, "missing": incident.missing, "took_s": incident.took_s}
            collected.incident, collected.is_written = replace(before.incident, **shown), threading.Event()
            collected.limit_s, collected.is_early = 0.0, False
        collected.names = names
        self._begin_writing(collected, {REPORT: report, **texts_by_file})
        if kind != FAILURE:  # no restart waits for it, and who looks next finds all of it
            collected.is_written.wait(HANG_S)
        self._last = collected
        return collected

    @property
    def _generation(self) -> int:
        return 0 if self._group is None else self._group.generation

    def explained(self, collected: Collected, why: Explanation) -> None:
        """All nodes have told what they know: the sentence of the job in place of this node's own."""
        changes: dict[str, Any] = {"sentence": why.text, "reason": why.reason, "ranks": why.ranks}
        self._save(collected, kind=HANG, restart_helps=why.helps, **changes)
        self.tell(collected)

    def complete(self, collected: Collected, others: Sequence[RankState], sentence: str) -> None:
        """Add what all ranks show, as far as a message has room; a `sentence`: an answer to a person's request."""
        own = collected.incident.states
        ranks = {state.rank for state in own}
        states = (*own, *(state for state in others if state.rank not in ranks))
        self._save(collected, states=states, **({"sentence": sentence} if sentence else {}))
        if sentence:
            self.tell(collected)

    def recovered(self, text: str) -> None:
        """Survivors of a generation that is over have kept their state: its last incident says so."""
        collected = self._last
        if collected is None or collected.incident.kind == REQUEST or self._is_present(collected):
            return
        self._last = None
        if collected.incident.kind == FAILURE or collected.is_announced:
            sentence = (incident_bundle.read(collected.folder) or collected.incident).sentence
            self._save(collected, sentence=f"{sentence}; {text}")

    def drop(self, collected: Collected) -> None:
        """Remove what was no incident, unless people asked for it or were told of it."""
        if collected.folder and collected.incident.kind != REQUEST and not collected.is_announced:
            with self._lock:
                within(collected.folder, None, incident_bundle.drop, collected.folder)

    def tell(self, collected: Collected) -> None:
        """Tell `status` and the event log, once, and people where it is; it may take the place of an old one."""
        if collected.is_announced:
            return
        collected.is_announced = collected.folder != ""
        if collected.folder:
            self._last_announced = self._last_announced if collected.incident.kind == REQUEST else collected
            within(collected.folder, None, incident_bundle.remove_old, collected.folder)
        incident, where = collected.incident, os.path.basename(collected.folder)
        runtime_directory.tell(
            self._about.run_dir,
            "incident",
            kind=incident.kind,
            text=incident.sentence,
            id=where or None,
            reason=incident.reason or None,
            ranks=spans(incident.ranks) if incident.ranks else None,
            restart_helps=incident.restart_helps,
        )
        if incident.kind != HANG and collected.folder:
            log.info("%scollected in %s", "" if incident.kind == FAILURE else "on request: ", collected.folder)

    def _is_present(self, collected: Collected) -> bool:
        """Whether this is of the present generation."""
        return collected.incident.generation == self._generation

    def announced_hang(self, message: str | None = None) -> Collected | None:
        """The last incident that people were told of, if it is a hang of this generation, and of such a message."""
        hang = self._last_announced
        if hang is None or hang.incident.kind != HANG or not self._is_present(hang):
            return None
        return hang if message is None or hang.incident.sentence in message else None

    def concluded(self, failure: Failure) -> None:
        """The run is over: its last failure in the words of the termination message, and all that was written."""
        ended: dict[str, Any] = {"reason": failure.reason, "restart_helps": failure.restart_helps}
        if (hang := self.announced_hang(failure.message)) is not None:
            self._save(hang, **ended)
            return
        collected = self._last
        if collected is None or collected.incident.kind != FAILURE or not self._is_present(collected):
            return
        collected.is_written.wait(_FACTS_S)
        if collected.folder:
            for name, text in self._outputs(collected.names).items():
                incident_bundle.add(collected.folder, name, text)
        ranks = () if failure.rank is None else (failure.rank,)
        self._save(collected, sentence=failure.message, ranks=ranks, **ended)

    def close(self) -> None:
        """Wait until what was begun is written."""
        self._is_over.set()
        end_s = time.monotonic() + _FACTS_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _state(
        self, worker: WatchedWorker, state: str, text: str, answer: Recorded | None, *, is_hang: bool
    ) -> RankState:
        answer = answer or Recorded(why="it did not answer in time" if self._group else "")
        frames, groups, stage = stacks.main_thread(text), answer.groups, answer.stage
        doing = shown = stacks.doing(frames)
        place, waits_in_torch = stacks.where(frames) if frames else "", answer.calls in _WAITS
        if is_hang:
            has_joined = waits_in_torch or any(group.entered > group.done for group in groups.values())
            doing = self._workers.doing(worker, text, has_joined=has_joined)
        elif doing is Doing.UNKNOWN and self._workers.waits_in_store(worker):
            doing = Doing.COLLECTIVE
        if state == "t":  # and answers nothing
            doing = Doing.DEBUGGER
        if doing is Doing.COLLECTIVE and shown is not doing:
            place = "waits in the store" + (f", called from {place.removeprefix('in ')}" if place else "")
        elif doing is Doing.UNKNOWN and worker.pid in self._saving():
            doing = Doing.CHECKPOINT
        elif doing is Doing.UNKNOWN and waits_in_torch:  # for other ranks
            method = "work.wait" if answer.calls == "wait" else answer.calls
            doing, place = Doing.COLLECTIVE, f"waits in {method}, called from {place.removeprefix('in ')}"
        place = self._at_exit(worker, text) or place
        if is_hang and place and doing in (Doing.UNKNOWN, Doing.DATA) and ", after " not in place:
            error = presentable(error_lines.printed_last(self._last_lines(worker.name)))  # such as of its thread
            place += f", after {error[:_ERROR_CHARS]}" if error else ""
        if self._group is not None and worker.name in self._group.recorders.at_end:
            stage = Stage.ENDED
        return RankState(
            rank=worker.rank or 0,
            node=self._about.node_rank,
            life=Life.STOPPED if state == "T" else Life.ALIVE,
            place=place,
            doing=doing,
            stage=stage,
            stack=stacks.calls(frames),
            groups=groups,
            why=answer.why,
        )

    def _at_exit(self, worker: WatchedWorker, text: str) -> str:
        """Where a program that has ended still waits, and the error that ended it; "": it has not ended."""
        place = None if self._group is None else self._group.places.get(worker.name)
        where = stacks.at_exit(text)
        error = error_lines.message_in(error_lines.read_own_error(place.error_file)) if where and place else None
        return f"{where}, after {error}" if error else where

    def _folder(self, at_s: float) -> tuple[str, Sequence[str]]:
        """A new folder, or "" and why there is none."""
        about, node, why = self._about, self._about.node_rank, "its file server does not answer"
        name = f"{about.job or 'run'}{'' if node is None else f'-node{node}'}"
        first, self._count = self._count, self._count + 1
        try:
            made = incident_bundle.new_folder, about.place, name, at_s, first, about.is_default
            if folder := within(about.place, "", *made):
                return folder, ()
        except OSError as problem:
            why = problem.strerror or str(problem)
        why = f"cannot save an incident in {about.place}: {why}"
        log.warning("%s; set --incident-dir to a writable directory, or to none", why)
        return "", (why,)

    def _outputs(self, names: Sequence[str]) -> dict[str, str]:
        lines = {name: self._last_lines(name) for name in names}
        return {_file_of(OUTPUT, name): "".join(f"{line}\n" for line in each) for name, each in lines.items()}

    def _stacks(
        self, alive: Collection[WatchedWorker], texts: Mapping[int, str], hung: Collection[WatchedWorker]
    ) -> dict[str, str]:
        """Each worker as it says itself; of these, what they have started, and both as the kernel has them."""
        written, shown = {}, set[int]()
        children = self._workers.children(hung) if hung else {}
        for worker in alive:
            text = texts.get(worker.pid, "")
            if worker in hung:
                text += process_tree.describe(worker.pid)
                shown |= {worker.pid, *(process.pid for process in children[worker])}
                for process in children[worker][:_SHOWN]:
                    text += f"\n== {process.name}, pid {process.pid}\n"
                    text += texts.get(process.pid, "") + process_tree.describe(process.pid)
            written[_file_of(STACKS, worker.name)] = text
        # What a program that has ended has left; a group's fork server is none of it.
        left = () if self._group else process_tree.descendants(os.getpid())
        for process in [each for each in left if each.pid not in shown][:_SHOWN]:
            written[_file_of(STACKS, f"{process.name} pid {process.pid}")] = process_tree.describe(process.pid)
        return written

    def _silent(
        self, alive: Collection[WatchedWorker], texts: Mapping[int, str], recorded: Mapping[str, Recorded]
    ) -> Iterator[str]:
        for worker in alive if self._group else ():
            if not texts.get(worker.pid):
                yield f"{worker.name}: no Python stacks"
            answer = recorded.get(worker.name)
            if answer is None:
                yield f"{worker.name}: its flight recorder did not answer"
            elif answer.why:
                yield f"{worker.name}: no flight recorder: {answer.why}"

    def _save(self, collected: Collected, missing: Sequence[str] | None = None, **changes: Any) -> None:
        """Write incident.json anew, where its folder still is; `missing` are the facts that are."""
        with self._lock:
            before = incident_bundle.read(collected.folder) or collected.incident
            if missing is not None:
                kept = [word for word in before.missing if word != NO_FACTS_YET]
                changes["missing"] = (*kept, *missing)
            now = replace(before, **changes)
            now = replace(now, sentence=redact_text(now.sentence))
            saved = within(collected.folder, now, incident_bundle.finish, collected.folder, now)
            collected.incident = replace(saved, states=collected.incident.states)  # the file has other nodes', too

    def _begin_writing(self, collected: Collected, texts: Mapping[str, str]) -> None:
        """Write what was taken, should we be killed, then collect what stays; nobody waits for either."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = begin_thread("incident", self._write, collected, texts, collected.is_written)
        if thread is not None:
            self._threads.append(thread)
        else:
            self._write_taken(collected, texts, f"{HOST}/: {NO_THREAD}")
            collected.is_written.set()

    def _write(self, collected: Collected, texts: Mapping[str, str], is_written: threading.Event) -> None:
        try:
            self._write_taken(collected, texts, NO_FACTS_YET)
        finally:
            is_written.set()
        if collected.incident.kind == FAILURE:
            self._is_over.wait(_LATER_S)
        if collected.folder:
            self._write_facts(collected)

    def _write_taken(self, collected: Collected, texts: Mapping[str, str], facts: str) -> None:
        if collected.folder:
            problems = [incident_bundle.add(collected.folder, name, text) for name, text in texts.items()]
            missing = [*(problem for problem in problems if problem is not None), facts]
            self._save(collected, missing, states=collected.incident.states)
        if collected.incident.kind == FAILURE:
            self.tell(collected)

    def _write_facts(self, collected: Collected) -> None:
        """Write each as it comes: one of them may hang."""
        variables = incident_facts.environment(self._about.env)
        missing = [incident_bundle.add(collected.folder, "environment.txt", variables)]
        for name, text in incident_facts.ALL.items():
            missing.append(_add_fact(collected.folder, f"{HOST}/{name}", text))
        self._save(collected, [why for why in missing if why is not None])


def _add_fact(folder: str, name: str, text: Callable[[], str]) -> str | None:
    try:
        return incident_bundle.add(folder, name, text())
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        return f"{name}: {where}{problem.strerror or problem}"


def _file_of(part: str, name: str) -> str:
    return f"{part}/{name.replace(' ', '-').replace('/', '-')}.txt"
