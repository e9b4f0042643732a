"""Jobs that lose node 0 or fall apart: whoever goes on, no two generations ever train at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.membership.divided import Divided, settled
from trainer_launch.membership.election import ranks_of, remember
from trainer_launch.membership.protocol import Claim
from trainer_launch.model.units import in_ranges


def test_the_others_go_on_without_node_0_and_with_it_again():
    job = settled(3)
    job.kill(0)
    job.pass_time(8)
    assert job.sizes() == [2]
    job.start(0)
    job.pass_time(10)
    assert job.sizes() == [3]
    assert [seat for _, seat in job.trains()] == [0], "all meet at node 0 again"


def test_a_job_of_two_waits_for_node_0():
    job = settled(2)
    job.kill(0)
    job.pass_time(60)
    assert job.sizes() == []
    job.start(0)
    job.pass_time(10)
    assert job.sizes() == [2]


@pytest.mark.parametrize(
    ("sides", "left"), [((0, 1, 1), 2), ((0, 0, 1), 2), ((0, 1, 2), 0), ((0, 0, 0, 1, 1), 3), ((0, 0, 1, 1), 2)]
)
def test_of_two_sides_at_most_one_goes_on_and_all_meet_again(sides, left):
    job = settled(len(sides))
    job.cut(sides)
    job.pass_time(15)
    assert sum(job.sizes()) == left
    if left == 2 and sides == (0, 0, 1, 1):
        assert 0 in job.members[job.trains()[0]], "of two halves the one with the last coordinator's node"
    job.cut((0,) * len(sides))
    job.pass_time(20)
    assert job.sizes() == [len(sides)]
    assert not job.problems


def test_two_pods_killed_at_once_leave_node_0_which_knows_that_they_ended():
    job = settled(3)
    job.kill(1)
    job.kill(2)
    job.pass_time(5)
    assert job.sizes() == [1]


def test_a_new_node_0_that_is_cut_off_begins_nothing_beside_the_others():
    job = settled(3)
    job.kill(0)
    job.pass_time(8)
    job.cut((0, 1, 1))
    job.start(0)
    job.pass_time(30)
    assert job.sizes() == [2]
    assert not job.problems


def test_a_first_start_with_fewer_waits_a_moment_and_goes_on():
    job = Divided(3)
    job.kill(2)
    job.pass_time(4)
    assert job.sizes() == []
    job.pass_time(4)
    assert job.sizes() == [2]


def test_an_agent_that_is_killed_before_a_partition_does_not_vote_twice():
    job = settled(3)
    job.kill_agent(1)
    job.cut((0, 1, 1))
    job.start_agent(1)
    job.pass_time(30)
    assert job.sizes() == [1], "node 0's side knows the end of the agent; the other side has one vote"
    assert not job.problems


def test_ranks_are_spelled_and_read_again():
    for ranks in ({0}, {0, 1, 2, 7}, {3, 5, 6}, set(range(100))):
        assert ranks_of(Claim(1, 0, in_ranges(ranks), sure=True)) == ranks
    assert in_ranges([0, 1, 2, 7]) == "0-2,7"


def test_a_sure_claim_ends_all_doubts_before_it():
    one, two, again = (Claim(n, 0, ranks, sure=False) for n, ranks in ((1, "0-2"), (2, "0-1"), (3, "0-2")))
    assert remember(remember((one,), two), again) == (two, again), "the same doubt is kept once"
    assert remember((one, two), replace(again, sure=True)) == (replace(again, sure=True),)


EVENTS = st.one_of(
    st.tuples(st.just("kill"), st.integers(0, 4)),
    st.tuples(st.just("kill_agent"), st.integers(0, 4)),
    st.tuples(st.just("start"), st.integers(0, 4)),
    st.tuples(st.just("cut"), st.lists(st.integers(0, 2), min_size=5, max_size=5)),
    st.tuples(st.just("cut"), st.just([0] * 5)),
    st.tuples(st.just("time"), st.sampled_from([0.25, 0.5, 1.0, 3.5, 8.0])),
    st.tuples(st.just("time"), st.sampled_from([0.25, 0.5, 1.0, 3.5, 8.0])),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 5), st.integers(1, 2), st.lists(EVENTS, min_size=5, max_size=25))
def test_in_no_history_two_generations_train_at_the_same_time(nodes, least, script):
    job = Divided(nodes, least)
    job.pass_time(2)
    for what, value in script:
        do(job, what, value)
        job.check()
        assert not job.problems, job.problems[0]
    job.cut((0,) * nodes)
    for rank in range(nodes):
        do(job, "start", rank)
    job.pass_time(50)
    assert job.sizes() == [nodes], "when all is well again, all train together"


def do(job, what, value):
    if what == "time":
        job.pass_time(value)
    elif what == "cut":
        job.cut(value[: job.nodes])
    elif value < job.nodes and what == "kill":
        job.kill(value)
    elif value < job.nodes and what == "kill_agent":
        job.kill_agent(value)
    elif what == "start" and value < job.nodes:
        if value not in job.launchers:
            job.start(value)
        elif value not in job.agents:
            job.start_agent(value)
