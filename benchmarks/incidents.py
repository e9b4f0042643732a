"""The incident catalogue of tests/incidents, all of it, as a section of the page."""

from __future__ import annotations

import concurrent.futures
import math
import statistics
import time
from collections.abc import Mapping, Sequence

from benchmarks.measuring import Case, Failed, Reading, Section, Setup, say
from benchmarks.peers import versions_here
from tests.incidents.catalogue import (
    SIDE_BY_SIDE,
    TO_LEAVE,
    TO_TELL,
    at_fault,
    differences,
    longest_first,
    named,
    tries,
)
from tests.incidents.field_situations import FIELD, SLOW
from tests.incidents.running import REPORT_S, Situation, Told, missing

LIMIT_S = 1200.0
WHO = "trainer-launch"
TOLD, LEFT = "situations told exactly", "healthy jobs left alone"
FROM_FIELD = "situations from the field told right"
PRECISION, RECALL = "precision of the named rank", "recall of the named rank"
AGAIN = "tried twice, as something was wrong the first time"
ALL = (*TO_TELL, *TO_LEAVE, *FIELD, *SLOW)
TIMES = {
    (kind, nodes): f"{kind}, {count}: from the fault to the verdict"
    for kind in ("hangs", "failures")
    for nodes, count in ((1, "1 node"), (3, "3 nodes"))
}


def once() -> Mapping[str, Reading | str]:
    """All of them, several side by side; what was told of each."""
    begun_s = time.monotonic()
    every = longest_first(situation for situation in ALL if not missing(situation.needs))
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        tried = dict(zip(every, threads.map(tries, every), strict=True))
    say(f"incidents: {time.monotonic() - begun_s:.0f} s")
    rows: dict[str, Reading | str] = {AGAIN: Reading(sum(len(each) - 1 for each in tried.values()))}
    rows |= figures({situation: each[-1] for situation, each in tried.items()})
    rows |= {one.text: f"left out: {why}" for one in ALL if (why := missing(one.needs))}
    if not any(isinstance(rows[situation.text], Reading) for situation in every):
        raise Failed("no situation was told as it has to be")
    return rows


def figures(said: Mapping[Situation, Told]) -> dict[str, Reading | str]:
    """What was right of all that was told: each situation, their numbers, and what follows from all."""
    wrong = {situation: differences(situation, told) for situation, told in said.items()}
    rows: dict[str, Reading | str] = {}
    for name, group in (
        (TOLD, [one for one in said if one in TO_TELL]),
        (
            FROM_FIELD,
            [situation for situation in said if situation in (*FIELD, *SLOW) and not situation.is_healthy],
        ),
        (LEFT, [situation for situation in said if situation.is_healthy]),
    ):
        if group:
            rows[name] = Reading(sum(not wrong[situation] for situation in group), f"of {len(group)}")
    for name, (right, count) in zip((PRECISION, RECALL), precision_and_recall(said), strict=True):
        if count:
            rows[name] = Reading(100 * right / count, f"{right} of {count}")
    for (kind, nodes), row in TIMES.items():
        taken = [told.seconds for one, told in said.items() if _kind(one, told) == (kind, nodes) and not wrong[one]]
        if values := [value for value in taken if value is not None]:
            note = f"90 % within {percentile(values, 0.9):.3g} s, {len(values)} situations"
            rows[row] = Reading(statistics.median(values), note)
    return rows | {one.text: "; ".join(wrong[one]) if wrong[one] else Reading(1) for one in said}


def precision_and_recall(said: Mapping[Situation, Told]) -> tuple[tuple[int, int], tuple[int, int]]:
    """In how many jobs those named are at fault; of all in which ranks were named, and of all with ranks at fault.

    Healthy jobs count, too; jobs in which chance chooses who fails first do not.
    """
    pairs = [(at_fault(one), named(told)) for one, told in said.items() if not one.any_rank]
    hits = sum(bool(ranks) and ranks <= culprits for culprits, ranks in pairs)
    return (hits, sum(bool(ranks) for _, ranks in pairs)), (hits, sum(bool(culprits) for culprits, _ in pairs))


def _kind(situation: Situation, told: Told) -> tuple[str, int]:
    """Of a verdict whose time counts; a hang under default options is told when an incident is due by default."""
    is_counted = not situation.is_healthy and situation not in SLOW
    return ("hangs" if told.accused else "failures") if is_counted else "", situation.nodes


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that is at least as large as such a part of all."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def opened() -> Setup:
    """One run has all situations."""
    units = {PRECISION: "%", RECALL: "%", **dict.fromkeys(TIMES.values(), "s")}
    rows = {row: units.get(row, "") for row in (*SHOWN, AGAIN, *(situation.text for situation in ALL))}
    return Setup([Case(WHO, rows, once, LIMIT_S, 400.0)])


SHOWN = (TOLD, FROM_FIELD, LEFT, PRECISION, RECALL, *TIMES.values())
SECTION = Section(
    name="incidents",
    title="Truth",
    about=(
        "Real gloo jobs that fail, hang, or only look like it. Precision: of the jobs that named a rank, those "
        "that named the rank at fault. Recall: of the jobs with a rank at fault, those that named it. "
        f"`--hang-report-after {REPORT_S}`: no hang is reported earlier."
    ),
    shows=SHOWN,
    open=opened,
    versions=lambda: versions_here("trainer-launch", "torch"),
    whos=(WHO,),
    repeats=1,
)
