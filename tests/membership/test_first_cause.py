"""Who failed by itself is named, although a worker that it cut off was faster to end."""

from __future__ import annotations

from tests.membership.world import running
from trainer_launch.membership import protocol as msg

CLOSED = "RuntimeError: gloo: Connection closed by peer"


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
