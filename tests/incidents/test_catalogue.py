"""The incident catalogue: every situation is told word for word, and no healthy job is accused or ended."""

from __future__ import annotations

import concurrent.futures
from dataclasses import replace

import pytest

from tests.incidents.catalogue import (
    SIDE_BY_SIDE,
    TO_LEAVE,
    TO_TELL,
    Situation,
    check,
    differences,
    longest_first,
)
from tests.incidents.running import Told, told

QUICK = (
    "reads a batch and never enters",
    "barrier against all_reduce: ended",
    "finishes early, and its connections stay open",
    "a long checkpoint by rank 0",
    "3 nodes: a rank that only prints",
)
SENTENCE = "rank 1 (node 0) never entered barrier #6 of default_pg; rank 0 has waited in it for 2 s; rank 1 is in "
SENTENCE += "incident_job.py:34 (read_batch)"
REPORTED = f"""\
rank 0 step 4
[trainer-launch] no progress: ranks 0-1 have been idle for 2 s; collecting an incident
[trainer-launch] suspected hang: {SENTENCE}; collected in /tmp/x
[trainer-launch] reason=Succeeded exit=0 attempt=1 seconds=3.2
"""
FAILED = """\
[trainer-launch 0] reason=PeerLost node=0 host=a exit=138 attempt=1 retryable=true seconds=3.2 | rank 1 failed
[trainer-launch 1] reason=Killed rank=1 node=1 host=b signal=SIGKILL exit=137 attempt=1 retryable=true | it died
"""


def of(act: str) -> Situation:
    return next(one for one in (*TO_TELL, *TO_LEAVE) if one.act == act)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sentence": "x"}, "sentence: x"),
        ({"rank": 3}, "rank=3"),
        ({"reason": "Hung"}, "reason=Hung"),
        ({"retryable": True}, "retryable=True"),
        ({"exit_code": 138}, "exit_code=138"),
        ({"attempt": 2}, "attempt=2"),
    ],
)
def test_whatever_differs_is_named(change: dict[str, object], said: str) -> None:
    found: Told = replace(told(REPORTED, 0, None), **change)  # type: ignore[arg-type]
    assert differences(of("barrier"), found) == [said]


def test_a_healthy_job_must_not_be_accused() -> None:
    assert differences(of("saves"), told(REPORTED, 0, None)) == ["somebody was accused"]


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
