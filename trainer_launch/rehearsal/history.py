"""The history of a rehearsal, and what it tells of the training: where it began again, what faults cost. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from msgspec import Struct, field
from msgspec.structs import replace

KEPT = "kept"  # by ranks that survive: the step in flight is done again, and none is repeated
_LEAST_GAP_S = 0.05  # between two steps of a pod that are kept
_GAPS = 2_000  # and of a rehearsal's time: a long one keeps a few thousand of each pod
IN_FLIGHT = 3  # lines that may still come after a fault
_SKEW = 1  # workers of one pod may print their steps in another order
_MUCH_LATER_S = 30.0  # of training after a fault: what comes then has another cause
_HARMLESS = "delay dns"  # a fault after which no worker should have to begin again
_RESUMES = re.compile(r"resum|restor|load|continu|checkpoint", re.IGNORECASE)


class What(str, Enum):
    """The kinds of entries."""

    STATUS = (
        "status"  # `text` is what the pod does from now on, as kubectl shows it: Pending, Running, Restarting, …
    )
    STARTED = "started"  # the container that trains, its pod's main one
    ENDED = "ended"  # the same container, with its exit code in `code`
    STOP_ASKED = "stop asked"  # a fault makes the kubelet send it SIGTERM, or the signal that `text` names
    GENERATION = "generation"  # the pod's workers have met (again); `text` is KEPT where ranks keep their state
    STEP = "step"  # training has reached `step`; `text` is the line that says so, empty when the pod reports it
    FAULT = "fault"  # `text` is the fault as it was written; `pod` None: of all
    FAULT_OVER = "fault over"  # a fault that lasts has ended, same `text`
    FAULT_MISSED = "fault missed"  # it never happened, and `why`
    CONDITION = "condition"  # the job has ended; `text` says how, `code` is 0 if it succeeded


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """An entry: something that happened, with its time."""

    at_s: float  # seconds since the rehearsal began
    what: What
    pod: str | None = None
    step: int | None = None
    code: int | None = None
    text: str = ""
    why: str = ""


class PodResult(Struct, frozen=True, kw_only=True):
    """How a pod stands at the end, as the table at the end has it."""

    name: str
    status: str
    created: int  # how often
    restarts: int  # of containers, in the pod that was created last
    exit_code: int | None
    message: str  # the first line of its termination message, or what its exit code means
    last_line: str  # of its output


class History(Struct, frozen=True, kw_only=True):
    """A whole rehearsal."""

    kind: str  # of the job, such as TrainJob
    name: str
    entries: tuple[HistoryEntry, ...]  # in order of time
    took_s: float
    exit_code: int  # the job's own
    pods: tuple[PodResult, ...]  # in the order people expect them: node 0 first
    remarks: tuple[str, ...] = ()  # lines below the table: the cause of a failure, what to do, goodput


class Recorder:
    """The history so far."""

    def __init__(self) -> None:
        self._entries: list[HistoryEntry] = []
        self._runs: dict[str | None, list[int]] = {}  # by pod: where its steps are, since something else happened

    def add(self, entry: HistoryEntry) -> None:
        """Take in an entry. Of steps in quick succession the last is kept."""
        if entry.what is not What.STEP:
            self._runs.pop(entry.pod, None)
            if entry.pod is None:
                self._runs.clear()
        else:
            run = self._runs.setdefault(entry.pod, [])
            if self._replaces(run, entry):
                self._entries[run[-1]] = entry
                return
            run.append(len(self._entries))
        self._entries.append(entry)

    def entries(self) -> tuple[HistoryEntry, ...]:
        """All entries, in order of time: reports of pods are read a little later."""
        return tuple(sorted(self._entries, key=lambda entry: entry.at_s))

    def _replaces(self, run: list[int], entry: HistoryEntry) -> bool:
        """Whether the last step lies between two that are close together."""
        if len(run) < 2:
            return False
        before, last = self._entries[run[-2]], self._entries[run[-1]]
        is_close = entry.at_s - before.at_s < max(_LEAST_GAP_S, entry.at_s / _GAPS)
        return is_close and (before.step or 0) < (last.step or 0) <= (entry.step or 0)


class Resume(Struct, frozen=True, kw_only=True):
    """The first step of a pod after its workers began again."""

    at_s: float
    pod: str
    before: int  # the highest step that had been reached
    last: int  # the last step that need not be done again
    is_stated: bool  # the line itself has the step that training resumes from
    keeps_state: bool = False  # of ranks that survived

    @property
    def repeated(self) -> int:
        """Steps done twice."""
        return max(0, self.before - self.last)


class Attempt(Struct, kw_only=True):
    """The job's training between two beginnings."""

    fault: HistoryEntry | None = None  # what made it begin again
    points: list[tuple[float, int]] = field(default_factory=list)  # the job's steps over time, as they were reached
    tops: dict[str, int] = field(default_factory=dict)  # by pod: its highest step
    resumes: list[Resume] = field(default_factory=list)


class Training(Struct, kw_only=True):
    """All steps of a rehearsal."""

    attempts: list[Attempt] = field(default_factory=list)
    is_counted: bool = True  # False: steps restart in the same workers, as each epoch, and prove nothing

    @property
    def top(self) -> int | None:
        """The highest step."""
        return max((step for _, step in self.points), default=None)

    @property
    def points(self) -> list[tuple[float, int]]:
        """The steps of all attempts."""
        return [point for attempt in self.attempts for point in attempt.points]

    @property
    def restarts(self) -> list[tuple[Attempt, Resume]]:
        """Where pods began again, each with its attempt."""
        return [(attempt, resume) for attempt in self.attempts for resume in attempt.resumes]

    @property
    def repeated(self) -> int:
        """Steps done twice; those that several pods do twice together count once."""
        return sum(
            max(resume.repeated for resume in attempt.resumes) for attempt in self.attempts if attempt.resumes
        )

    def before(self, attempt: Attempt) -> Attempt:
        """The attempt that this one follows."""
        return next(other for other, after in pairwise(self.attempts) if after is attempt)


class _PodSteps(Struct):
    """The steps of a pod, as far as they are read."""

    has_begun: bool = False  # its workers have begun since its last step
    keeps_state: bool = False  # and the job's surviving ranks kept their state
    begun_s: float = 0.0
    top: int = 0  # since then
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=IN_FLIGHT))  # its last steps


def training_of(entries: Sequence[HistoryEntry]) -> Training:
    """The attempts of a job, by the steps that its pods report and the beginnings of their workers."""
    reader = _Reader()
    for entry in entries:
        reader.take(entry)
    return reader.training


class _Reader:
    """Reads a history, one entry after the other."""

    def __init__(self) -> None:
        self.training = Training()
        self._pods: dict[str, _PodSteps] = {}
        self._fault: HistoryEntry | None = None  # the newest, until an attempt is put down to it

    def take(self, entry: HistoryEntry) -> None:
        """Take the next entry of the history."""
        if entry.what is What.FAULT and not entry.text.startswith(_HARMLESS):
            self._fault = entry
        if entry.pod is None:
            return
        pod = self._pods.setdefault(entry.pod, _PodSteps())
        if entry.what in (What.STARTED, What.GENERATION):
            pod.has_begun, pod.begun_s, pod.keeps_state = True, entry.at_s, entry.text == KEPT
        elif entry.what is What.STEP:
            self._step(entry.pod, pod, entry)

    def _step(self, name: str, pod: _PodSteps, entry: HistoryEntry) -> None:
        step, attempts = entry.step or 0, self.training.attempts
        goes_back = not pod.has_begun and step < pod.top - _SKEW
        if goes_back and self._began_unseen(pod):
            pod.has_begun, pod.begun_s, pod.keeps_state, goes_back = True, entry.at_s, False, False
        if goes_back:
            self.training.is_counted = False
        is_of_last = len(attempts) > 1 and name in attempts[-2].tops and name not in attempts[-1].tops
        if not attempts:
            attempts.append(Attempt())
        elif pod.has_begun and self._begins_attempt(name, pod):
            before = attempts[-1]
            attempts.append(Attempt(fault=self._cause(before)))
            attempts[-1].resumes.append(_resume(name, entry, before, keeps_state=pod.keeps_state))
        elif is_of_last and pod.has_begun:  # it follows the pod that began the attempt
            attempts[-1].resumes.append(_resume(name, entry, attempts[-2], keeps_state=pod.keeps_state))
        elif is_of_last:  # it trains on: the pod that began again has steps of its own, and the job did not
            apart = attempts.pop()
            attempts[-1].tops |= apart.tops
        pod.top = step if pod.has_begun or goes_back else max(step, pod.top)
        pod.has_begun = False
        pod.recent_s.append(entry.at_s)
        _reach(attempts[-1], name, entry.at_s, step, goes_back=goes_back)

    def _began_unseen(self, pod: _PodSteps) -> bool:
        """Whether steps go back because the workers began again, as a fault right before shows."""
        is_recent = self._fault is not None and bool(pod.recent_s) and self._fault.at_s >= pod.recent_s[0]
        return is_recent and self.training.is_counted

    def _begins_attempt(self, name: str, pod: _PodSteps) -> bool:
        """Whether the job begins again with this pod's first step, as do others after it."""
        attempt, fault = self.training.attempts[-1], self._fault
        has_steps = name in attempt.tops
        takes_over = fault is not None and pod.begun_s >= fault.at_s  # such as a new rank 0 on another node
        if not has_steps and not takes_over:
            return False
        since_s = pod.recent_s[-1] if has_steps or fault is None else fault.at_s
        others = [other for key, other in self._pods.items() if key != name and key in attempt.tops]
        return not any(
            not other.has_begun and len(other.recent_s) == IN_FLIGHT and other.recent_s[0] > since_s
            for other in others
        )

    def _cause(self, before: Attempt) -> HistoryEntry | None:
        fault, self._fault = self._fault, None
        is_old = fault is not None and before.points[-1][0] >= fault.at_s + _MUCH_LATER_S
        return None if is_old else fault


def _resume(name: str, entry: HistoryEntry, before: Attempt, *, keeps_state: bool) -> Resume:
    step, is_stated = entry.step or 0, bool(_RESUMES.search(entry.text))
    is_in_flight = keeps_state and step == before.tops.get(name, max(before.tops.values()))
    return Resume(
        at_s=entry.at_s,
        pod=name,
        before=before.tops.get(name, max(before.tops.values())),
        last=step if is_stated or is_in_flight else step - 1,
        is_stated=is_stated,
        keeps_state=keeps_state,
    )


def _reach(attempt: Attempt, name: str, at_s: float, step: int, *, goes_back: bool) -> None:
    attempt.tops[name] = max(step, attempt.tops.get(name, 0))
    if goes_back or not attempt.points or step > attempt.points[-1][1]:
        attempt.points.append((at_s, step))


class FaultReport(Struct, frozen=True, kw_only=True):
    """A fault, and what it cost. None: unknown, or it is not so."""

    fault: str
    pod: str | None  # None: the whole job
    number: int | None = None  # from 1, in order of time
    at_s: float
    over_s: float | None = None  # when a fault that lasts was over
    happened: bool = True
    why_not: str = ""
    recovered: bool = False  # whether there was a new step, or the job succeeded
    stood_still_s: tuple[float, float] | None = None  # from the last step to the first new one
    downtime_s: float | None = None  # how long that is
    reached_step: int | None = None  # the job's highest step when training stood still
    resumed_step: int | None = None  # the last step that needed not be done again, where workers began again
    repeated_steps: int | None = None
    state_kept: bool = False  # by the ranks that survived, so that no checkpoint was read


def fault_reports(
    entries: Sequence[HistoryEntry], training: Training, ended_s: float, *, succeeded: bool
) -> tuple[FaultReport, ...]:
    """A report for each fault, in order of time, also if it never happened; `ended_s`: when the job ended."""
    reports: list[FaultReport] = []
    for entry in entries:
        report = FaultReport(fault=entry.text, pod=entry.pod, at_s=entry.at_s)
        if entry.what is What.FAULT_MISSED:
            reports.append(replace(report, happened=False, why_not=entry.why))
        elif entry.what is What.FAULT:
            number = sum(other.happened for other in reports) + 1
            ends = (other for other in entries if other.what is What.FAULT_OVER and other.at_s >= entry.at_s)
            over_s = next((end.at_s for end in ends if (end.text, end.pod) == (entry.text, entry.pod)), None)
            report = replace(report, number=number, over_s=over_s, recovered=succeeded)
            turn = next((attempt for attempt in training.attempts if attempt.fault is entry), None)
            if turn is not None:
                report = _restart(report, training, turn, ended_s, succeeded=succeeded)
            elif training.attempts:
                report = _pause(report, training.points, ended_s, succeeded=succeeded)
            reports.append(report)
    return tuple(reports)


def downtime_s(reports: Sequence[FaultReport]) -> float:
    """The time without a new step; what two faults share counts once."""
    total_s = until_s = 0.0
    for begin_s, end_s in sorted(report.stood_still_s for report in reports if report.stood_still_s is not None):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def _pause(
    report: FaultReport, points: Sequence[tuple[float, int]], ended_s: float, *, succeeded: bool
) -> FaultReport:
    """Workers did not begin again: from the last step that still came to the first after the fault was over."""
    fault_s, lasts_s = report.at_s, report.at_s if report.over_s is None else report.over_s
    before = [step for at_s, step in points if at_s <= fault_s]
    later = [at_s for at_s, _ in points if at_s > fault_s]
    after = next((place for place, at_s in enumerate(later) if at_s > lasts_s), None)
    if not succeeded and (after is None or len(later) < IN_FLIGHT):  # training never went on
        report = replace(report, reached_step=points[-1][1], repeated_steps=0)
        return _with_span(report, (later[-1] if later else fault_s, ended_s), recovered=False)
    pairs = [(fault_s, fault_s)] if after is None else pairwise([fault_s, *later[: after + 1]])
    report = replace(report, reached_step=before[-1] if before else None, repeated_steps=0)
    return _with_span(report, max(pairs, key=lambda pair: pair[1] - pair[0]), recovered=True)


def _restart(
    report: FaultReport, training: Training, turn: Attempt, ended_s: float, *, succeeded: bool
) -> FaultReport:
    """Workers began again: what was done before has to be done again first."""
    last_s, reached = training.before(turn).points[-1]
    begin_s, again_s = max(report.at_s, last_s), turn.points[0][0]
    worst = max(turn.resumes, key=lambda resume: resume.repeated)
    goal = worst.before if training.is_counted and (worst.repeated or worst.is_stated) else -1
    later = [(at_s, step) for at_s, step in training.points if at_s >= again_s]
    new_s = next((at_s for at_s, step in later if step > goal), None)
    if new_s is None and succeeded:  # the job had no further step to do
        new_s = next((at_s for at_s, step in later if step == goal), again_s)
    end_s = max(again_s, ended_s) if new_s is None else new_s
    report = replace(report, reached_step=reached, state_kept=any(resume.keeps_state for resume in turn.resumes))
    if training.is_counted:  # of steps that are shown now and then the next comes later
        report = replace(report, resumed_step=min(worst.last, worst.before), repeated_steps=worst.repeated)
    return _with_span(report, (begin_s, end_s), recovered=new_s is not None)


def _with_span(report: FaultReport, span: tuple[float, float], *, recovered: bool) -> FaultReport:
    begin_s, end_s = span[0], max(span)  # a step may come after the job's end
    return replace(report, stood_still_s=(begin_s, end_s), downtime_s=end_s - begin_s, recovered=recovered)
