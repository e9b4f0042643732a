"""The incident catalogue: every situation is told word for word, and no healthy job is accused or ended."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.incidents.catalogue import SIDE_BY_SIDE, TO_LEAVE, TO_TELL, check, longest_first

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
@pytest.mark.long("tests/incidents/test_catalogue.py")
def test_every_situation_is_told_exactly() -> None:
    every = longest_first()
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        wrong = {one.text: found for one, found in zip(every, threads.map(check, every), strict=True) if found}
    assert wrong == {}
