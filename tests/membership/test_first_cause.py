"""Who is named for a failure: a rank that failed by itself or finished while others waited; never an innocent."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.membership.world import running
from trainer_launch.diagnosis.collectives import Collective, Group, RankState
from trainer_launch.diagnosis.stall import STALL, StallJudge
from trainer_launch.membership import protocol as msg

SENTENCE = "rank 1 finished with exit code 0 while rank 0 still waited for it: uneven data, a restart will not help"
CLOSED = "RuntimeError: gloo: Connection closed by peer"


def waits(world, peer, rank=0, finished=(), **how):
    world.say(peer, msg.Failed(world.number, rank, 1, None, CLOSED, "RuntimeError", True, finished), **how)


def last_entered(rank, number):
    """What a node tells of its rank."""
    last = (Collective(number, "all_reduce", "", 1),)
    return (RankState(rank=rank, groups={"0": Group(title="default_pg", entered=number, last=last)}),)


def returns(world, peer, finished=(), failed=False):
    world.say(peer, msg.Join(world.incarnations[peer], world.number, finished, failed))


def test_a_single_node_whose_rank_1_finished_while_rank_0_waited_is_over_at_once():
    world, (peer,) = running(1)
    waits(world, peer, finished=(1,))
    given_up = world.last(peer, msg.GiveUp)
    assert given_up.reason == SENTENCE
    assert (given_up.cause, given_up.rank, given_up.exit_code) == ("ProgramError", 0, 1)


def test_a_node_that_is_done_while_another_still_waits_ends_the_job_without_a_restart():
    world, (zero, one) = running(2)
    world.say(one, msg.Done(world.number))
    waits(world, zero)
    assert not world.is_over, "node 1 may be lost and the news of it slow"
    returns(world, one, finished=(1,))
    returns(world, zero, failed=True)
    assert world.is_over
    ends = [world.last(peer, msg.GiveUp) for peer in (zero, one)]
    assert {end.cause for end in ends} == {"ProgramError"}
    assert {end.reason for end in ends} == {SENTENCE}
    assert world.state.restarts == 0


def test_several_ranks_that_finished_are_all_named_once():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    returns(world, one, finished=(2, 3))
    returns(world, zero)
    assert world.last(zero, msg.GiveUp).reason.startswith("ranks 1-3 finished with exit code 0")


def test_the_sentence_has_what_each_rank_entered_last_as_far_as_its_node_knows():
    world, (zero, one) = running(2, judges=[StallJudge()])
    eleventh, tenth = (last_entered(rank, number) for rank, number in ((0, 11), (1, 10)))
    failed = msg.Failed(world.number, 0, 1, None, CLOSED, "RuntimeError", True, notes={STALL: eleventh})
    world.say(zero, failed)
    for _ in range(2):  # a node may say it again
        world.say(one, msg.Join(world.incarnations[one], world.number, (1,), notes={STALL: tenth}))
    world.join(zero)
    assert world.last(zero, msg.GiveUp).reason == SENTENCE.replace(
        ": uneven",
        "; last entered: rank 0 all_reduce #11 of default_pg, rank 1 all_reduce #10 of default_pg: uneven",
    )


def test_of_a_killed_rank_all_nodes_tell_what_the_others_entered_last():
    world, (zero, one, two) = running(3, judges=[StallJudge()], max_restarts=0)
    world.say(one, msg.Failed(world.number, 1, None, 9))
    for rank, peer in ((2, two), (0, zero)):
        world.say(peer, msg.Join(world.incarnations[peer], world.number, notes={STALL: last_entered(rank, 6)}))
    world.join(one)
    ends = [world.last(peer, msg.GiveUp) for peer in (zero, one, two)]
    assert {end.seen for end in ends} == {"last entered: ranks 0,2 all_reduce #6 of default_pg"}


@pytest.mark.parametrize(
    "said",
    [
        msg.Failed(1, 0, 1, None, "ValueError: x", "ValueError"),
        msg.Failed(1, 0, None, 6, "the ranks entered different collectives", cause="ProgramError"),
    ],
)
def test_who_says_of_its_end_something_itself_needs_no_collectives(said):
    world, (peer,) = running(1, judges=[StallJudge()], max_restarts=0)
    world.say(peer, replace(said, notes={STALL: last_entered(0, 6)}))
    assert world.last(peer, msg.GiveUp).seen == ""


def restarted(world, peers):
    world.join(*peers)
    world.pass_time(5)
    assert not world.is_over
    assert world.state.restarts == 1


def test_who_says_of_its_end_something_else_is_started_again_though_another_had_finished():
    world, (zero, one) = running(2)
    world.say(zero, msg.Failed(world.number, 0, 1, None, "ValueError: x", "ValueError", False, (1,)))
    returns(world, one, finished=(1,))
    restarted(world, (zero, one))


def test_a_worker_that_failed_for_a_reason_of_its_own_is_the_cause_whoever_told_first():
    world, (zero, one, two) = running(3)
    waits(world, zero)
    returns(world, one, finished=(1,))
    returns(world, two, failed=True)
    restarted(world, (zero,))


def test_where_nobody_had_finished_a_closed_connection_is_started_again():
    world, (zero, one) = running(2)
    waits(world, zero)
    returns(world, one)
    restarted(world, (zero,))


@pytest.mark.parametrize("leaves", [True, False], ids=["asked to stop", "killed"])
def test_a_pod_that_goes_is_no_program_that_finished(leaves):
    world, (zero, one) = running(2)
    waits(world, zero)
    world.say(one, msg.Leave("asked to stop")) if leaves else world.gone(one)
    world.join(zero)
    world.come(1)
    world.pass_time(5)
    assert not world.is_over
    assert world.state.restarts == 0, "a lost pod costs nothing"


def test_a_node_that_has_not_told_how_its_workers_ended_leaves_it_open():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    world.pass_time(5, silent=())
    assert not world.is_over
    assert world.state.restarts == 1
    restarted(world, (zero, one))


def test_a_pod_that_came_back_meanwhile_has_nothing_to_tell():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    world.say(one, msg.Join(world.incarnations[one], 0))
    world.join(zero)
    world.pass_time(5)
    assert not world.is_over


def cut_off(world, peer, rank=0):
    world.say(peer, msg.Failed(world.number, rank, 1, None, CLOSED, "RuntimeError", True))


def fails(world, peer, rank, message="ValueError: no"):
    world.say(peer, msg.Failed(world.number, rank, 1, None, message, message.partition(":")[0]))


def test_who_failed_by_itself_is_named_although_who_lost_it_was_faster():
    """Its worker may need seconds to end, as with a context of CUDA, and its connections close first."""
    world, (zero, one, two) = running(max_restarts=0)
    cut_off(world, zero)
    fails(world, one, 1)
    assert "rank 1 failed on node 1 (pod-1) with exit code 1; rank 0 had only lost its connection" in world.said
    world.join(one, zero, two)
    given_up = world.last(zero, msg.GiveUp)
    assert (given_up.rank, given_up.node, given_up.message) == (1, "node 1 (pod-1)", "ValueError: no")
    assert given_up.reason.startswith("rank 1 failed on node 1 (pod-1) with exit code 1, and ")


def test_it_costs_one_restart_like_any_failure():
    world, (zero, one, two) = running(max_restarts=1)
    cut_off(world, zero)
    fails(world, one, 1)
    world.join(one, zero, two)
    assert [world.last(peer, msg.Formed).restarts for peer in (zero, one, two)] == [1, 1, 1]
    assert [world.count(peer, msg.Restart) for peer in (zero, one, two)] == [0, 1, 1]


def test_the_first_of_those_that_failed_by_themselves_stays_named():
    world, (zero, one, two) = running(max_restarts=0)
    cut_off(world, zero)
    fails(world, one, 1)
    fails(world, two, 2)
    cut_off(world, two, 2)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 1
    world, (zero, one, two) = running(max_restarts=0)
    fails(world, zero, 0)
    fails(world, one, 1)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 0, "it had not lost a peer"


def test_nobody_else_is_named_for_words_of_an_earlier_generation_or_of_a_node_that_is_no_member():
    world, (zero, one, two) = running(max_restarts=1)
    number = world.number
    world.fail(one)
    world.join(one, zero, two)
    world.open_store()
    newcomer = world.call(3)
    cut_off(world, zero)
    world.say(one, msg.Failed(number, 1, 1, None, "ValueError: no", "ValueError"))
    fails(world, newcomer, 3)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 0


def test_two_starts_in_a_row_that_end_with_the_same_error_are_seen_behind_who_lost_the_peer():
    world, (zero, one, two) = running(max_restarts=9)
    for _ in range(2):
        cut_off(world, zero)
        fails(world, one, 1, "ModuleNotFoundError: No module named 'x'")
        if not world.is_over:
            world.join(one, zero, two)
            world.open_store()
    assert world.is_over
    assert "two starts in a row" in world.last(zero, msg.GiveUp).reason
