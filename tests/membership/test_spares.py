"""Nodes beyond the job's size: who waits, who takes over, and how they end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.divided import Divided
from tests.membership.world import World, running
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase, status


def members(world):
    return tuple(world.state.run.members)


def words(world):
    return [row[2] for row in status(world.state, world.now_s).nodes]


def again(world, *peers):
    """These join again, and their generation runs."""
    world.join(*peers)
    world.open_store()


def test_a_spare_waits_and_status_says_so():
    world, (*_, spare) = running(2, spares=1)
    world.pass_time(100)
    assert (world.number, words(world)) == (1, ["running", "running", "spare"])
    assert world.last(spare, msg.Waiting) == msg.Waiting(2, 2, (), running=True)
    assert status(world.state, world.now_s).spares == 1


def test_a_lost_node_is_replaced_at_once_and_its_pod_becomes_the_spare():
    world, (zero, one, spare) = running(2, spares=1)
    world.gone(one)
    begun_s = world.now_s
    again(world, zero)
    assert (world.now_s, world.phase, members(world)) == (begun_s, JobPhase.RUNNING, (0, 2))
    assert world.last(spare, msg.Formed).group_rank == 1
    assert "node 2 (pod-2) replaces node 1 (pod-1)" in world.said
    assert world.state.restarts == 0
    world.come(1)
    world.pass_time(100)
    assert (world.number, words(world)) == (2, ["running", "spare", "running"]), "nobody is disturbed"


def test_a_member_that_stops_slowly_is_not_replaced():
    world, (zero, one, _) = running(2, spares=1)
    world.fail(zero)
    world.join(zero)
    world.pass_time(10)
    assert world.phase is JobPhase.GATHERING
    world.join(one)
    assert members(world) == (0, 1)


def test_a_spare_that_dies_disturbs_nobody_and_is_missed_only_later():
    world, (zero, one, spare) = running(2, spares=1)
    world.gone(spare)
    world.pass_time(10)
    assert (world.number, words(world)) == (1, ["running", "running", "lost"])
    world.gone(one)
    world.join(zero)
    world.pass_time(10)
    assert world.phase is JobPhase.GATHERING, "without a spare a fixed job waits for the lost node"
    world.come(1)
    assert members(world) == (0, 1)


def test_a_spare_cannot_end_the_job():
    world, (*_, spare) = running(2, spares=1)
    world.say(spare, msg.Leave("asked to stop"))
    world.say(spare, msg.Failed(1, 0, 1, None, "boom"))
    assert (world.phase, world.number) == (JobPhase.RUNNING, 1)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_spare_hears_how_the_job_ends(ends_well):
    world, (zero, one, spare) = running(2, spares=1, max_restarts=0)
    if ends_well:
        world.say(zero, msg.Done(1))
        world.say(one, msg.Done(1))
    else:
        world.fail(zero)
        world.join(zero, one)
    assert world.last(spare, msg.Finished if ends_well else msg.GiveUp) is not None


def test_the_jobs_own_nodes_come_before_a_spare_that_was_faster():
    world = World(2, spares=1)
    world.come(2, 0)
    world.pass_time(2)
    assert world.phase is JobPhase.GATHERING
    world.come(1)
    world.pass_time(4)
    assert members(world) == (0, 1)


def test_a_spare_begins_in_place_of_a_node_that_does_not_come():
    world = World(2, spares=1)
    world.come(2, 0)
    world.pass_time(6)
    assert members(world) == (0, 2)


def test_a_node_beyond_the_spares_is_refused():
    world, _ = running(2, spares=1)
    refused = world.last(world.call(3), msg.Refused)
    assert (refused.reason, refused.retry) == ("this job has nodes 0 to 2, there is no node 3", False)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_with_spares_a_fixed_job_goes_on_without_node_0_and_node_0_becomes_the_spare(is_cut_off):
    job = Divided(4, least=3, spares=1)
    job.pass_time(2)
    assert [*job.members.values()] == [(0, 1, 2)]
    if is_cut_off:
        job.cut((1, 0, 0, 0))
        job.pass_time(5)
    job.kill(0)
    job.pass_time(9)
    assert [job.members[run] for run in job.trains()] == [(1, 2, 3)]
    job.cut((0,) * 4)
    job.start(0)
    job.pass_time(10)
    assert [(job.members[run], run[1]) for run in job.trains()] == [((1, 2, 3), 0)], (
        "it only serves the coordinator"
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["kill", "start", "cut", "heal", "wait"]), st.integers(0, 3), st.integers(1, 12)),
        max_size=20,
    )
)
def test_in_no_history_do_two_generations_train_or_one_of_another_size(script):
    job = Divided(4, least=3, spares=1)
    for what, who, seconds in script:
        if what == "kill" and who in job.launchers:
            job.kill(who)
        elif what == "start" and who not in job.launchers:
            job.start(who)
        elif what in ("cut", "heal"):
            job.cut([int(what == "cut" and rank == who) for rank in range(4)])
        job.pass_time(seconds)
        assert all(len(members) == 3 for members in job.members.values())
    assert not job.problems
    job.cut((0,) * 4)
    for rank in set(range(4)) - job.launchers.keys():
        job.start(rank)
    job.pass_time(60)
    assert job.sizes() == [3], "once all are back it trains"
