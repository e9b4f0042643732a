"""The hang watch: looks at this node's workers at a pace; a hang is collected, reported and, if asked for, ended.

What is a hang is decided in `hang_detection`, who is waited for in `collectives`. Nobody is killed before what the
workers can tell is on disk. Whoever asks for the look ends them.

Where a coordinator can be asked, idle and busy workers are ended only after it was: a rank that waits in gloo
sleeps, in NCCL it spins. The node that has the cause ends its own at once, if this has been quiet for the timeout.
Workers that wait for it, or are where a healthy rank may be for minutes, get `PATIENCE` times as long. Nobody is
ended while the cause shows progress or waits for a person, wherever it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis import hang_detection
from trainer_launch.diagnosis.collectives import Doing, Explanation
from trainer_launch.diagnosis.hang_detection import Hang, HangKind, Quiet, Rules, WatchedWorker
from trainer_launch.diagnosis.incident_bundle import HANG
from trainer_launch.diagnosis.incident_collection import Collected, Collector
from trainer_launch.diagnosis.stacks import main_thread, stacks_digest, waits_for_others, waits_for_work, where
from trainer_launch.diagnosis.worker_samples import WatchedWorkers
from trainer_launch.host import process_tree
from trainer_launch.model import Death

ANSWER_S = 8.0  # for the coordinator to explain; longer than all nodes have to tell it what they know
FRESH_S = 15.0  # an older explanation is no reason to end anybody
log = logging.getLogger(__name__)


class Watched(Struct, frozen=True, kw_only=True):
    """The rules of a watch, and who else could be asked."""

    rules: Rules | None  # of the hangs that are ended; None: none is
    report: Rules | None = None  # of those that are only reported
    alone: bool  # no other node could be waited for
    explained: bool = False  # a coordinator explains what nodes report

    @property
    def paced_by(self) -> Rules:
        """The rules that want to look most often."""
        return min(self.all_rules, key=lambda rules: rules.pace_s)

    @property
    def all_rules(self) -> tuple[Rules, ...]:
        """Both, as far as there are any."""
        return tuple(rules for rules in (self.rules, self.report) if rules is not None)


class _Report(NamedTuple):
    """A hang in a sentence, where each worker is, and what was collected."""

    text: str
    digest: tuple[str, ...]
    collected: Collected | None
    said: str  # the hang's own sentence, as it was then


class _HangRound(Struct, frozen=True, kw_only=True):
    """The question to all nodes about a quiet, and what came of it."""

    signs: Mapping[WatchedWorker, float | None]  # when each worker last showed progress: later ones end the quiet
    is_early: bool = False  # reported before it was known which pauses are usual
    is_reported: bool = False  # here, or by another node
    report: _Report | None = None  # our own
    asked_at_s: float | None = None  # when we had all nodes asked
    explanation: Explanation | None = None
    explained_at_s: float = 0.0
    again_at_s: float | None = None  # when it is reported again, though nobody has made progress since,
    causes: tuple[WatchedWorker, ...] = ()  # if these show none any more


class Watch:
    """Looks when it is due."""

    def __init__(
        self,
        watched: Watched,
        workers: WatchedWorkers,
        now: Callable[[], float],
        collector: Collector | None = None,
        tell: Callable[[Collected], None] | None = None,
    ) -> None:
        self._watched = watched
        self._workers = workers
        self._now = now
        self._collector = collector
        if collector is not None:
            collector.quiet = self.quiet
        self._tell = tell  # the coordinator, which asks all nodes; None: there is none
        self._node = hang_detection.begin(now())
        self._last_round: _HangRound | None = None
        # An idleness that was looked into: when it began, who did not wait for others, and in what all were.
        self._elsewhere: tuple[float, tuple[WatchedWorker, ...], Collection[Doing]] | None = None
        self._active_at_s = 0.0  # when the cause showed progress last
        self.due_s = self._node.at_s

    def look(self, now_s: float) -> Death | None:
        """Look once; report a hang, and tell of one that the supervisor has to end."""
        watched = self._watched
        rules = watched.paced_by
        self.due_s = now_s + rules.pace_s
        self._node = hang_detection.observe(self._node, self._workers.look(), now_s, rules)
        hang = self._judged(watched.rules)
        to_end = None if hang is None else self._to_end(hang, now_s)
        if to_end is not None:
            return self._strike(to_end, now_s)
        hang = self._judged(watched.report)
        if hang is not None:
            last = self._round(hang)
            is_due = last.again_at_s is not None and now_s >= last.again_at_s
            is_due = is_due and self._quiet_s(last.causes, hang) >= hang.limit_s
            if is_due or not last.is_reported or (last.is_early and not hang.is_early):
                self._report(hang)
        return None

    @property
    def is_reported(self) -> bool:
        """Whether the present quiet was reported, here or by another node."""
        return self._round(next(iter(self._hangs()), None)).is_reported

    def reported(self, hang: Hang | None = None) -> None:
        """Nothing more is reported until somebody makes progress; to have collected is no gap in the watch.

        Of a `hang` here, until one of its workers does; None: another node has asked.
        """
        self._last_round = replace(self._round(hang), is_reported=True, again_at_s=None)
        self._node = replace(self._node, at_s=self._now())

    def explained(self, explanation: Explanation) -> None:
        """Take in what all nodes together know of the present quiet.

        Where the cause still shows progress, whoever may have it reports again once that has ended: at once, or
        after as long again where it seems to have ended by now. Who only waits for the cause does not ask again.
        """
        now_s, ranks = self._node.at_s, explanation.ranks
        last = self._last_round
        last = last if last is not None and last.signs.keys() == self._node.tracks.keys() else self._round()
        now = replace(last, explanation=explanation, explained_at_s=now_s)
        if not explanation.accuses:
            now = replace(now, report=None)  # nothing is kept of it
        if explanation.active:
            self._active_at_s = now_s
            hangs = self._hangs()
            causes = tuple(worker for worker in self._node.tracks if not ranks or worker.rank in ranks)
            if not hangs:
                now = replace(now, again_at_s=now_s, causes=causes, explanation=None)
            elif causes:
                again_at_s = now_s + max(FRESH_S, *(hang.for_s for hang in hangs))
                now = replace(now, again_at_s=again_at_s, causes=causes)
        self._last_round = now

    def quiet(self) -> dict[int, Quiet]:
        """How long ago each rank has done something."""
        quiet = hang_detection.quiet(self._node, self._watched.all_rules)
        return {worker.rank: times for worker, times in quiet.items() if worker.rank is not None}

    def _round(self, hang: Hang | None = None) -> _HangRound:
        """The round about the present quiet, which may not have begun: of the hang's workers, or of all."""
        signs = {worker: track.sign_at_s for worker, track in self._node.tracks.items()}
        last = self._last_round
        workers = signs if hang is None or hang.kind is HangKind.BUSY else hang.workers
        if (
            last is not None
            and last.signs.keys() == signs.keys()
            and all(last.signs[w] == signs[w] for w in workers)
        ):
            return last
        return _HangRound(signs=signs)

    def _to_end(self, hang: Hang, now_s: float) -> Hang | None:
        """The hang, if its workers are to be ended now: it is explained, or nobody explains it."""
        if hang.kind is HangKind.STOPPED or not self._watched.explained:
            return self._named(hang, now_s)
        last = self._round(hang)
        why = last.explanation
        fresh_s = max(FRESH_S, hang.limit_s) if why is not None and why.active else FRESH_S
        if why is not None and now_s < last.explained_at_s + fresh_s:
            if why.active:
                return None
            if not why.accuses and not why.ranks:
                return self._named(hang, now_s)  # nothing explains it
            own = tuple(worker for worker in self._node.tracks if worker.rank in why.ranks)
            is_ours = why.accuses and (own or why.reason or not why.ranks)
            for_s = min(hang.for_s, now_s - self._active_at_s, self._quiet_s(own, hang))
            is_due = for_s >= (hang.limit_s if is_ours else hang_detection.others_s(hang))
            return replace(hang, workers=own or hang.workers) if is_due else None
        asked_at_s = last.asked_at_s
        if asked_at_s is None or now_s >= asked_at_s + FRESH_S:
            asked_at_s = self._report(hang)
        return self._named(hang, now_s) if now_s >= asked_at_s + ANSWER_S else None

    def _judged(self, rules: Rules | None) -> Hang | None:
        if rules is None:
            return None
        return hang_detection.judge(self._node, rules, is_explained=self._watched.explained)

    def _hangs(self) -> list[Hang]:
        """The verdicts of the rules that end and of those that report, now."""
        return [hang for rules in self._watched.all_rules if (hang := self._judged(rules)) is not None]

    def _quiet_s(self, workers: Sequence[WatchedWorker], hang: Hang) -> float:
        """For how long none of these workers has shown progress."""
        quiet = hang_detection.quiet(self._node, self._watched.all_rules)
        times = [quiet[worker] for worker in workers]
        return min([s for time in times for s in (time.sign_s, time.work_s) if s is not None], default=hang.for_s)

    def _named(self, hang: Hang, now_s: float) -> Hang | None:
        """The hang of those that cause it; None while they may be on another node, or at work.

        Workers that are idle probably wait for others, in a collective. Only who is elsewhere is to blame at once.
        """
        if hang.is_partial:  # that says nothing, but who is at work may be so without progress
            whole = None if self._watched.rules is None else hang_detection.judge(self._node, self._watched.rules)
            return None if whole is None else self._named(whole, now_s)
        if hang.kind is not HangKind.IDLE:
            return hang
        since_s = now_s - hang.for_s
        if self._elsewhere is None or since_s > self._elsewhere[0] + self._watched.paced_by.pace_s:
            texts = self._workers.ask_all(self._workers.children(self._node.tracks))
            doing = {worker: self._workers.doing(worker, texts.get(worker.pid, "")) for worker in self._node.tracks}
            waits = {worker: waits_for_others(main_thread(texts.get(worker.pid, ""))) for worker in doing}
            self._elsewhere = since_s, tuple(worker for worker in doing if waits[worker] is False), doing.values()
        _, elsewhere, all_doing = self._elsewhere
        if any(kind.waits_for_person for kind in all_doing):
            return None
        is_due = (elsewhere or self._watched.alone) and not any(kind.takes_long for kind in all_doing)
        if not is_due and hang.for_s < hang_detection.others_s(hang):
            return None
        return replace(hang, workers=elsewhere) if elsewhere else hang

    def _strike(self, hang: Hang, now_s: float) -> Death:
        why = None if self._watched.alone or hang.kind is HangKind.STOPPED else self._round(hang).explanation
        unexplained = None if why is None or why.accuses or why.ranks else why  # by all nodes together
        text, digest, collected, said = self._round(hang).report or self._collected(hang)
        text = hang.text if text == said else text  # which tells for how long it was
        if collected is not None and collected.folder:  # of this pod: other pods are told the text, too
            digest += (f"collected in {collected.folder}",)
        for line in (text, *digest):
            log.error("hang: %s", line)
        if collected is not None and self._collector is not None:
            self._collector.tell(collected)
        incident = None if collected is None else collected.incident
        named = () if incident is None else incident.ranks
        causes = [worker for worker in self._node.tracks if worker.rank in named]
        if len(self._node.tracks) > len(hang.workers) or (len(hang.workers) == 1 and unexplained is None):
            causes = causes or [*hang.workers]  # else nothing tells whose fault it is
        elif unexplained is not None:
            text = unexplained.text
        cause = min(causes, key=lambda worker: worker not in hang.workers, default=None)
        self._node = replace(hang_detection.begin(now_s), pauses_s=self._node.pauses_s)
        self._elsewhere, self._last_round = None, None
        return Death(
            rank=None if cause is None else cause.rank,
            local_rank=None if cause is None else cause.local_rank,
            message=text,
            lines=digest,
            reason="Hung" if incident is None else incident.reason or "Hung",
            at_s=now_s - hang.for_s,
        )

    def _report(self, hang: Hang) -> float:
        """Have all nodes asked: the ranks that ours wait for may be elsewhere. Return when it was."""
        log.info("no progress: %s; collecting an incident", hang.text)
        report = self._collected(hang)
        self.reported(hang)
        asked = replace(self._round(hang), report=report, asked_at_s=self._node.at_s, is_early=hang.is_early)
        self._last_round = asked
        if report.collected is not None and self._tell is not None:
            self._tell(report.collected)
        return self._node.at_s

    def _collected(self, hang: Hang) -> _Report:
        children = self._workers.children(self._node.tracks)
        texts = self._workers.ask_all(children)
        digest = stacks_digest({worker: self._place(worker, texts) for worker in children})
        digest += _loaders(children, texts)
        if self._collector is None:
            return _Report(hang.text, digest, None, hang.text)
        sentence = (lambda _: hang.text) if hang.kind is HangKind.STOPPED else hang.text  # that says it all
        report = "".join(f"{line}\n" for line in (hang.text, *digest))
        is_same = self._round(hang).is_reported
        collected = self._collector.collect(HANG, sentence, report=report, texts=texts, is_same=is_same)
        collected.limit_s, collected.is_early = hang.limit_s, hang.is_early
        return _Report(collected.incident.sentence, digest, collected, hang.text)

    def _place(self, worker: WatchedWorker, texts: Mapping[int, str]) -> str:
        if frames := main_thread(texts.get(worker.pid, "")):
            return where(frames)
        kernel = process_tree.sleeps_in(worker.pid)
        state = self._node.tracks[worker].last.state
        return f"state {state}" + (f", in the kernel's {kernel}" if kernel else "")


def _loaders(
    children: Mapping[WatchedWorker, Sequence[process_tree.ProcessEntry]], texts: Mapping[int, str]
) -> tuple[str, ...]:
    """Where the processes below each worker are, of those that can tell and have work."""
    return tuple(
        f"{worker.name}'s {entry.name} (pid {entry.pid}): {where(frames)}"
        for worker, entries in children.items()
        for entry in entries
        if (frames := main_thread(texts.get(entry.pid, ""))) and not waits_for_work(frames)
    )
