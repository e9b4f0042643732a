"""Jobs that lose node 0 or fall apart: whoever goes on, no two generations ever train at the same time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.membership.divided import STEP_S, Divided, settled
from trainer_launch.membership import timeouts
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


def test_the_others_train_on_while_a_new_node_0_imports_torch_and_stop_once_it_could_start():
    job = settled(3)
    job.kill(0)
    job.pass_time(8)
    without = job.trains()
    job.start(0, imports_s=30)
    job.pass_time(29)
    assert job.trains() == without, "nothing has stopped for it"
    job.pass_time(4)
    assert job.sizes() == [3]
    assert [seat for _, seat in job.trains()] == [0], "and not once more"
    assert {number for number, _ in job.members} == {1, 2, 3}


def test_nodes_that_do_not_train_wait_for_a_new_node_0_where_it_is():
    job = settled(3, least=3)
    job.kill(0)
    job.pass_time(8)
    assert job.sizes() == []
    job.start(0, imports_s=10)
    job.pass_time(5)
    assert {agent.coordinator for agent in job.agents.values()} == {0}
    job.pass_time(10)
    assert job.sizes() == [3]


def test_nodes_without_workers_go_on_sooner_where_no_launcher_listens_at_node_0s_address():
    took_s = []
    for sides in ((0, 0, 0), (1, 0, 0)):  # refused, and in silence
        job = settled(3)
        job.cut(sides)
        job.kill(0)
        began_s = job.now_s
        while job.sizes() != [2] and job.now_s < began_s + 20:
            job.pass_time(STEP_S)
        took_s.append(job.now_s - began_s)
    assert took_s[0] < timeouts.TAKEOVER_S < took_s[1] < 20


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


def test_nodes_that_were_apart_meet_at_the_lowest_of_them_while_node_0_is_away():
    job = settled(5)
    job.cut((0, 1, 2, 3, 4))
    job.pass_time(15)
    job.cut((0, 1, 1, 1, 1))
    job.pass_time(20)
    assert job.sizes() == [4]
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


@pytest.mark.parametrize(
    ("job", "steps", "sizes"),
    [
        pytest.param(
            {"nodes": 4},
            [{"sides": (0, 1, 0, 0)}, {"kill": 0}, {"sides": (0, 0, 1, 1), "start": 0}],
            [[3], [2], [2]],
            id="a new node 0, whose predecessor had gone on with others",
        ),
        pytest.param(
            {"nodes": 3},
            [{"kill": 0}, {"sides": (0, 0, 1), "start": 0}, {"kill": 1}, {"sides": (1, 0, 0), "start": 1}],
            [[2], [2], [1], [1]],
            id="a new coordinator elsewhere, whose predecessor had joined node 0",
        ),
        pytest.param(
            {"nodes": 5},
            [{"sides": (0, 1, 0, 1, 1)}, {"sides": (0, 1, 0, 1, 0), "kill": 4}, {"start": 4}],
            [[3], [2], [2]],
            id="a new member, whose predecessor had gone on elsewhere",
        ),
        pytest.param(
            {"nodes": 5},
            [{"sides": (0, 0, 1, 1, 1)}, {"sides": (0, 0, 1, 1, 0)}, {"kill": 4}],
            [[3], [2], [2]],
            id="a node that ends after it has told where it had gone on",
        ),
        pytest.param(
            {"nodes": 5, "spares": 2},
            [
                {"sides": (1, 0, 0, 0, 0)},
                {"sides": (0, 0, 1, 1, 1)},
                {"sides": (0, 0, 0, 0, 1)},
                {"sides": (0, 0, 0, 1, 1)},
            ],
            [[3], [3], [3], [3]],
            id="a member that does not become one again",
        ),
    ],
)
def test_no_vote_counts_twice(job, steps, sizes):
    """Whose process has lost its memory, or who may go elsewhere as if it had not voted."""
    divided = Divided(**job)
    divided.pass_time(8)
    for step, left in zip(steps, sizes, strict=True):
        if "sides" in step:
            divided.cut(step["sides"])
        if "kill" in step:
            divided.kill(step["kill"])
        if "start" in step:
            divided.start(step["start"])
        divided.pass_time(15)
        assert not divided.problems
        assert divided.sizes() == left
    divided.cut((0,) * divided.nodes)
    divided.pass_time(20)
    assert divided.sizes() == [len(divided.launchers) - divided.spares]
    assert not divided.problems


def test_ranks_are_spelled_and_read_again():
    for ranks in ({0}, {0, 1, 2, 7}, {3, 5, 6}, set(range(100))):
        assert ranks_of(Claim(1, 0, in_ranges(ranks), sure=True)) == ranks
    assert in_ranges([0, 1, 2, 7]) == "0-2,7"


def test_a_sure_claim_ends_all_doubts_before_it():
    one, two, again = (Claim(n, 0, ranks, sure=False) for n, ranks in ((1, "0-2"), (2, "0-1"), (3, "0-2")))
    assert remember(remember((one,), two), again) == (two, again), "the same doubt is kept once"
    assert remember((one, two), replace(again, sure=True)) == (replace(again, sure=True),)
