"""The report of a rehearsal on the terminal: the table of pods, how the job ended, faults, failed checks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trainer_launch.model.units import aligned, counted, listed
from trainer_launch.observability.html import clean, seconds
from trainer_launch.rehearsal.report.fault_costs import FaultReport
from trainer_launch.rehearsal.report.pod_rows import COLUMNS, UNKNOWN
from trainer_launch.rehearsal.report.rehearsal_report import RehearsalReport

MOST_FAULTS = 200
_LEGEND = "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last."
_SHOWN_PODS = 3
_WIDTH = 100
_LEAST_S = 0.05  # less of a downtime is not told


def text(report: RehearsalReport) -> str:
    """All of it."""
    lines = [
        *_table(report),
        condition(report),
        *report.remarks,
        *(f"fault did not happen: {fault.fault}: {fault.why_not}" for fault in report.faults if not fault.happened),
        *(cost(report, fault) for fault in report.happened[:MOST_FAULTS]),
        *_failed_checks(report),
    ]
    return "".join(f"{line}\n" for line in lines)


def condition(report: RehearsalReport) -> str:
    """How the job ended, and when."""
    verdict, _, why = report.condition.partition(" ")
    end = f"{verdict or 'stopped'} after {report.took_s:.1f} s {why}"
    return f"{report.job.kind} {report.job.name}: {end}".rstrip()


def _table(report: RehearsalReport) -> Iterator[str]:
    rows = [COLUMNS, *pod_cells(report)]
    yield from (row.rstrip() for row in aligned(rows))
    if any(pod.created > 1 or pod.restarts for pod in report.pods):
        yield _LEGEND


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


def cost(report: RehearsalReport, fault: FaultReport) -> str:
    """What a fault cost, in one line."""
    where = "" if fault.pod is None else f", {report.short_name(fault.pod)}"
    head = f"Fault {fault.number} ({clean(fault.fault)}{where}, at {seconds(fault.at_s)}) cost"
    if fault.downtime_s is None:
        return f"{head} an unknown time: steps unknown"
    repeated = "" if fault.repeated_steps is None else f", {counted(fault.repeated_steps, 'repeated step')}"
    return f"{head} {downtime(fault)} without a new step{repeated}; {effect(fault)}"


def downtime(fault: FaultReport) -> str:
    """How long there was no new step."""
    return (
        UNKNOWN if fault.downtime_s is None else f"{'' if fault.recovered else 'over '}{seconds(fault.downtime_s)}"
    )


def effect(fault: FaultReport) -> str:
    """Where training stood still and resumed, and what the time went into."""
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
    steps += "; surviving ranks kept their state" if fault.state_kept else ""
    parts = (("detection", fault.detection_s), ("restart", fault.restart_s), ("repeated steps", fault.repetition_s))
    spent = ", ".join(f"{name} {seconds(part_s)}" for name, part_s in parts if part_s and part_s >= _LEAST_S)
    return f"{steps}; {spent}" if spent else steps


def _failed_checks(report: RehearsalReport) -> Iterator[str]:
    if report.failed_checks:
        yield f"This job does not survive preemption: {counted(len(report.failed_checks), 'check')} failed."
    for failure in report.failed_checks:
        pods = listed(failure.pods, _SHOWN_PODS)
        sentence = f"FAILED: {failure.check.value}, {pods} at {failure.at_s:.1f} s: {failure.evidence}"
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        advice = f"What to do: {failure.advice}"
        yield from textwrap.wrap(advice, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    for remark in report.not_checked:
        yield from textwrap.wrap(f"Not checked: {remark}", _WIDTH, subsequent_indent="  ")
