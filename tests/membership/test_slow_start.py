"""A node whose torch takes minutes to import is well: nothing ends for it, and all who wait are told."""

from __future__ import annotations

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase


def starting(low: int = 2, **fields: float) -> tuple[World, int, int]:
    """A job whose first node still imports torch, and its first two nodes' peers."""
    world = World(low, **fields)
    zero, one = world.call(0), world.call(1)
    world.join(zero, prepared=False)
    world.join(one)
    assert world.phase is JobPhase.FORMED
    return world, zero, one


def test_an_import_of_nine_minutes_costs_nothing() -> None:
    world, zero, one = starting()
    world.pass_time(540)
    world.open_store()
    assert [world.count(peer, msg.Go) for peer in (zero, one)] == [1, 1]
    assert [world.count(peer, msg.Restart) for peer in (zero, one)] == [0, 0]
    assert world.state.restarts == 0


def test_who_waits_for_it_is_told_each_minute_and_it_is_not() -> None:
    world, zero, one = starting()
    world.pass_time(121)
    told = msg.Waiting(1, 2, ("node 0 (pod-0), which still imports torch",))
    assert world.heard(one, msg.Waiting)[-2:] == [told, told]
    assert told not in world.heard(zero, msg.Waiting)


def test_it_is_waited_for_as_long_as_for_any_node() -> None:
    world, _, one = starting(rejoin_timeout_s=300.0)
    world.pass_time(299)
    assert not world.is_over
    world.pass_time(2)
    end = world.last(one, msg.GiveUp)
    assert end.reason == (
        "node 0 (pod-0) still starts: it has been importing torch for 300 s, and --wait-timeout is 300 s"
    )


def test_one_that_is_lost_meanwhile_is_waited_for_as_a_lost_node() -> None:
    world, zero, one = starting()
    world.pass_time(10, silent=(zero,))
    assert world.count(one, msg.Restart) == 1
    assert world.phase is JobPhase.GATHERING


def test_one_that_could_start_and_opens_no_store_is_not_waited_for() -> None:
    world = World(2)
    zero, one = world.come(0, 1)
    world.pass_time(61)
    assert [world.count(peer, msg.Restart) for peer in (zero, one)] == [1, 1]
    assert world.last(one, msg.Restart).reason == "node 0 (pod-0) did not open the store in 60 s"
