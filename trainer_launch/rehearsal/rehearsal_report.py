"""A rehearsal as one value: it is printed, drawn as a page, and written as JSON with these names. Pure.

Times are seconds since the rehearsal began. None: unknown, or it did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import asdict, replace

from trainer_launch.model import Json, exit_codes
from trainer_launch.model.units import counted
from trainer_launch.observability.html import clean, seconds
from trainer_launch.rehearsal import script_checks
from trainer_launch.rehearsal.history import (
    FaultReport,
    History,
    HistoryEntry,
    PodResult,
    What,
    downtime_s,
    fault_reports,
    training_of,
)
from trainer_launch.rehearsal.script_checks import FailedCheck

UNKNOWN = "-"
MOST_FAULTS = 200  # that are shown
COLUMNS = ("POD", "STATUS", "CREATED", "RESTARTS", "EXIT", "MESSAGE")
_NAME_CHARS = 63  # of a pod
_OVER = ("Succeeded", "Completed", "Failed")  # states that are no part of a timeline


class JobName(Struct, frozen=True, kw_only=True):
    """The job."""

    kind: str  # such as TrainJob
    name: str


class TimelineSegment(Struct, frozen=True, kw_only=True):
    """A stretch of time in which a pod did one thing."""

    state: str  # as kubectl shows it
    begin_s: float
    end_s: float
    attempt: int  # how often its workers have begun, from 1; 0 before


class PodReport(PodResult, frozen=True, kw_only=True):
    """All that one pod did."""

    attempts: int
    timeline: tuple[TimelineSegment, ...]


class StepLine(Struct, frozen=True, kw_only=True):
    """The job's steps over time in one of its attempts."""

    attempt: int
    points: tuple[tuple[float, int], ...]


class RehearsalReport(Struct, frozen=True, kw_only=True):
    """The whole rehearsal."""

    job: JobName
    summary: str  # the verdict in a few words
    condition: str  # how the job ended; empty if it was stopped before
    succeeded: bool | None  # None: it was stopped
    exit_code: int  # of the rehearsal
    took_s: float = field(name="seconds")
    attempts: int  # how often the workers began, of the pod where it was most often
    highest_step: int | None
    downtime_s: float | None
    repeated_steps: int | None
    pods: tuple[PodReport, ...]
    faults: tuple[FaultReport, ...]
    failed_checks: tuple[FailedCheck, ...]
    not_checked: tuple[str, ...]
    remarks: tuple[str, ...]  # the cause of a failure, what to do, goodput
    steps: tuple[StepLine, ...]

    @property
    def happened(self) -> tuple[FaultReport, ...]:
        """The faults that were injected."""
        return tuple(fault for fault in self.faults if fault.happened)

    def short_name(self, pod: str | None) -> str:
        """A pod's name without the job's, which all have; "all" for the whole job."""
        head = f"{self.job.name}-"
        is_shared = all(other.name.startswith(head) for other in self.pods)
        return "all" if pod is None else clean(pod.removeprefix(head) if is_shared else pod)[:_NAME_CHARS]


def report_of(history: History) -> RehearsalReport:
    """The report of a rehearsal that has ended."""
    training = training_of(history.entries)
    end = next((entry for entry in history.entries if entry.what is What.CONDITION), None)
    succeeded = None if end is None else end.code == exit_codes.SUCCEEDED
    ended_s = history.took_s if end is None else end.at_s
    faults = fault_reports(history.entries, training, ended_s, succeeded=bool(succeeded))
    failed, not_checked = script_checks.judge(history.entries, training)
    pods = tuple(_pod(pod, history) for pod in history.pods)
    code = history.exit_code
    if code == exit_codes.SUCCEEDED and (failed or not all(fault.happened for fault in faults)):
        code = exit_codes.FAILED
    has_steps = bool(training.attempts)
    return RehearsalReport(
        job=JobName(kind=history.kind, name=history.name),
        summary=_summary(failed, faults, succeeded, is_checked=not not_checked),
        condition="" if end is None else end.text,
        succeeded=succeeded,
        exit_code=code,
        took_s=history.took_s,
        attempts=max((pod.attempts for pod in pods), default=0),
        highest_step=training.top,
        downtime_s=downtime_s(faults) if has_steps else None,
        repeated_steps=training.repeated if has_steps and not not_checked else None,
        pods=pods,
        faults=faults,
        failed_checks=failed,
        not_checked=not_checked,
        remarks=history.remarks,
        steps=tuple(
            StepLine(attempt=number, points=tuple(attempt.points))
            for number, attempt in enumerate(training.attempts, 1)
        ),
    )


def condition(report: RehearsalReport) -> str:
    """How the job ended, and when."""
    verdict, _, why = report.condition.partition(" ")
    end = f"{verdict or 'stopped'} after {report.took_s:.1f} s {why}"
    return f"{report.job.kind} {report.job.name}: {end}".rstrip()


def pod_cells(report: RehearsalReport) -> list[tuple[str, ...]]:
    """A row for each pod, in the order of COLUMNS."""
    return [
        (
            pod.name,
            pod.status,
            str(pod.created),
            str(pod.restarts),
            UNKNOWN if pod.exit_code is None else str(pod.exit_code),
            pod.message,
        )
        for pod in report.pods
    ]


def downtime(fault: FaultReport) -> str:
    """How long there was no new step."""
    return (
        UNKNOWN if fault.downtime_s is None else f"{'' if fault.recovered else 'over '}{seconds(fault.downtime_s)}"
    )


def effect(fault: FaultReport) -> str:
    """Where training stood still, and where it resumed."""
    if not fault.happened:
        return f"it never happened: {clean(fault.why_not)}"
    if fault.downtime_s is None:
        return "steps unknown"
    reached, resumed = fault.reached_step, fault.resumed_step
    if not fault.recovered:
        steps = "no step at all" if reached is None else f"no step after step {reached:,}"
    elif reached is None:
        steps = "no step yet"
    elif resumed is None:
        steps = f"continued after step {reached:,}"
    else:
        steps = f"reached step {reached:,}, resumed from step {max(0, resumed):,}"
    return f"{steps}; surviving ranks kept their state" if fault.state_kept else steps


def as_json(report: RehearsalReport) -> Json:
    """The report in JSON's own types, times to the millisecond."""
    return _rounded(to_builtins(report))


def _rounded(value: Any) -> Json:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list | tuple):
        return [_rounded(member) for member in value]
    if isinstance(value, dict):
        return {key: _rounded(member) for key, member in value.items()}
    plain: Json = value
    return plain


def _summary(
    failed: Sequence[FailedCheck], faults: Sequence[FaultReport], succeeded: bool | None, *, is_checked: bool
) -> str:
    missed = sum(not fault.happened for fault in faults)
    if failed:
        return f"FAILED: {', '.join(dict.fromkeys(failure.check.value for failure in failed))}"
    if succeeded is None:
        return "Stopped before the job ended"
    if not succeeded:
        return "The job failed"
    if missed:
        return f"{counted(missed, 'fault')} never happened"
    if not is_checked:
        return "The job succeeded; whether the script resumes was not checked"
    return f"Survived {counted(len(faults), 'fault')}" if faults else "The job succeeded"


def _pod(pod: PodResult, history: History) -> PodReport:
    """With its timeline; empty segments, and what comes after its end, are left out."""
    segments: list[TimelineSegment] = []
    now = TimelineSegment(state="Pending", begin_s=0.0, end_s=history.took_s, attempt=0)
    has_met = False  # whether the workers of this start of the container have met

    def turn(entry: HistoryEntry, state: str, attempt: int) -> TimelineSegment:
        if entry.at_s > now.begin_s and now.state not in _OVER:
            segments.append(replace(now, end_s=entry.at_s))
        return replace(now, state=state, begin_s=entry.at_s, attempt=attempt)

    for entry in history.entries:
        if entry.pod != pod.name:
            continue
        if entry.what is What.STATUS:
            now = turn(entry, entry.text, now.attempt)
        elif entry.what is What.STARTED:
            now, has_met = turn(entry, now.state, now.attempt + 1), False
        elif entry.what is What.GENERATION:
            now, has_met = (turn(entry, now.state, now.attempt + 1) if has_met else now), True
    if now.state not in _OVER:
        segments.append(now)
    return PodReport(**asdict(pod), attempts=now.attempt, timeline=tuple(segments))
