"""Collect an incident before anything is killed: ask all workers at once, then write what came in time.

What is gone a moment later comes first: stacks, flight recorders, last lines. What stays may be slow: it is
collected in a thread, so that a restart does not wait for it. Nothing here may fail a job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer_launch.host import incident_facts, process_tree
from trainer_launch.model.collectives import Doing, Explanation, Life, RankState, Recorded, brief, explain
from trainer_launch.model.frozen import dataclass, replace
from trainer_launch.supervisor import incident_bundle, stacks
from trainer_launch.supervisor.hang_detection import Worker
from trainer_launch.supervisor.incident_bundle import Incident
from trainer_launch.supervisor.worker_samples import Workers

FAILURE, HANG = "failure", "hang"
FAILURE_S = 0.3  # for workers to answer when a restart waits for it
HANG_S = 3.0
_NATIVE_S = 2.0  # for py-spy, each
_NATIVE_MOST = 2  # workers that py-spy looks at
_FACTS_S = 5.0
_KEPT = 8  # collectives of each group in incident.json
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What does not change during a run."""

    place: str  # the folder of all incidents
    job: str = ""
    host: str = ""
    node_rank: int | None = None
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Whom it asks."""

    workers: Workers
    last_lines: Callable[[str], Sequence[str]]  # of a process, by name
    question: Callable[[str | None], int] = lambda folder: 0  # to all flight recorders; its number
    answers: Callable[[int, float], Mapping[str, Recorded]] = lambda number, until_s: {}  # by process
    ended: Callable[[], Sequence[RankState]] = tuple  # the ranks of this generation without a process
    generation: Callable[[], int] = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """An incident, and what its ranks show."""

    folder: str  # "": nothing could be saved
    incident: Incident
    explanation: Explanation | None


class Collector:
    """Collects the incidents of one run."""

    def __init__(self, about: About, sources: Sources) -> None:
        self._about, self._sources = about, sources
        self._threads: list[threading.Thread] = []

    def collect(
        self,
        kind: str,
        sentence: str,
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
        folder = self._folder(at_s, missing)
        until_s = begun_s + (HANG_S if kind == HANG else FAILURE_S)
        number = self._sources.question(f"{folder}/{incident_bundle.RECORDER}" if folder else None)
        alive = self._sources.workers.look()
        texts = self._sources.workers.ask_at_once(alive, until_s) if texts is None else texts
        recorded = self._sources.answers(number, until_s)
        states = [
            self._state(worker, sample.state, texts.get(worker.pid, ""), recorded.get(worker.name))
            for worker, sample in alive.items()
            if worker.rank is not None
        ]
        states += [one for one in self._sources.ended() if one.rank not in {state.rank for state in states}]
        found = explain(states, time.time_ns())
        keeps_sentence |= found is None or kind == FAILURE
        told = Explanation(text="") if found is None else found
        incident = self._incident(kind, sentence if keeps_sentence else told.text, at_s, states, told)
        if folder:
            parts = [("", "sentence.txt", f"{incident.sentence}\n"), ("", "report.txt", report)]
            parts += [*self._outputs([*names, *(worker.name for worker in alive)]), *_stacks(alive, texts)]
            missing += [why for part in parts if (why := incident_bundle.add(folder, *part)) is not None]
        took_s = round(time.monotonic() - begun_s, 3)
        incident = replace(incident, took_s=took_s, missing=(*missing, *_silent(alive, texts, recorded)))
        if folder:
            self._finish(folder, incident, tuple(alive) if kind == HANG else ())
        return Collected(folder=folder, incident=incident, explanation=found)

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
        incident = replace(collected.incident, sentence=sentence, reason=reason, ranks=ranks, restart_helps=helps)
        self.close()
        if collected.folder:
            incident_bundle.finish(collected.folder, incident)

    def close(self, within_s: float = _FACTS_S) -> None:
        """Wait until what was begun is written."""
        end_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _state(self, worker: Worker, state: str, text: str, said: Recorded | None) -> RankState:
        frames = stacks.main_thread(text)
        return RankState(
            rank=worker.rank or 0,
            node=self._about.node_rank,
            life=Life.STOPPED if state == "T" else Life.ALIVE,
            place=stacks.where(frames) if frames else "",
            doing=stacks.doing(frames) if frames else Doing.UNKNOWN,
            groups=said.groups if said is not None else {},
            why="it did not answer in time" if said is None else said.why,
        )

    # -- writing ------------------------------------------------------------------------------

    def _folder(self, at_s: float, missing: list[str]) -> str:
        node = self._about.node_rank
        name = f"{self._about.job or 'run'}{'' if node is None else f'-node{node}'}"
        try:
            return incident_bundle.new_folder(self._about.place, name, at_s)
        except OSError as problem:
            why = f"cannot save an incident in {self._about.place}: {problem.strerror}"
            log.warning("%s; set --incident-dir to a writable directory, or to none", why)
            missing.append(why)
            return ""

    def _outputs(self, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        for name in dict.fromkeys(names):
            text = "".join(f"{line}\n" for line in self._sources.last_lines(name))
            yield incident_bundle.OUTPUT, _file_of(name), text

    def _finish(self, folder: str, incident: Incident, for_native: Sequence[Worker]) -> None:
        """The rest, which a restart does not wait for; C frames while the workers are there."""
        for worker in for_native[:_NATIVE_MOST]:
            text = incident_facts.native_stacks(worker.pid, _NATIVE_S)
            incident_bundle.add(folder, incident_bundle.NATIVE, _file_of(worker.name), text)
        incident_bundle.finish(folder, incident)  # should we be killed
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._facts, args=(folder, incident), name="incident", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _facts(self, folder: str, incident: Incident) -> None:
        ask: Mapping[str, Callable[[], str]] = {
            "memory.txt": incident_facts.memory,
            "shared_memory.txt": incident_facts.shared_memory,
            "network.txt": incident_facts.network,
            "kernel.txt": incident_facts.kernel_log,
            "gpus.txt": incident_facts.gpus,
            "nccl_ras.txt": lambda: incident_facts.nccl_ras(self._about.env),
        }
        missing = [*incident.missing]
        why = incident_bundle.add(folder, "", "environment.txt", incident_facts.environment(self._about.env))
        missing += [] if why is None else [why]
        for name, text in ask.items():
            why = incident_bundle.add(folder, incident_bundle.HOST, name, text())
            missing += [] if why is None else [why]
        incident_bundle.finish(folder, replace(incident, missing=tuple(missing)))


def _stacks(alive: Mapping[Worker, object], texts: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
    for worker in alive:
        text = texts.get(worker.pid, "") + process_tree.describe(worker.pid)
        yield incident_bundle.STACKS, _file_of(worker.name), text


def _file_of(name: str) -> str:
    return f"{name.replace(' ', '-').replace('/', '-')}.txt"


def _silent(
    alive: Mapping[Worker, object], texts: Mapping[int, str], recorded: Mapping[str, Recorded]
) -> list[str]:
    """What workers could not tell."""
    words = []
    for worker in alive:
        if not texts.get(worker.pid):
            words.append(f"{worker.name}: no Python stacks")
        said = recorded.get(worker.name)
        if said is None:
            words.append(f"{worker.name}: its flight recorder did not answer")
        elif said.why:
            words.append(f"{worker.name}: no flight recorder: {said.why}")
    return words
