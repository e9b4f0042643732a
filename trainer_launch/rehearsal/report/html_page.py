"""The report of a rehearsal as one HTML page, which loads and runs nothing.

The timeline has a lane for each pod, the faults above and the steps below, on one axis of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from trainer_launch.observability.html import Scale, axis, clean, document, seconds, table
from trainer_launch.rehearsal.report.fault_costs import Analysis, Cost, Stretch
from trainer_launch.rehearsal.report.history import Doing, Lane, Segment
from trainer_launch.rehearsal.report.summary import (
    FAULT_COLUMNS,
    MOST_ROWS,
    POD_COLUMNS,
    Headline,
    fault_rows,
    headline,
    pod_rows,
    short_name,
)
from trainer_launch.rehearsal.report.wall_time import spent
from trainer_launch.rehearsal.script_checks import Verdict, names

# Okabe and Ito's colours, told apart with any kind of colour vision, and the ink that is read on each.
ATTEMPTS = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#f0e442", "#000000"),
)
_SHEET = "".join(f".a{number}{{--c:{colour};--i:{ink}}}" for number, (colour, ink) in enumerate(ATTEMPTS))


def page(analysis: Analysis, verdict: Verdict) -> str:
    """The whole file."""
    head = headline(analysis, verdict)
    title = f"{head.text}; {analysis.history.kind} {analysis.history.name}"
    body = [
        _header(head),
        _failed_checks(verdict),
        "<section><h2>Pods over time</h2>",
        _legend(analysis),
        _chart(analysis),
        "</section>",
        _wall_time(analysis),
        _faults(analysis),
        table("Pods and their messages", POD_COLUMNS, pod_rows(analysis)),
    ]
    return document(title, _SHEET, body, "Written by trainer-launch rehearse.")


def _header(head: Headline) -> str:
    sums = "".join(f"<li><b>{escape(figure)}</b><span>{escape(what)}</span></li>" for figure, what in head.sums)
    return (
        f'<header class="{head.tone}"><h1>{escape(head.text)}</h1><p>{escape(head.about)}</p>'
        f'<ul class="sums">{sums}</ul></header>'
    )


def _failed_checks(verdict: Verdict) -> str:
    if not verdict.failed and not verdict.remarks:
        return ""
    items = "".join(
        f"<li><b>{escape(one.check.value)}</b>, {escape(clean(names(one.pods)))} at {one.at_s:.1f} s: "
        f'{escape(clean(one.evidence))}.<span class="mend">→ {escape(one.advice)}.</span></li>'
        for one in verdict.failed
    )
    title = "<h2>Failed checks, and what to do</h2>" if items else ""
    remarks = "".join(f'<p class="note">Not checked: {escape(clean(one))}.</p>' for one in verdict.remarks)
    return f'<section>{title}<ul class="broken">{items}</ul>{remarks}</section>'


def _wall_time(analysis: Analysis) -> str:
    known = sorted(((one_s, kind) for kind, one_s in spent(analysis.spans).items()), reverse=True)
    whole_s = sum(one_s for one_s, _ in known)
    rows = [(kind.words, seconds(one_s), f"{100 * one_s / whole_s:.1f} %") for one_s, kind in known]
    return table("Where the time went", ("phase", "time", "share"), rows) if rows else ""


def _faults(analysis: Analysis) -> str:
    if not analysis.costs:
        return ""
    left = len(analysis.costs) - MOST_ROWS
    more = f'<p class="note">… and {left} more.</p>' if left > 0 else ""
    return table("Cost of each fault", FAULT_COLUMNS, fault_rows(analysis)) + more


# -- the timeline ------------------------------------------------------------------------------


_MANY_PODS = 16  # beyond, lanes are thinner
_SPOKEN = 6  # faults: up to here each is written out on a line of its own
_MARK = 8.5  # percent of a narrow page that one mark takes
_MARK_ROWS = 6
_ROW_PX = 24
_NUMBERED = 4.5  # percent: shorter segments have no number
_MOST_SEGMENTS = 300  # of a lane
_MOST_POINTS = 1200  # of the curve
_NO_STEPS = "Steps are unknown: print lines such as &quot;step 40&quot;, or call trainer_launch.report(step=40)."


def _legend(analysis: Analysis) -> str:
    attempts = max((lane.attempts for lane in analysis.lanes), default=0)
    shown = [
        (f"running a{_colour(number)}", f"attempt {number}")
        for number in range(1, min(attempts, len(ATTEMPTS)) + 1)
    ]
    if attempts > len(ATTEMPTS):
        shown[-1] = (shown[-1][0], f"attempt {len(ATTEMPTS)}; later attempts start again with blue")
    seen = {one.doing for lane in analysis.lanes for one in lane.segments}
    for doing, text in (
        (Doing.WAITING, "pending"),
        (Doing.INIT, "init containers"),
        (Doing.STOPPING, "terminating"),
        (Doing.DOWN, "restarting"),
    ):
        if doing in seen:
            shown.append((f"{doing.value} a0", text))
    items = [f'<li><i class="{kind}"></i>{text}</li>' for kind, text in shown]
    if analysis.costs:
        items.append('<li><i class="fault">1</i>a fault; a bar on the pod it hit</li>')
    if analysis.curve and analysis.costs:
        items.append('<li><i class="band"></i>no new step</li>')
    if len(analysis.curve) > 1:
        items.append('<li><i class="dashes"></i>back to the step from which training resumed</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _chart(analysis: Analysis) -> str:
    """All of it; positions are percentages of the time that the rehearsal took."""
    scale = Scale(max(analysis.totals.took_s, 0.001))
    labels = [short_name(analysis, lane.pod) for lane in analysis.lanes]
    chars = max([5, *map(len, labels)])
    many = " many" if len(analysis.lanes) > _MANY_PODS else ""
    hits = [one for one in analysis.costs if not one.is_missed]
    lanes = "".join(
        _lane(lane, label, scale, [one for one in hits if one.fault.pod in (None, lane.pod)])
        for lane, label in zip(analysis.lanes, labels, strict=True)
    )
    lines = "".join(f'<span style="left:{scale.at(one.fault.at_s)}"></span>' for one in hits)
    return (
        f'<div class="chart{many}" style="--chars:{chars}">{_marks(hits, scale)}'
        f'<div class="plot"><div class="row lines"><i></i><div class="track all">{lines}</div></div>'
        f"{lanes}{_steps(analysis, scale)}</div>{axis(scale)}</div>"
    )


def _colour(attempt: int) -> int:
    return (max(1, attempt) - 1) % len(ATTEMPTS)


# -- faults and lanes -----------------------------------------------------------------------------


def _marks(hits: Sequence[Cost], scale: Scale) -> str:
    if not hits:
        return ""
    if len(hits) <= _SPOKEN:
        rows = list(range(len(hits)))
        made = "".join(_spoken(one, row, scale) for one, row in zip(hits, rows, strict=True))
    else:
        rows = _packed([scale.percent(one.fault.at_s) for one in hits])
        made = "".join(_mark(one, row, scale) for one, row in zip(hits, rows, strict=True))
    height = (max(rows) + 1) * _ROW_PX
    return f'<div class="row"><i></i><div class="marks" style="height:{height}px">{made}</div></div>'


def _mark(cost: Cost, row: int, scale: Scale) -> str:
    wide = " wide" if cost.number > 99 else ""
    place = f"left:{scale.at(cost.fault.at_s)};top:{row * _ROW_PX}px"
    return f'<b class="fault{wide}" style="{place}" title="{_told(cost)}">{cost.number}</b>'


def _spoken(cost: Cost, row: int, scale: Scale) -> str:
    """A mark with its words beside it, on the side where there is room."""
    at, text = scale.percent(cost.fault.at_s), escape(clean(cost.fault.text))
    top = row * _ROW_PX
    side = (
        f"left:calc({at:.3f}% + 14px);max-width:calc({100 - at:.3f}% - 14px)"
        if at < 55
        else f"right:calc({100 - at:.3f}% + 14px);max-width:calc({at:.3f}% - 14px)"
    )
    return f'{_mark(cost, row, scale)}<span class="said" style="{side};top:{top}px">{text}</span>'


def _packed(places: Sequence[float]) -> list[int]:
    """A row for each mark, so that those of a row do not touch even on a narrow page; crowds share the last."""
    ends = [-_MARK] * _MARK_ROWS
    rows = []
    for place in places:
        row = next((row for row, end in enumerate(ends) if place >= end + _MARK), None)
        if row is None:
            row = min(range(_MARK_ROWS), key=ends.__getitem__)
        ends[row] = place
        rows.append(row)
    return rows


def _told(cost: Cost) -> str:
    return escape(f"{cost.number}: {clean(cost.fault.text)}, at {seconds(cost.fault.at_s)}")


def _lane(lane: Lane, label: str, scale: Scale, hits: Iterable[Cost]) -> str:
    segments = "".join(_segment(one, scale) for one in _fewer(lane.segments))
    marks = "".join(_hit(one, scale) for one in hits)
    name = f'<div class="name" title="{escape(clean(lane.pod))}">{escape(label)}</div>'
    return f'<div class="row lane">{name}<div class="track">{segments}{marks}</div></div>'


def _hit(cost: Cost, scale: Scale) -> str:
    made = f'<span class="hit" style="left:{scale.at(cost.fault.at_s)}" title="{_told(cost)}"></span>'
    if cost.over_s is not None:
        made += f'<span class="lasts" style="{scale.span(cost.fault.at_s, cost.over_s)}"></span>'
    return made


def _segment(one: Segment, scale: Scale) -> str:
    place = scale.span(one.begin_s, one.end_s)
    is_long = scale.percent(one.end_s) - scale.percent(one.begin_s) >= _NUMBERED + 2.5 * (one.attempt > 9)
    number = str(one.attempt) if one.doing is Doing.RUNNING and is_long else ""
    told = f"{one.doing.value}, attempt {one.attempt}, {seconds(one.begin_s)} to {seconds(one.end_s)}"
    return (
        f'<span class="s {one.doing.value} a{_colour(one.attempt)}" style="{place}" title="{told}">{number}</span>'
    )


def _fewer(segments: Sequence[Segment]) -> Sequence[Segment]:
    if len(segments) <= _MOST_SEGMENTS:
        return segments
    longest = sorted(segments, key=lambda one: one.begin_s - one.end_s)[:_MOST_SEGMENTS]
    return sorted(longest, key=lambda one: one.begin_s)


# -- steps and the axis ---------------------------------------------------------------------------


def _steps(analysis: Analysis, scale: Scale) -> str:
    points = [point for stretch in analysis.curve for point in stretch.points]
    if not points:
        return f'<p class="note">{_NO_STEPS}</p>'
    top = max(1, *(step for _, step in points))
    still = "".join(
        f'<span class="still" style="{scale.span(one.stands_s, one.goes_on_s)}"></span>'
        for one in analysis.costs
        if one.stands_s is not None and one.goes_on_s is not None and one.goes_on_s > one.stands_s
    )
    middle = top // 2
    sides = "".join(
        f'<span style="top:{100 - 100 * step / top:.2f}%">{step:,}</span>'
        for step in dict.fromkeys((top, middle, 0))
    )
    at = f"{100 - 100 * middle / top:.2f}"
    grid = f'<line class="grid" x1="0" x2="100" y1="{at}" y2="{at}"/>'
    lines = "".join(_line(one, analysis.curve, scale, top) for one in analysis.curve)
    return (
        f'<div class="row steps"><div class="scale">{sides}</div><div class="track">{still}'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-label="steps over time">{grid}'
        f"{_backs(analysis.curve, scale, top)}{lines}</svg>"
        f"{''.join(_dot(one, scale, top) for one in analysis.curve if len(one.points) == 1)}"
        '<b class="of">step</b></div></div>'
    )


def _line(stretch: Stretch, curve: Sequence[Stretch], scale: Scale, top: int) -> str:
    most = max(2, _MOST_POINTS // len(curve))
    each = max(1, -(-len(stretch.points) // most))
    kept = [*stretch.points[::each], stretch.points[-1]]
    text = " ".join(f"{scale.percent(at_s):.3f},{100 - 100 * step / top:.3f}" for at_s, step in kept)
    return f'<polyline class="a{_colour(stretch.attempt)}" points="{text}"/>'


def _dot(stretch: Stretch, scale: Scale, top: int) -> str:
    at_s, step = stretch.points[0]
    place = f"left:{scale.at(at_s)};top:{100 - 100 * step / top:.3f}%"
    return f'<span class="one a{_colour(stretch.attempt)}" style="{place}"></span>'


def _backs(curve: Sequence[Stretch], scale: Scale, top: int) -> str:
    """From the last step of an attempt to the first of the next: what is lost goes down."""
    made = []
    for one, after in pairwise(curve):
        (from_s, high), (to_s, low) = one.points[-1], after.points[0]
        ends = f'x1="{scale.percent(from_s):.3f}" y1="{100 - 100 * high / top:.3f}"'
        made.append(f'<line class="back" {ends} x2="{scale.percent(to_s):.3f}" y2="{100 - 100 * low / top:.3f}"/>')
    return "".join(made)
