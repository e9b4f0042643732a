"""Nodes that have no ranks of their own: which rank each one gets, and keeps."""

from __future__ import annotations

import pytest

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase


def arrived(low: int, high: int | None = None, **fields: object) -> World:
    """A job whose coordinator's own node, host-0, has joined."""
    world = World(low, high, by_arrival=True, **fields)
    world.join(world.call(0, host="host-0"))
    return world


def come(world: World, *hosts: str, **fields: object) -> list[int]:
    """Nodes without a rank call and join."""
    peers = [world.call(host=host, arrives=True, **fields) for host in hosts]
    world.join(*peers)
    return peers


def ranks(world: World, *peers: int) -> list[int]:
    """The ranks that these nodes were told last."""
    return [world.last(peer, msg.Formed).node_rank for peer in peers]


def restarted(world: World, *peers: int) -> None:
    """The generation is over, and these join again."""
    world.join(*peers)
    world.pass_time(6)


def test_ranks_follow_the_order_of_arrival_whatever_the_hosts_are_called() -> None:
    world = arrived(3)
    peers = come(world, "host-9", "host-1")
    formed = [world.last(peer, msg.Formed) for peer in (1, *peers)]
    assert [(one.group_rank, one.node_rank, one.size) for one in formed] == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_a_node_that_returns_is_known_by_its_name_and_keeps_its_rank() -> None:
    world = arrived(3)
    one, two = come(world, "a", "b")
    world.open_store()
    world.gone(one)
    world.gone(two)
    world.join(1)
    back = come(world, "b", "a")
    assert ranks(world, *back) == [2, 1]


def test_a_rank_waits_for_its_absent_node_until_a_new_one_finds_no_other() -> None:
    world = arrived(2, 4)
    (one,) = come(world, "a")
    world.pass_time(6)
    world.open_store()
    world.gone(one)
    restarted(world, 1)
    world.open_store()
    (new,) = come(world, "b")
    world.pass_time(1)
    restarted(world, 1)
    assert ranks(world, new) == [2]
    world.open_store()
    (back,) = come(world, "a")
    world.pass_time(1)
    restarted(world, 1, new)
    assert ranks(world, back) == [1]


def test_in_a_job_of_a_fixed_size_a_new_pod_takes_the_rank_of_the_lost_one() -> None:
    world = arrived(2)
    (one,) = come(world, "job-x7k2p")
    world.open_store()
    world.gone(one)
    world.join(1)
    (new,) = come(world, "job-9qzt4")
    assert ranks(world, new) == [1]


def test_two_launchers_on_one_machine_are_two_nodes() -> None:
    world = arrived(3)
    peers = come(world, "host-0", "host-0")
    assert ranks(world, *peers) == [1, 2]
    world.open_store()
    world.gone(peers[0])
    world.join(1, peers[1])
    (back,) = come(world, "host-0")
    assert ranks(world, back, peers[1]) == [1, 2]


def test_who_comes_to_a_complete_job_waits_as_a_spare_and_replaces_a_lost_node() -> None:
    world = arrived(2)
    one, two = come(world, "a", "b")
    world.open_store()
    world.pass_time(1)
    assert world.last(two, msg.Waiting) == msg.Waiting(2, 2, (), running=True)
    world.gone(one)
    world.join(1)
    assert ranks(world, 1, two) == [0, 2]


def test_a_new_coordinator_gives_each_node_the_rank_that_it_had_before() -> None:
    world = arrived(3)
    peers = [world.call(rank, host=host, arrives=True, generation=4) for rank, host in ((2, "b"), (1, "a"))]
    world.join(*peers, after=4)
    assert ranks(world, *peers) == [2, 1]


def test_a_rank_that_another_node_has_meanwhile_is_not_taken_from_it() -> None:
    world = arrived(3)
    come(world, "new")
    peer = world.call(1, host="a", arrives=True, generation=4)
    world.join(peer, after=4)
    assert ranks(world, peer) == [2]


@pytest.mark.parametrize("other_host", ["a", "b"])
def test_a_connection_that_was_reset_changes_no_rank(other_host: str) -> None:
    world = arrived(4)
    one, _ = come(world, "a", other_host)
    world.gone(one, ended=False)
    again = world.call(host="a", arrives=True, incarnation=world.incarnations[one])
    world.join(again)
    come(world, "c")
    assert ranks(world, again) == [1]


def test_a_process_that_comes_back_before_its_lease_has_ended_keeps_its_rank() -> None:
    world = arrived(2)
    (one,) = come(world, "a")
    world.open_store()
    world.gone(one, ended=False)
    (back,) = come(world, "a")
    world.join(1)
    assert ranks(world, back) == [1]


def test_an_elastic_job_gives_other_nodes_a_moment_to_start() -> None:
    world = arrived(1, 4)
    world.pass_time(3)
    assert world.phase is JobPhase.GATHERING
    come(world, "a")
    world.pass_time(3)
    assert world.last(1, msg.Formed).size == 2


def test_who_waits_is_said_with_names() -> None:
    world = arrived(4)
    come(world, "trainer-b")
    world.pass_time(1)
    assert world.said == ["2 of 4 nodes (host-0, trainer-b), waiting up to 600 s for node 2, node 3"]


def test_strangers_get_no_rank() -> None:
    world = arrived(2)
    stranger = world.call(host="x", job="another")
    assert world.last(stranger, msg.Refused) is not None
    (one,) = come(world, "a")
    assert ranks(world, one) == [1]
