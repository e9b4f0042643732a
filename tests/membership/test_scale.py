"""What keeps a coordinator quick where there are thousands of nodes."""

from __future__ import annotations

from msgspec.structs import replace

from tests.membership.test_state import running
from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import Phase


def test_in_a_job_of_many_nodes_those_who_wait_hear_less_often_who_is_missing():
    world = World(1001)
    first, *_ = world.come(*range(500))
    world.pass_time(0.25)
    assert world.count(first, msg.Waiting) == 1
    world.come(500)
    world.pass_time(0.25)
    assert world.count(first, msg.Waiting) == 1, "500 messages take a while, too"
    world.pass_time(0.3)
    assert world.count(first, msg.Waiting) == 2


def test_members_are_found_as_in_a_tuple():
    world, _ = running(3)
    members = world.state.run.members
    assert members == (0, 1, 2)
    assert [key in members for key in (0, 2, 3, "0")] == [True, True, False, False]


def test_a_changed_value_is_what_dataclasses_would_make_of_it():
    world, _ = running(3)
    for value, changes in (
        (world.state, {"phase": Phase.GATHERING, "joined_s": 7.0}),
        (world.state.run, {"go_s": 7.0}),
        (world.state.nodes[0], {"joined": True}),
        (msg.GiveUp("one"), {"reason": "two"}),
    ):
        before = repr(value)
        assert replace(value, **changes) == replace(value, **changes)
        assert repr(value) == before
