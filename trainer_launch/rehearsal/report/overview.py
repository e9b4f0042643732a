"""A rehearsal as a whole, for people: its lanes, its steps, and what its faults cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_launch.rehearsal.report.fault_costs import Cost, Stretch, Totals, costs, curve, totals
from trainer_launch.rehearsal.report.history import Chronicle
from trainer_launch.rehearsal.report.lanes import Lane, lanes
from trainer_launch.rehearsal.resume_check import Resume, resumes
from trainer_launch.rehearsal.step_counter import steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a chronicle comes to."""

    chronicle: Chronicle
    lanes: tuple[Lane, ...]
    curve: tuple[Stretch, ...]
    resumes: tuple[Resume, ...]
    costs: tuple[Cost, ...]
    totals: Totals


def tell(chronicle: Chronicle) -> Story:
    """Make the story of a rehearsal, also of one that has not ended."""
    all_lanes, reached = lanes(chronicle), steps(chronicle)
    resumed = resumes(chronicle, reached)
    found = costs(chronicle, all_lanes, reached, resumed)
    return Story(
        chronicle=chronicle,
        lanes=all_lanes,
        curve=curve(reached, resumed),
        resumes=resumed,
        costs=found,
        totals=totals(chronicle, all_lanes, found, resumed),
    )
