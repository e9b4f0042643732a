"""The report of a rehearsal as one HTML page, which loads and runs nothing.

The timeline has a lane for each pod, the faults above and the steps below, on one axis of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainer_launch.model.units import counted, listed
from trainer_launch.observability.html import Scale, axis, clean, document, seconds, table
from trainer_launch.rehearsal.history import FaultReport
from trainer_launch.rehearsal.rehearsal_report import (
    COLUMNS,
    MOST_FAULTS,
    UNKNOWN,
    PodReport,
    RehearsalReport,
    StepLine,
    TimelineSegment,
    condition,
    downtime,
    effect,
    pod_cells,
)

# Okabe and Ito's colours, distinct for any kind of colour vision, and the ink that is readable on each.
ATTEMPTS = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#f0e442", "#000000"),
)
_SHEET = "".join(f".a{number}{{--c:{colour};--i:{ink}}}" for number, (colour, ink) in enumerate(ATTEMPTS))
# By a pod's state: the class of page.css, and what the legend calls it.
_RUNNING = "Running"
_LOOKS = {
    "Pending": ("waiting", "pending"),
    "Init": ("init", "init containers"),
    _RUNNING: ("running", ""),
    "Terminating": ("stopping", "terminating"),
    "Restarting": ("down", "restarting, or to be created again"),
    "Terminated": ("gone", "terminated, not to be created again"),
}
_FAULT_COLUMNS = ("#", "at", "fault", "pod", "downtime", "repeated steps", "effect")
_MANY_PODS = 16  # beyond, lanes are thinner
_NUMBERED = 4.5  # percent: shorter segments have no number
_MOST_POINTS = 1200  # of the steps' lines
_SHOWN_PODS = 3
_NO_STEPS = "Steps are unknown: print lines such as &quot;step 40&quot;, or call trainer_launch.report(step=40)."


def page(report: RehearsalReport) -> str:
    """The whole file."""
    body = [
        _header(report),
        _failed_checks(report),
        "<section><h2>Pods over time</h2>",
        _legend(report),
        _chart(report),
        "</section>",
        _faults(report),
        table("Pods and their messages", [name.lower() for name in COLUMNS], _pods(report)),
    ]
    return document(
        f"{report.summary}; {report.job.kind} {report.job.name}",
        _SHEET,
        body,
        "Written by trainer-launch rehearse.",
    )


def _header(report: RehearsalReport) -> str:
    has_failed = report.failed_checks or report.succeeded is False or len(report.happened) < len(report.faults)
    is_plain = report.succeeded is None or report.not_checked
    tone = "bad" if has_failed else "plain" if is_plain else "good"
    counts = ((len(report.pods), "pod"), (len(report.happened), "fault"), (report.attempts, "attempt"))
    sums = (
        *(counted(number, noun).split(" ") for number, noun in counts),
        (UNKNOWN if report.downtime_s is None else seconds(report.downtime_s), "without a new step"),
        (UNKNOWN if report.repeated_steps is None else f"{report.repeated_steps:,}", "repeated steps"),
        (UNKNOWN if report.highest_step is None else f"{report.highest_step:,}", "highest step"),
    )
    items = "".join(f"<li><b>{escape(figure)}</b><span>{what}</span></li>" for figure, what in sums)
    return (
        f'<header class="{tone}"><h1>{escape(report.summary)}</h1><p>{escape(clean(condition(report)))}</p>'
        f'<ul class="sums">{items}</ul></header>'
    )


def _failed_checks(report: RehearsalReport) -> str:
    items = "".join(
        f"<li><b>{escape(failure.check.value)}</b>, {escape(clean(listed(failure.pods, _SHOWN_PODS)))} "
        f"at {failure.at_s:.1f} s: {escape(clean(failure.evidence))}."
        f'<span class="mend">→ {escape(failure.advice)}.</span></li>'
        for failure in report.failed_checks
    )
    title = "<h2>Failed checks, and what to do</h2>" if items else ""
    remarks = "".join(f'<p class="note">Not checked: {escape(clean(text))}.</p>' for text in report.not_checked)
    return f'<section>{title}<ul class="broken">{items}</ul>{remarks}</section>' if items or remarks else ""


def _faults(report: RehearsalReport) -> str:
    if not report.faults:
        return ""
    rows = [
        (
            UNKNOWN if fault.number is None else str(fault.number),
            seconds(fault.at_s),
            clean(fault.fault),
            report.short_name(fault.pod),
            downtime(fault),
            UNKNOWN if fault.repeated_steps is None else f"{fault.repeated_steps:,}",
            effect(fault),
        )
        for fault in report.faults[:MOST_FAULTS]
    ]
    left = len(report.faults) - MOST_FAULTS
    more = f'<p class="note">… and {left} more.</p>' if left > 0 else ""
    return table("Cost of each fault", _FAULT_COLUMNS, rows) + more


def _pods(report: RehearsalReport) -> list[tuple[str, ...]]:
    """As in the table on the terminal; a pod without a message shows its last line."""
    return [
        tuple(map(clean, (*cells[:-1], cells[-1] or pod.last_line or UNKNOWN)))
        for cells, pod in zip(pod_cells(report), report.pods, strict=True)
    ]


def _legend(report: RehearsalReport) -> str:
    shown = [
        (f"running a{_colour(number)}", f"attempt {number}")
        for number in range(1, min(report.attempts, len(ATTEMPTS)) + 1)
    ]
    states = {segment.state for pod in report.pods for segment in pod.timeline}
    shown += [(f"{look} a0", words) for state, (look, words) in _LOOKS.items() if state in states and words]
    items = [f'<li><i class="{kind}"></i>{words}</li>' for kind, words in shown]
    if report.happened:
        items.append('<li><i class="fault"></i>a fault, on the pod it hit</li>')
    if report.steps and report.happened:
        items.append('<li><i class="band"></i>no new step</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _chart(report: RehearsalReport) -> str:
    """All of it; positions are percentages of the time that the rehearsal took."""
    scale = Scale(max(report.took_s, 0.001))
    labels = [report.short_name(pod.name) for pod in report.pods]
    chars = max([5, *map(len, labels)])
    many = " many" if len(report.pods) > _MANY_PODS else ""
    hits = report.happened
    lanes = "".join(
        _lane(pod, label, scale, [fault for fault in hits if fault.pod in (None, pod.name)])
        for pod, label in zip(report.pods, labels, strict=True)
    )
    lines = "".join(f'<span style="left:{scale.at(fault.at_s)}"></span>' for fault in hits)
    return (
        f'<div class="chart{many}" style="--chars:{chars}"><div class="plot">'
        f'<div class="row lines"><i></i><div class="track all">{lines}</div></div>'
        f"{lanes}{_steps(report, scale)}</div>{axis(scale)}</div>"
    )


def _colour(attempt: int) -> int:
    return (max(1, attempt) - 1) % len(ATTEMPTS)


def _lane(pod: PodReport, label: str, scale: Scale, hits: Sequence[FaultReport]) -> str:
    segments = "".join(_segment(segment, scale) for segment in pod.timeline)
    marks = "".join(_hit(fault, scale) for fault in hits)
    name = f'<div class="name" title="{escape(clean(pod.name))}">{escape(label)}</div>'
    return f'<div class="row lane">{name}<div class="track">{segments}{marks}</div></div>'


def _hit(fault: FaultReport, scale: Scale) -> str:
    title = escape(f"{fault.number}: {clean(fault.fault)}, at {seconds(fault.at_s)}")
    mark = f'<span class="hit" style="left:{scale.at(fault.at_s)}" title="{title}"></span>'
    if fault.over_s is not None:
        mark += f'<span class="lasts" style="{scale.span(fault.at_s, fault.over_s)}"></span>'
    return mark


def _segment(segment: TimelineSegment, scale: Scale) -> str:
    look, _ = _LOOKS.get(segment.state, _LOOKS["Pending"])
    width = scale.percent(segment.end_s) - scale.percent(segment.begin_s)
    has_room = width >= _NUMBERED + 2.5 * (segment.attempt > 9)
    number = str(segment.attempt) if segment.state == _RUNNING and has_room else ""
    times = f"{seconds(segment.begin_s)} to {seconds(segment.end_s)}"
    return (
        f'<span class="s {look} a{_colour(segment.attempt)}" style="{scale.span(segment.begin_s, segment.end_s)}" '
        f'title="{escape(segment.state)}, attempt {segment.attempt}, {times}">{number}</span>'
    )


def _steps(report: RehearsalReport, scale: Scale) -> str:
    if report.highest_step is None:
        return f'<p class="note">{_NO_STEPS}</p>'
    top = max(1, report.highest_step)
    still = "".join(
        f'<span class="still" style="{scale.span(*fault.stood_still_s)}"></span>'
        for fault in report.faults
        if fault.downtime_s and fault.stood_still_s is not None
    )
    middle = top // 2
    sides = "".join(
        f'<span style="top:{_height(step, top)}%">{step:,}</span>' for step in dict.fromkeys((top, middle, 0))
    )
    grid = f'<line class="grid" x1="0" x2="100" y1="{_height(middle, top)}" y2="{_height(middle, top)}"/>'
    lines = "".join(_line(line, len(report.steps), scale, top) for line in report.steps)
    return (
        f'<div class="row steps"><div class="scale">{sides}</div><div class="track">{still}'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-label="steps over time">{grid}{lines}'
        '</svg><b class="of">step</b></div></div>'
    )


def _height(step: int, top: int) -> str:
    return f"{100 - 100 * step / top:.3f}"


def _line(line: StepLine, lines: int, scale: Scale, top: int) -> str:
    """At most its share of the points; a single one is drawn as a dot."""
    each = -(-len(line.points) // max(2, _MOST_POINTS // lines))
    kept = [*line.points[::each], line.points[-1]]
    text = " ".join(f"{scale.percent(at_s):.3f},{_height(step, top)}" for at_s, step in kept)
    return f'<polyline class="a{_colour(line.attempt)}" stroke-linecap="round" points="{text}"/>'
