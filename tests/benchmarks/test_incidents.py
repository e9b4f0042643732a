"""What the benchmark of incidents and stragglers counts, from what was told of each job."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from benchmarks import incidents, stragglers
from benchmarks.incidents import ALL, FROM_FIELD, LEFT, PRECISION, RECALL, TIMES, TOLD, percentile
from benchmarks.measuring import Reading
from benchmarks.stragglers import JOBS, NAMED, QUIET
from tests.incidents import catalogue
from tests.incidents.field_situations import FIELD
from tests.incidents.running import Situation, Told, told

BY_TEXT = {situation.text: situation for situation in ALL}
RAISES = BY_TEXT["an exception on one rank"]
CLEANS_UP = BY_TEXT["leaves its group, and raises 1.5 s later"]
HANGS = BY_TEXT["never enters: ended"]
REPORTED = BY_TEXT["two ranks are missing at two places"]
HEALTHY = BY_TEXT["a long checkpoint by rank 0"]
CHANCE = BY_TEXT["an exception on all ranks"]
CIRCLE = BY_TEXT["both ranks receive"]


def line(reason: str, rank: int | None, text: str) -> Told:
    """What is read of a launcher that ends so."""
    where = "" if rank is None else f" rank={rank}"
    return told(f"[trainer-launch] reason={reason}{where} exit=1 attempt=1 | {text}\n", 1, None, 2.0)


def raised(rank: int) -> Told:
    return line("Failed", rank, f"rank {rank} ended with exit code 1: ValueError: label 17 is out of range")


def suspected(ranks: str) -> Told:
    text = f"{ranks} never entered all_reduce #6 of default_pg, [[4]] Float; rank 0 has waited in it for 2 s"
    output = f"[trainer-launch] suspected hang: {text}; collected in /tmp/x\n"
    return told(f"{output}[trainer-launch] reason=Succeeded exit=0 attempt=1\n", 0, None, 3.0)


def ratio(said: dict[Situation, Told], row: str) -> str:
    reading = incidents.figures(said)[row]
    assert isinstance(reading, Reading)
    return reading.note


def test_every_situation_has_a_row_of_its_own() -> None:
    assert [text for text, count in Counter(situation.text for situation in ALL).items() if count > 1] == []


def test_a_named_rank_that_is_at_fault_is_a_hit() -> None:
    said = {CLEANS_UP: raised(1)}
    assert incidents.precision_and_recall(said) == ((1, 1), (1, 1))
    assert ratio(said, FROM_FIELD) == "of 1"


def test_a_victim_that_is_named_costs_precision_and_recall() -> None:
    said = {CLEANS_UP: raised(0), RAISES: raised(1)}
    assert (ratio(said, PRECISION), ratio(said, RECALL)) == ("1 of 2", "1 of 2")


def test_a_fault_of_which_nobody_is_named_costs_recall_only() -> None:
    said = {CLEANS_UP: line("Failed", None, "a program failed"), RAISES: raised(1)}
    assert (ratio(said, PRECISION), ratio(said, RECALL)) == ("1 of 1", "1 of 2")


def test_a_healthy_job_that_is_accused_costs_precision() -> None:
    said = {HEALTHY: suspected("rank 1 (node 0)"), RAISES: raised(1)}
    assert (ratio(said, PRECISION), ratio(said, RECALL)) == ("1 of 2", "1 of 1")
    assert incidents.figures(said)[LEFT] == Reading(0, "of 1")


@pytest.mark.parametrize(
    ("ranks", "is_hit"), [("ranks 1-2", True), ("rank 1 (node 0)", True), ("ranks 0-2", False)]
)
def test_a_report_names_the_ranks_at_its_head(ranks: str, is_hit: bool) -> None:
    assert incidents.precision_and_recall({REPORTED: suspected(ranks)}) == ((is_hit, 1), (is_hit, 1))


def test_a_deadlock_of_all_ranks_has_nobody_to_name_and_chance_names_nobody() -> None:
    said = {CIRCLE: line("Stopped", None, ""), CHANCE: raised(0)}
    assert incidents.precision_and_recall(said) == ((0, 0), (0, 0))


def test_times_are_those_of_situations_that_were_told_right() -> None:
    rows = incidents.figures({CLEANS_UP: raised(1), RAISES: raised(1), HANGS: suspected("rank 1 (node 0)")})
    assert rows[TIMES["failures", 1]] == Reading(2.0, "90 % within 2 s, 1 situations")
    assert not {TIMES["hangs", 1], TIMES["failures", 3]} & rows.keys()
    assert rows[TOLD] == Reading(0, "of 2")


@pytest.mark.parametrize(("count", "right"), [(1, 1), (9, 9), (10, 9), (20, 18), (21, 19)])
def test_nine_of_ten_values_are_within_the_percentile(count: int, right: int) -> None:
    assert percentile(list(range(count, 0, -1)), 0.9) == right


def test_any_of_several_answers_is_right_and_words_that_must_not_be_told_are_noticed() -> None:
    one_of = next(situation for situation in FIELD if situation.act == "store_resets")
    reset = "rank 1 ended with exit code 1: ConnectionResetError: [Errno 104] Connection reset by peer"
    assert catalogue.differences(one_of, line("Failed", 1, reset)) == []
    lost = line("PeerLost", 1, f"{reset}; its network is gone")
    assert catalogue.differences(one_of, lost) == ["never: PeerLost", "reason=PeerLost"]


def test_stragglers_are_counted_by_how_slow_they_are_and_others_that_were_named_are_told() -> None:
    said = {job: frozenset(() if job.factor == 1 else (job.slow,)) for job in JOBS}
    assert len(JOBS) == 120
    assert [(row.value, row.note) for row in stragglers.figures(said).values()] == [(20, "of 20")] * 3 + [
        (60, "of 60")
    ]
    slow, healthy = JOBS[0], JOBS[-1]
    rows = stragglers.figures(said | {slow: frozenset((slow.slow, slow.slow + 1)), healthy: frozenset((1,))})
    assert rows[NAMED[1.2]] == Reading(19, "of 20, others named in 1")
    assert rows[QUIET] == Reading(59, "of 60, others named in 1")
    assert stragglers.figures({replace(slow, factor=3.0): frozenset()})[NAMED[3.0]] == Reading(0, "of 1")
