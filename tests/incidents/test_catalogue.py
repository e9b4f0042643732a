"""The incident catalogue: every situation is told as it has to be, and no healthy job is accused or ended."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.conftest import require
from tests.incidents.catalogue import SIDE_BY_SIDE, TO_LEAVE, TO_TELL, check, longest_first
from tests.incidents.field_situations import FIELD
from tests.incidents.running import Situation, missing

LONG = pytest.mark.long("tests/incidents/test_catalogue.py")
DEMANDING = [situation for situation in FIELD if situation.needs in ("memory", "curl")]
QUICK = (
    "reads a batch and never enters",
    "barrier against all_reduce: ended",
    "finishes early, and its connections stay open",
    "a long checkpoint by rank 0",
    "3 nodes: a rank that only prints",
)


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(420)
@pytest.mark.parametrize("text", QUICK)
def test_a_situation_is_told_exactly(text: str) -> None:
    assert check(next(one for one in (*TO_TELL, *TO_LEAVE) if one.text == text)) == []


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(1200)
@LONG
@pytest.mark.parametrize("situations", [(*TO_TELL, *TO_LEAVE), FIELD], ids=["catalogue", "field"])
def test_every_situation_is_told_as_it_has_to_be(situations: tuple[Situation, ...]) -> None:
    every = longest_first(situation for situation in situations if situation not in DEMANDING)
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        wrong = {one.text: found for one, found in zip(every, threads.map(check, every), strict=True) if found}
    assert wrong == {}


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(420)
@LONG
@pytest.mark.parametrize("situation", DEMANDING, ids=lambda situation: situation.text)
def test_a_situation_that_needs_more_of_the_machine_is_told_as_it_has_to_be(situation: Situation) -> None:
    why = missing(situation.needs)
    require(why is None, str(why))
    assert check(situation) == []
