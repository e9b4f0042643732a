"""The hang watch: looks at this node's workers at a pace; a hang is collected, reported and, if asked for, ended.

What is a hang is decided in `hang_detection`, who is waited for in `collectives`. Nobody is killed before what the
workers can tell is on disk. Whoever asks for the look ends them.

Where a coordinator can be asked, idle and busy workers are ended only after it was: who waits in gloo sleeps, in
NCCL it spins. The node that has the cause ends its own at once; who waits for it, or is where a healthy rank may be
for minutes, gets `PATIENCE` times as long. Nobody is ended while the cause shows progress, wherever it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis import hang_detection
from trainer_launch.diagnosis.collectives import Explanation
from trainer_launch.diagnosis.hang_detection import Hang, Kind, Rules, Worker
from trainer_launch.diagnosis.incident_bundle import HANG
from trainer_launch.diagnosis.incident_collection import Collected, Collector
from trainer_launch.diagnosis.stacks import Frame, doing, main_thread, stacks_digest, waits_for_others, where
from trainer_launch.diagnosis.worker_samples import Workers
from trainer_launch.host import process_tree
from trainer_launch.model import Death

ANSWER_S = 8.0  # for the coordinator to explain; longer than all nodes have to tell it what they know
FRESH_S = 15.0  # an older explanation is no reason to end anybody
log = logging.getLogger(__name__)


class Watched(Struct, frozen=True, kw_only=True):
    """What is watched, and what for."""

    rules: Rules | None  # of the hangs that are ended; None: none is
    report: Rules | None = None  # of those that are only reported
    alone: bool  # no other node could be waited for
    explained: bool = False  # a coordinator explains what it is told

    @property
    def paced_by(self) -> Rules:
        """The rules that want to look most often."""
        return min(self.all_rules, key=lambda rules: rules.pace_s)

    @property
    def all_rules(self) -> tuple[Rules, ...]:
        """Both, as far as there are any."""
        return tuple(rules for rules in (self.rules, self.report) if rules is not None)


class Watch:
    """Looks when it is due."""

    def __init__(
        self,
        watched: Watched,
        workers: Workers,
        now: Callable[[], float],
        collector: Collector | None = None,
        tell: Callable[[Collected], None] | None = None,
    ) -> None:
        self._watched = watched
        self._workers = workers
        self._now = now
        self._collector = collector
        self._tell = tell  # the coordinator, which asks all nodes; None: there is none
        self._told: tuple[object, float] | None = None  # of which quiet, and when
        self._seen: tuple[str, tuple[str, ...], Collected | None] | None = None  # what it was told
        self._explained: tuple[Explanation, object, float] | None = None  # of which quiet, and when
        self._node = hang_detection.begin(now())
        self._asked_at_s: float | None = None  # the begin of an idleness that was looked into
        self._elsewhere: tuple[Worker, ...] = ()  # who then did not wait for others
        self._reported_at_s: float | None = None  # the last progress before the hang that was reported
        self._has_reported = False
        self._again_at_s: float | None = None  # when it is reported again, though nobody has made progress since
        self.due_s = self._node.at_s

    def look(self, now_s: float) -> Death | None:
        """Look once; report a hang, and tell of one that the supervisor has to end."""
        watched = self._watched
        rules = watched.paced_by
        self.due_s = now_s + rules.pace_s
        self._node = hang_detection.observe(self._node, self._workers.look(), now_s, rules)
        found = self._judged(watched.rules)
        to_end = None if found is None else self._to_end(found, now_s)
        if to_end is not None:
            return self._strike(to_end, now_s)
        is_new = not self._has_reported or self._reported_at_s != self._node.sign_at_s
        is_due = is_new or (self._again_at_s is not None and now_s >= self._again_at_s)
        if watched.report is not None and is_due:
            found = self._judged(watched.report)
            if found is not None:
                self._report_only(found)
        return None

    def reported(self) -> None:
        """Nothing more is reported until somebody makes progress; to have collected is no gap in the watch."""
        self._has_reported, self._reported_at_s, self._again_at_s = True, self._node.sign_at_s, None
        self._node = replace(self._node, at_s=self._now())

    def explained(self, told: Explanation) -> None:
        """What all nodes together know of the present quiet.

        Where the cause still shows progress, whoever may have it reports again should that have ended: at once, or
        after a while where it seems to have ended by now. Who only waits for the cause does not ask again.
        """
        now_s = self._node.at_s
        self._explained = told, self._quiet, now_s
        if not told.accuses:
            self._seen = None  # nothing is kept of it
        if not told.active:
            return
        may_be_ours = not told.ranks or any(worker.rank in told.ranks for worker in self._node.tracks)
        if all(self._judged(rules) is None for rules in self._watched.all_rules):
            self._again_at_s, self._explained = now_s, None
        elif may_be_ours:
            self._again_at_s = now_s + FRESH_S

    def quiet(self) -> dict[int, hang_detection.Quiet]:
        """How long ago each rank has done something."""
        found = hang_detection.quiet(self._node, self._watched.all_rules)
        return {worker.rank: quiet for worker, quiet in found.items() if worker.rank is not None}

    @property
    def _quiet(self) -> object:
        """Since when which workers make no progress: anything else is another hang."""
        return self._node.sign_at_s, tuple(self._node.tracks)

    def _to_end(self, found: Hang, now_s: float) -> Hang | None:
        """The hang, if its workers are to be ended now: it is explained, or nobody explains it."""
        if found.kind is Kind.STOPPED or not self._watched.explained:
            return self._named(found, now_s)
        told, quiet, at_s = self._explained or (None, None, 0.0)
        fresh_s = max(FRESH_S, found.limit_s) if told is not None and told.active else FRESH_S
        if told is not None and quiet == self._quiet and now_s < at_s + fresh_s:
            if told.active:
                return None
            if not told.accuses and not told.ranks:
                return self._named(found, now_s)  # nothing explains it
            own = tuple(worker for worker in self._node.tracks if worker.rank in told.ranks)
            is_ours = told.accuses and (own or told.reason or not told.ranks)
            is_due = is_ours or found.for_s >= hang_detection.others_s(found)
            return replace(found, workers=own or found.workers) if is_due else None
        if self._told is None or self._told[0] != self._quiet or now_s >= self._told[1] + FRESH_S:
            self._report_only(found)
            self._told = self._quiet, self._node.at_s
        return self._named(found, now_s) if now_s >= self._told[1] + ANSWER_S else None

    def _judged(self, rules: Rules | None) -> Hang | None:
        return None if rules is None else hang_detection.judge(self._node, rules)

    def _named(self, found: Hang, now_s: float) -> Hang | None:
        """The hang of those that cause it; None while they may be on another node.

        Workers that are idle probably wait for others, in a collective. Only who is elsewhere is to blame at once.
        """
        if found.kind is not Kind.IDLE:
            return found
        since_s = now_s - found.for_s
        if self._asked_at_s is None or since_s > self._asked_at_s + self._watched.paced_by.pace_s:
            self._asked_at_s = since_s
            self._elsewhere = tuple(
                worker
                for worker, frames in self._main_threads().items()
                if waits_for_others(frames) is False and not doing(frames).takes_long
            )
        if self._elsewhere and len(self._elsewhere) < len(self._node.tracks):
            found = replace(found, workers=self._elsewhere)
        return (
            found
            if self._elsewhere or self._watched.alone or found.for_s >= hang_detection.others_s(found)
            else None
        )

    def _main_threads(self) -> dict[Worker, tuple[Frame, ...]]:
        texts = self._workers.ask_all(self._workers.children(self._node.tracks))
        return {worker: main_thread(texts.get(worker.pid, "")) for worker in self._node.tracks}

    # -- acting -------------------------------------------------------------------------------

    def _strike(self, found: Hang, now_s: float) -> Death:
        workers = tuple(self._node.tracks)
        is_fresh = self._seen is not None and self._told is not None and self._told[0] == self._quiet
        text, digest, collected = self._seen if is_fresh and self._seen is not None else self._collected(found)
        log.error("hang: %s", text)
        for line in digest:
            log.error("hang: %s", line)
        self._node = replace(hang_detection.begin(now_s), pauses_s=self._node.pauses_s)
        self._asked_at_s, self._elsewhere = None, ()
        if collected is not None and self._collector is not None:
            self._collector.tell(collected)
        self._told, self._seen, self._explained = None, None, None
        explanation = collected.explanation if collected is not None else None
        named = explanation.ranks if explanation is not None else ()
        cause = min(workers, key=lambda worker: (worker.rank not in named, worker not in found.workers))
        reason = explanation.reason if explanation is not None and explanation.reason else "Hung"
        return Death(
            rank=cause.rank,
            local_rank=cause.local_rank,
            message=text,
            lines=digest,
            reason=reason,
            at_s=now_s - found.for_s,
        )

    def _report_only(self, found: Hang) -> None:
        """The ranks that ours wait for may be on other nodes: all are asked, and the coordinator explains."""
        log.info("no progress: %s; collecting an incident", found.text)
        self._seen = self._collected(found)
        self.reported()
        if self._seen[2] is not None and self._tell is not None:
            self._tell(self._seen[2])

    def _collected(self, found: Hang) -> tuple[str, tuple[str, ...], Collected | None]:
        """The hang in a sentence, where each worker is, and what was collected."""
        children = self._workers.children(self._node.tracks)
        texts = self._workers.ask_all(children)
        digest = stacks_digest({worker: self._place(worker, texts) for worker in children})
        digest += self._loaders(children, texts)
        if self._collector is None:
            return found.text, digest, None
        report = "".join(f"{line}\n" for line in (found.text, *digest))
        is_plain = found.kind is Kind.STOPPED  # its sentence says it all
        collected = self._collector.collect(HANG, found.text, report=report, texts=texts, keeps_sentence=is_plain)
        collected = collected.with_quiet(self.quiet(), found.limit_s)
        text = collected.incident.sentence
        return f"{text}; collected in {collected.folder}" if collected.folder else text, digest, collected

    def _place(self, worker: Worker, texts: Mapping[int, str]) -> str:
        known = main_thread(texts.get(worker.pid, ""))
        if known:
            return where(known)
        kernel = process_tree.sleeps_in(worker.pid)
        state = self._node.tracks[worker].last.state
        return f"state {state}" + (f", in the kernel's {kernel}" if kernel else "")

    def _loaders(
        self, children: Mapping[Worker, Sequence[process_tree.ProcessEntry]], texts: Mapping[int, str]
    ) -> tuple[str, ...]:
        return tuple(
            f"{worker.name}'s {entry.name} (pid {entry.pid}): {where(known)}"
            for worker, entries in children.items()
            for entry in entries
            if (known := main_thread(texts.get(entry.pid, "")))
        )
