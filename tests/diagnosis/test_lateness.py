"""Which ranks are stragglers, from when all ranks entered their last collectives; and who only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.diagnosis.simulated import END, Job, Op, enter, jitter, receive, send, work
from trainer_launch.diagnosis.collectives import EnteredGroup, Entries
from trainer_launch.diagnosis.lateness import Lateness, Timeline, judge

STEP_S = 0.1
SLOWED = (1.2, 1.5, 3.0)


def plain(slow: dict[int, float], seed: int = 0, part: float = 0.03) -> Callable[[int, int], list[Op]]:
    """One all_reduce a step; some ranks compute for longer."""
    vary = jitter(seed, part)
    return lambda rank, number: [work(vary(rank, number, STEP_S) * slow.get(rank, 1)), enter()]


def buckets(
    slow: dict[int, float], seed: int = 0, count: int = 5, sizes: int = 5
) -> Callable[[int, int], list[Op]]:
    """As DDP does: gradients in buckets while the backward pass goes on, and at its end all are waited for."""
    vary = jitter(seed, 0.03)

    def step(rank: int, number: int) -> list[Op]:
        each = vary(rank, number, STEP_S) * slow.get(rank, 1) / (count + 1)
        return [
            work(each),
            *(op for bucket in range(count) for op in (work(each), enter(size=bucket % sizes, waits=False))),
            END,
            work(0.0005),
            enter(size=99),  # the loss, for people
        ]

    return step


def layers(slow: dict[int, float], seed: int = 0) -> Callable[[int, int], list[Op]]:
    """As FSDP does: many collectives a step, most of them alike."""
    vary = jitter(seed, 0.03)

    def step(rank: int, number: int) -> list[Op]:
        each = vary(rank, number, STEP_S) * slow.get(rank, 1) / 20
        middle = [op for _ in range(18) for op in (work(each), enter(size=7))]
        return [work(each), enter(size=1), *middle, work(each), enter(size=2)]

    return step


# -- who is one --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [plain, buckets])
@pytest.mark.parametrize("factor", SLOWED)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_one_slowed_rank_is_found_whatever_the_steps_are_like(step, factor, ranks):
    for slow, seed in product((0, ranks - 1), range(3)):
        assert Job(ranks, step({slow: factor}, seed)).stragglers() == {slow}


@pytest.mark.parametrize("step", [plain, buckets])
def test_a_slow_node_has_only_slow_ranks(step):
    for seed in range(5):
        job = Job(12, step(dict.fromkeys((4, 5, 6, 7), 1.4), seed))
        assert job.stragglers(nodes=lambda rank: rank // 4) == {4, 5, 6, 7}


# -- who is none -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [plain, buckets, layers])
def test_of_ranks_that_are_alike_none_is_one_slow_or_not(step):
    for ranks, seed in product((2, 3, 4, 16), range(3)):
        assert not Job(ranks, step(dict.fromkeys(range(ranks), 1.5), seed)).stragglers()


def test_in_hundreds_of_samples_of_unsteady_ranks_nobody_is_named_by_three_in_a_row():
    """Each step of each rank varies by 25 %, so that in single samples somebody may well be late often."""
    found = [Job(4, plain({}, seed, 0.25), steps=20).stragglers() for seed in range(400)]
    in_a_row = [one & two & three for one, two, three in zip(found, found[1:], found[2:], strict=False)]
    assert not any(in_a_row)


def test_a_rank_that_is_slower_by_less_than_a_tenth_is_none():
    steps: tuple[Callable[[dict[int, float], int], Callable[[int, int], list[Op]]], ...] = (plain, buckets, layers)
    for step, seed in product(steps, range(5)):
        assert not Job(4, step({1: 1.05}, seed)).stragglers()


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_rank_that_is_late_only_in_some_steps_is_none(every):
    def step(rank: int, number: int) -> list[Op]:
        return plain({1: 2.0} if number % every == 0 else {}, number)(rank, number)

    for steps in range(9, 41):
        assert not Job(4, step, steps=steps).stragglers()


def test_ranks_that_are_late_in_turn_are_none():
    def step_of(ranks: int) -> Callable[[int, int], list[Op]]:
        return lambda rank, number: plain({number % ranks: 2.0}, number)(rank, number)

    for ranks, steps in product((2, 3, 4), range(9, 41)):
        assert not Job(ranks, step_of(ranks), steps=steps).stragglers(), (ranks, steps)


@pytest.mark.parametrize("steps", range(1, 30))
def test_a_late_first_batch_makes_nobody_one(steps):
    job = Job(4, lambda rank, number: plain({3: 80.0 if number == 0 else 1.0})(rank, number), steps=steps)
    assert not job.stragglers()


def test_a_rank_that_saves_a_checkpoint_now_and_then_is_none():
    def step(rank: int, number: int) -> list[Op]:
        saves = [work(3.0 if rank == 0 else 0.0), enter(size=1000)] if number % 10 == 9 else []
        return [*plain({}, number)(rank, number), *saves]

    assert not Job(4, step, steps=60).stragglers()


def test_a_rank_that_waits_for_a_slow_one_in_another_group_is_none():
    """Tensor parallel pairs within data parallel groups: rank 1 is late in the latter because of rank 0."""
    groups = {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}

    def step(rank: int, number: int) -> list[Op]:
        each = jitter(number, 0.02)(rank, number, STEP_S / 8) * (1.5 if rank == 0 else 1)
        pair, across = f"tp{rank // 2}", f"dp{rank % 2}"
        return [op for _ in range(8) for op in (work(each), enter(pair))] + [enter(across, 9)]

    job = Job(4, step, groups=groups)
    late = job.late()
    assert late[1].median_s > 0.04, "it is late, but waits as long"
    assert job.stragglers() == {0}


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_stage_of_a_pipeline_that_waits_for_the_one_before_is_none(is_recorded):
    """The last stage is late in each step's all_reduce, because activations come to it last."""

    def step(rank: int, number: int) -> list[Op]:
        before = [receive(rank - 1, is_recorded=is_recorded)] if rank else []
        after = [send(rank + 1)] if rank < 3 else []
        return [*before, work(STEP_S), *after, enter()]

    job = Job(4, step)
    assert job.late()[3].late == 0
    assert not job.stragglers()


# -- whose answers are missing, and clocks ---------------------------------------------------------


@pytest.mark.parametrize("silent", range(4))
def test_a_silent_rank_is_not_named_and_makes_nobody_else_one(silent):
    job = Job(4, plain({1: 1.5}))
    told = [one for one in job.timelines() if one.rank != silent]
    assert {one.rank for one in judge(told) if one.is_straggler} == set()


@pytest.mark.parametrize("error_s", [0.0, 0.005, 0.1])
def test_what_the_clocks_cannot_tell_is_nobodys_lateness(error_s):
    job = Job(4, plain({3: 1.3}))
    times = [Timeline(one.told, one.rank // 2, error_ns=int(error_s * 1e9)) for one in job.timelines()]
    assert bool([one for one in judge(times) if one.is_straggler]) == (error_s < 0.1)


# -- hostile input, size, words -----------------------------------------------------------------


def test_entries_that_contradict_each_other_are_no_error():
    group = EnteredGroup("0", "0-3", 1)
    odd = [
        Entries(rank=0, groups=(group,), which=(0, 7, 0), gaps_us=(0,), step_us=1),
        Entries(rank=1, groups=(group._replace(ranks="0-99999"),), which=(0,), gaps_us=(5,), step_us=1 << 53),
        Entries(rank=2, groups=(group._replace(ranks="x"),), which=(0,) * 5, gaps_us=(1 << 53,) * 5),
        Entries(rank=3, which=(0, 1), gaps_us=(1, 1), step_us=3),
        Entries(rank=0, groups=(group, group), which=(0, 1, 0, 1), gaps_us=(0, 0, 0, 0), step_us=1),
    ]
    for first in odd:
        assert not [
            one for one in judge([Timeline(first, 0), *(Timeline(one, 1) for one in odd)]) if one.is_straggler
        ]


def test_a_sentence_has_all_that_is_known():
    one = Lateness(rank=5, node=1, steps=16, late=14, median_s=0.021, p95_s=0.03, step_s=1.25)
    assert (
        str(one)
        == "rank 5 (node 1) is a straggler: late in 14 of 16 steps, by 21 ms (p95 30 ms) of a step of 1.25 s"
    )
