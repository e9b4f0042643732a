"""What each fault cost: the time without a new step, and the steps that were done twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.rehearsal.report.history import HistoryEntry, What
from trainer_launch.rehearsal.report.training import IN_FLIGHT, Attempt, Training

Point = tuple[float, int]


class FaultReport(Struct, frozen=True, kw_only=True):
    """One fault, and what came of it. None: unknown, or it is not so."""

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
    detection_s: float | None = None  # of it: until a launcher stopped its workers
    restart_s: float | None = None  # from then to the first step of new workers
    repetition_s: float | None = None  # from there to the first step that had not been done before
    reached_step: int | None = None  # the job's highest step when training stood still
    resumed_step: int | None = None  # the last step that needed not be done again, where workers began again
    repeated_steps: int | None = None
    state_kept: bool = False  # by the ranks that survived, so that no checkpoint was read


def fault_reports(
    entries: Sequence[HistoryEntry], training: Training, ended_s: float, *, succeeded: bool
) -> tuple[FaultReport, ...]:
    """One for each fault, in order of time, those that never happened among them; `ended_s`: when the job ended."""
    reports: list[FaultReport] = []
    for entry in entries:
        report = FaultReport(fault=entry.text, pod=entry.pod, at_s=entry.at_s)
        if entry.what is What.FAULT_MISSED:
            reports.append(replace(report, happened=False, why_not=entry.why))
        elif entry.what is What.FAULT:
            number = sum(other.happened for other in reports) + 1
            over_s = next((other.at_s for other in entries if _ends(other, entry)), None)
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


def _ends(over: HistoryEntry, fault: HistoryEntry) -> bool:
    is_its = over.what is What.FAULT_OVER and (over.text, over.pod) == (fault.text, fault.pod)
    return is_its and over.at_s >= fault.at_s


def _pause(report: FaultReport, points: Sequence[Point], ended_s: float, *, succeeded: bool) -> FaultReport:
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
    goal = worst.before if training.is_counted and (worst.repeated or worst.is_told) else -1
    later = [(at_s, step) for at_s, step in training.points if at_s >= again_s]
    new_s = next((at_s for at_s, step in later if step > goal), None)
    if new_s is None and succeeded:  # the job had no further step to do
        new_s = next((at_s for at_s, step in later if step == goal), again_s)
    end_s = max(again_s, ended_s) if new_s is None else new_s
    stopped_s = next((max(begin_s, at_s) for at_s in training.stopped_s if report.at_s <= at_s <= again_s), None)
    report = replace(
        report,
        reached_step=reached,
        state_kept=any(resume.keeps_state for resume in turn.resumes),
        detection_s=None if stopped_s is None else stopped_s - begin_s,
        restart_s=again_s - (begin_s if stopped_s is None else stopped_s),
    )
    if training.is_counted:
        report = replace(
            report,
            resumed_step=min(worst.last, worst.before),  # of steps that are shown now and then the next comes later
            repeated_steps=worst.repeated,
            repetition_s=end_s - again_s,
        )
    return _with_span(report, (begin_s, end_s), recovered=new_s is not None)


def _with_span(report: FaultReport, span: tuple[float, float], *, recovered: bool) -> FaultReport:
    begin_s, end_s = span[0], max(span)  # a step may come after the job's end
    return replace(report, stood_still_s=(begin_s, end_s), downtime_s=end_s - begin_s, recovered=recovered)
