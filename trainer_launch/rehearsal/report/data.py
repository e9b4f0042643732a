"""A rehearsal as data: the facts of its HTML page, for programs. Pure.

Times are seconds since the rehearsal began. null: unknown, or it did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.model import Json
from trainer_launch.model.redaction import redact_text
from trainer_launch.rehearsal.report.fault_costs import Analysis, Cost
from trainer_launch.rehearsal.report.history import Lane
from trainer_launch.rehearsal.report.summary import headline, phases_of
from trainer_launch.rehearsal.report.wall_time import spent
from trainer_launch.rehearsal.script_checks import Verdict


def data(analysis: Analysis, verdict: Verdict, exit_code: int) -> dict[str, Json]:
    """The whole rehearsal; `exit_code` is the one that it ends with."""
    history, totals = analysis.history, analysis.totals
    return {
        "job": {"kind": history.kind, "name": history.name},
        "summary": headline(analysis, verdict).text,
        "succeeded": history.succeeded,
        "exit_code": exit_code,
        "seconds": round(totals.took_s, 3),
        "attempts": totals.attempts,
        "highest_step": totals.top,
        "downtime_s": _rounded(totals.downtime_s),
        "repeated_steps": totals.lost,
        "phases_s": {kind.value: round(seconds, 3) for kind, seconds in spent(analysis.spans).items()},
        "pods": [_pod(analysis, lane) for lane in analysis.lanes],
        "faults": [_fault(analysis, cost) for cost in analysis.costs],
        "failed_checks": [
            {
                "check": failed.check.value,
                "pods": list(failed.pods),
                "at_s": round(failed.at_s, 3),
                "evidence": failed.evidence,
                "advice": failed.advice,
            }
            for failed in verdict.failed
        ],
        "not_checked": list(verdict.remarks),
        "steps": [
            {"attempt": stretch.attempt, "points": [[round(at_s, 3), step] for at_s, step in stretch.points]}
            for stretch in analysis.curve
        ],
    }


def _pod(analysis: Analysis, lane: Lane) -> dict[str, Json]:
    history = analysis.history
    return {
        "name": lane.pod,
        "created": lane.lives,
        "attempts": lane.attempts,
        "exit_code": lane.code,
        "message": _shown(history.words, lane.pod),
        "last_line": _shown(history.seen, lane.pod),
        "timeline": [
            {
                "state": segment.doing.value,
                "begin_s": round(segment.begin_s, 3),
                "end_s": round(segment.end_s, 3),
                "attempt": segment.attempt,
            }
            for segment in lane.segments
        ],
    }


def _shown(texts: Mapping[str, str] | None, pod: str) -> str | None:
    """What a pod wrote, without what looks like a secret."""
    text = (texts or {}).get(pod)
    return None if text is None else redact_text(text)


def _fault(analysis: Analysis, cost: Cost) -> dict[str, Json]:
    return {
        "fault": cost.fault.text,
        "pod": cost.fault.pod,
        "at_s": round(cost.fault.at_s, 3),
        "over_s": _rounded(cost.over_s),
        "happened": not cost.is_missed,
        "recovered": not cost.is_missed and not cost.is_open,
        "downtime_s": _rounded(cost.downtime_s),
        "pod_away_s": _rounded(cost.away_s),
        "reached_step": cost.reached,
        "resumed_step": cost.resumed,
        "repeated_steps": cost.lost,
        "phases_s": {kind.value: round(seconds, 3) for kind, seconds in phases_of(analysis, cost).items()},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
