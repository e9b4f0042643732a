"""What a soak takes for a defect: steps that were lost, what faults do not explain, memory that grows."""

from __future__ import annotations

import dataclasses

import pytest

from tests.soak import judging
from tests.soak.faults import KILLED, NODES, STOPPED, TORCH, Fault, Seen, expected, wrong
from tests.survival.jobs import Step, parse

NOBODY: tuple[tuple[int, ...], ...] = ((),) * NODES
STOPPED_WORDS = "reason=Stopped node=2 host=job-node-0-2 exit=143 attempt=1 retryable=true seconds=26.4"


@pytest.mark.parametrize("kind", TORCH)
def test_each_kind_explains_what_it_costs_and_no_more(kind):
    nodes = tuple(range(1, 1 + (TORCH[kind].victims or NODES - 1)))
    cost, code = expected([Fault(kind, nodes, 1.0)], TORCH), TORCH[kind].code
    codes = tuple((code,) if code and node in nodes else () for node in range(NODES))
    words = tuple(tuple("" if one == KILLED else STOPPED_WORDS for one in ends) for ends in codes)
    right = Seen(codes=codes, last_words=words, charges=cost.charges[0], starts=cost.starts[0], longest_s=1.0)
    assert wrong(cost, right) == []
    for more in (
        {"charges": cost.charges[1] + 1},
        {"starts": cost.starts[1] + 1},
        {"longest_s": cost.bound_s + 0.1},
    ):
        assert len(wrong(cost, dataclasses.replace(right, **more))) == 1


def test_of_two_faults_at_a_time_one_may_hide_the_others_failure():
    cost = expected([Fault("kill worker", (1,), 0.0), Fault("kill pod", (2,), 2.0)], TORCH)
    assert (cost.codes[2], cost.charges, cost.starts[0]) == ((KILLED,), (0, 1), 1)


@pytest.mark.parametrize("text", ["", "reason=Failed exit=143 attempt=1", STOPPED_WORDS + "x" * 4096])
def test_a_termination_message_has_to_fit_the_end(text):
    cost = expected([Fault("term pod", (2,), 1.0)], TORCH)
    codes = (*NOBODY[:2], (STOPPED,), *NOBODY[3:])
    texts = tuple((text,) if node == 2 else () for node in range(NODES))
    found = wrong(cost, Seen(codes, texts, charges=0, starts=1, longest_s=1.0))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("runs", "is_broken"),
    [
        *(([(1, 7)], False), ([(1, 7), (6, 12)], False), ([(1, 5), (6, 9)], False), ([(1, 4), (1, 3)], False)),
        *(
            ([(1, 7), (1, 3)], True),
            ([(1, 7), (8, 9)], True),
            ([(1, 12), (6, 7)], True),
            ([(1, 7), (11, 12)], True),
        ),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_and_from_nowhere_else(runs, is_broken):
    assert len(judging.broken(_steps(*runs), keeps_state=False)) == is_broken


@pytest.mark.parametrize(
    ("second", "is_broken", "is_done_again"),
    [(8, False, False), (9, False, False), (6, False, True), (10, True, False), (7, True, True)],
)
def test_a_job_that_keeps_its_state_goes_on_from_it_or_from_a_checkpoint(second, is_broken, is_done_again):
    steps = _steps((1, 7), (second, 12))
    assert len(judging.broken(steps, keeps_state=True)) == is_broken
    assert len(judging.done_again(steps)) == is_done_again


def _steps(*runs: tuple[int, int]) -> list[Step]:
    numbers = [(name, number) for name, (a, b) in zip("ab", runs, strict=False) for number in range(a, b + 1)]
    return parse("".join(f"{at}.0 {number} {NODES} {name}\n" for at, (name, number) in enumerate(numbers)))


@pytest.mark.parametrize(("kb_per_look", "grows"), [(10, False), (100, True)])
def test_memory_that_grows_is_found_and_memory_that_is_flat_is_not(kb_per_look, grows):
    points = [(60.0 * n, 26_000.0 + kb_per_look * n) for n in range(31)]
    assert (judging.kb_per_hour(points) > judging.LAUNCHER_KB_PER_HOUR) is grows


def test_what_is_loaded_once_is_no_growth():
    assert judging.kb_per_hour([(60.0 * n, 1000.0 + 2400.0 * (n >= 26)) for n in range(41)]) == 0.0
